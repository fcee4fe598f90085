"""The data network: one-sided writes that nobody can recall, and that the network may delay, fail or spoil.

A write needs no thread of either side in order to land, only that its target memory still exists. Its notice leaves
when the initiator polls and finds the write over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from kvbridge_proto.framing import BadFrame, decode, encode
from kvbridge_proto.peer import Notice

from kvbridge.errors import FabricError
from kvbridge.transport.fabric import WriteFailed, Wrote
from testing import fabric

from .faults import FAULTS_END_S
from .matter import NOTHING

if TYPE_CHECKING:
    from .process import Process
    from .world import World

FORGERIES: tuple[dict[str, Any], ...] = (
    {"token": b"forged" + bytes(10)},
    {"sender_incarnation": "feedfeedfeedfeed"},
    {"receiver_incarnation": "feedfeedfeedfeed"},
    {"sender_epoch": 99},
    {"receiver_epoch": 99},
    {"chunk_bytes": 1},
    {"chunk": 1 << 30},
    {"slot": 1 << 30},
    {"generation": 1 << 30},
    {"transfer": "nobody's"},
)
DYING_S = 0.02  # how long the writes of a killed process may still land; no restart is that fast


@dataclass(slots=True, kw_only=True)
class Write(fabric.Write):
    """`ended` is how, before its sender has seen it."""

    sender: Process
    ended: Wrote | WriteFailed | None = None


class DataNetwork:
    """The network between all pairs of agents, and what is wrong with it now."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.slow: dict[tuple[str, str], float] = {}  # pair -> the most seconds that a write takes
        self.failing: set[tuple[str, str]] = set()
        self.halfway: dict[tuple[str, str], int] = {}  # pair -> how many of the next writes fail but land later
        self.hung: set[tuple[str, str]] = set()
        self.spoil = 0  # how many of the next writes, and compared pulls of a chunk, arrive with a wrong cell
        self.wrongs = 0  # how many slots and pulled chunks have had cells that are not their writer's
        self.repeat = 0  # how many of the next notices come twice
        self.forging: dict[str, int] = {}  # incarnation -> how many of its next notices follow a forged one
        self._stuck: list[Write] = []

    def post(self, write: Write) -> None:
        pair = self._pair(write)
        if pair in self.hung or self._world.is_blocked(*pair):
            self._stuck.append(write)
            return
        slow = self.slow.get(pair)
        world = self._world
        seconds = world.uniform(0.05, slow) if slow and world.chance(0.6) else world.quick()
        world.clock.after(seconds, lambda: self._land(write))

    def go_on(self) -> None:
        """A fault is over: writes that hung go on, or fail."""
        stuck, self._stuck = self._stuck, []
        for write in stuck:
            self.post(write)

    def _pair(self, write: Write) -> tuple[str, str]:
        target = self._world.owner(write.incarnation)
        return write.sender.name, target.name if target else ""

    def _land(self, write: Write) -> None:
        world, pair = self._world, self._pair(write)
        if pair in self.hung or world.is_blocked(*pair):
            self._stuck.append(write)
            return
        sender, target = write.sender, world.owner(write.incarnation)
        if sender.is_dead and (world.clock.now > sender.died_at + DYING_S or world.chance(0.5)):
            return
        is_there = target is not None and not target.is_dead and write.incarnation in target.fabrics
        is_halfway = is_there and self.halfway.get(pair, 0) > 0 and write.local not in sender.lanes
        is_lost = not is_there or pair in self.failing or is_halfway
        if target is not None and is_halfway:
            self.halfway[pair] -= 1
            halves = world.pick((0, 1))
            self._copy(write, target, halves)
            self._land_later(write, target, halves)
        elif target is not None and is_there:
            self._copy(write, target, world.pick((0, 1, 2)) if is_lost else 2)
        seconds = world.quick()
        ended = WriteFailed(write.id, "peer_gone") if is_lost else Wrote(write.id)
        sender.thread.post(seconds, lambda: self._end(write, ended))

    def _land_later(self, write: Write, target: Process, halves: int) -> None:
        """The write fails, but its initiator's kernel has the rest. It lands later, whoever has the slot by then."""
        sent = list(write.sender.ram.get(write.local, []))
        first = len(sent) * halves // 2

        def land() -> None:
            if target.is_dead or write.incarnation not in target.fabrics:
                return
            before = target.ram.get(write.remote, [])
            held = before + [NOTHING] * (len(sent) - len(before))
            target.ram[write.remote] = held[:first] + sent[first:] + held[len(sent) :]
            self.wrongs += 1
            at = f"slot {target.slot_at(write.remote)} of {target.name}"
            self._world.say("network", f"the rest of a write of {write.sender.name} that failed lands in {at}")

        # The write's end and the slot's next lease take messages, so mostly a few ms.
        most = self._world.pick((0.004, 0.008, 0.016, 2.0))
        self._world.clock.at(min(self._world.clock.now + self._world.uniform(0.0, most), FAULTS_END_S - 1e-3), land)

    def _end(self, write: Write, ended: Wrote | WriteFailed) -> None:
        write.ended = ended
        write.sender.rouse()

    def _copy(self, write: Write, target: Process, halves: int) -> None:
        """0, 1 or 2 halves of the bytes arrive."""
        if write.local in write.sender.lanes:
            if halves == 2:
                target.lanes[write.remote] = write.sender.lanes[write.local]
            return
        sent = write.sender.ram.get(write.local, [])
        cells = sent[: len(sent) * halves // 2]
        if cells and halves == 2 and self.spoils():
            cells = [*cells[:-1], NOTHING - 1]
            self._world.say("network", f"spoils a byte of slot {target.slot_at(write.remote)} of {target.name}")
        if cells:
            before = target.ram.get(write.remote, [])
            target.ram[write.remote] = cells + before[len(cells) :]
            notice: Notice = decode(write.notice, Notice)
            if target.is_current(write.remote):
                self._world.on_write(write.sender, target, target.slot_at(write.remote), notice)

    def spoils(self) -> bool:
        """Whether the present move gets a wrong cell."""
        is_spoiled = self.refuses()
        self.wrongs += is_spoiled
        return is_spoiled

    def refuses(self) -> bool:
        """Whether the present move does not begin, instead of getting a wrong cell."""
        self.spoil, refused = max(0, self.spoil - 1), self.spoil > 0
        return refused

    def notify(self, sender: Process, incarnation: str, notice: bytes) -> None:
        """Send a notice. It follows its data."""
        target = self._world.owner(incarnation)
        if target is None or target.is_dead or incarnation not in target.fabrics:
            return
        if self.forging.get(incarnation):
            self.forging[incarnation] -= 1
            self._forge(target.fabrics[incarnation], notice)
        times = 1
        if self.repeat:
            self.repeat -= 1
            times = 2
        for i in range(times):
            seconds = self._world.quick() if not i else self._world.uniform(0.0, 2.0)
            self._world.clock.after(seconds, partial(target.fabrics[incarnation].arrived, notice))

    def _forge(self, target: SlotFabric, payload: bytes) -> None:
        try:
            right: Notice = decode(payload, Notice)
        except BadFrame:
            return
        forged = msgspec.structs.replace(right, **self._world.pick(FORGERIES))
        self._world.forged.add(forged)
        target.arrived(encode(forged))


class SlotFabric(fabric.PlayedFabric[Write]):
    """That of a simulated process."""

    kind = "simulated"

    def __init__(self, process: Process, name: str) -> None:
        super().__init__(name)
        self._process = process

    def register(self, address: int, size: int, *, is_target: bool = True) -> None: ...

    def successor(self, name: str) -> tuple[bytes, Callable[[], None]]:
        raise FabricError("fabric_unavailable", "all agents of this network are on one machine")

    def unregister(self, address: int) -> bool:
        return not any(write.local >> 32 == address >> 32 for write in self._writes.values())  # `World.next_base`

    def descriptor(self) -> bytes:
        return self._name.encode()

    def connect(self, incarnation: str, descriptor: bytes) -> None:
        if descriptor != incarnation.encode():
            raise FabricError("descriptor_of_another_incarnation", f"incarnation: {incarnation}")
        self._peers.add(incarnation)

    def distrust(self, incarnation: str) -> None: ...  # writes of this network wait for no connection

    def write(
        self, incarnation: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        number, sender = self._next(incarnation), self._process
        write = Write(number, incarnation, local_address, remote_address, size, notice, deadline, sender=sender)
        self._writes[write.id] = write
        sender.thread.post(deadline - sender.world.clock.now + 1e-6, sender.rouse)
        sender.world.data.post(write)
        return number

    def notify(self, incarnation: str, notice: bytes) -> None:
        self._next(incarnation)
        self._tell(incarnation, notice)

    def _ended(self, write: Write) -> Wrote | WriteFailed | None:
        return write.ended

    def _tell(self, incarnation: str, notice: bytes) -> None:
        self._process.world.data.notify(self._process, incarnation, notice)

    def arrived(self, notice: bytes) -> None:
        self._notices.append(notice)
        self._process.rouse_if_looking()

    @property
    def under_way(self) -> int:
        return len(self._writes)

    def close(self) -> None:
        """After this, nothing is written here and nothing arrives."""
        self._process.fabrics.pop(self._name, None)
