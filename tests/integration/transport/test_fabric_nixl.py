"""The NIXL fabric between real processes: what arrives, what is late, what fails, and that idleness is cheap."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import FabricError
from kvbridge.transport.fabric_nixl import HEAL_S, WRITER_S, NixlFabric, _header
from testing.nursery import PipedChild
from testing.proc import cpu_s, listening, stat_of
from testing.refusals import refused
from testing.waiting import wait_for
from tests.system.faults.processes import Held
from tests.system.faults.world import UCX_KEEPS

nixl = pytest.importorskip("nixl._bindings", reason="needs NIXL (extra `agent`)")

KIB, MIB = 1 << 10, 1 << 20
ROOT = Path(__file__).parents[3]


class Remote:
    """A `nixl_peer.py` and the pipe to it; ends it, stopped or not, on leaving."""

    def __init__(self, incarnation: str, size: int = 8 * MIB, environment: dict[str, str] | None = None) -> None:
        self.incarnation = incarnation
        self._child = PipedChild("tests.integration.transport.nixl_peer", incarnation, size, env=environment)
        self.descriptor, self.address = "", 0

    def __enter__(self) -> Remote:
        self.meet()
        return self

    def meet(self) -> None:
        told = self._line()
        self.descriptor, self.address = told["descriptor"], told["address"]

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, verb: str, **arguments: Any) -> Any:
        self.post(verb, **arguments)
        return self.answer()

    def post(self, verb: str, **arguments: Any) -> None:
        self._child.stdin.write(json.dumps([verb, arguments]).encode() + b"\n")
        self._child.stdin.flush()

    def answer(self) -> Any:
        told = self._line()
        if "error" in told:
            raise FabricError(told["error"], told["text"])
        return told["ok"]

    def stop(self) -> None:
        """As if it hung. Returns once every thread stands still: the signal alone takes its time."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        while any(stat_of(task)[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._child.close()

    def _line(self) -> Any:
        assert select.select([self._child.stdout], [], [], 60)[0], f"{self.incarnation} does not answer"
        return json.loads(self._child.stdout.readline() or "{}")

    def write(
        self,
        to: Remote,
        *,
        size: int = 64 * KIB,
        notice: str = "n",
        deadline_s: float = 30,
        at: int = 0,
        offset: int = 0,
    ) -> int:
        number: int = self.ask(
            "write",
            incarnation=to.incarnation,
            offset=offset,
            remote=to.address + at,
            size=size,
            notice=notice,
            deadline_s=deadline_s,
        )
        return number


@contextlib.contextmanager
def two() -> Iterator[tuple[Remote, Remote]]:
    with Remote("peer-send") as sender, Remote("peer-recv") as receiver:
        sender.ask("connect", incarnation=receiver.incarnation, descriptor=receiver.descriptor)
        yield sender, receiver


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Remote, Remote]]:
    """Shared by the tests that leave it whole: a process with NIXL takes seconds to start."""
    with two() as sides:
        yield sides


@pytest.fixture
def doomed() -> Iterator[tuple[Remote, Remote]]:
    with two() as sides:
        yield sides


def wrote(sender: Remote) -> list[Any]:
    events = sender.ask("watch", for_s=30, until="wrote")
    return [event[1:] for event in events]


def writes(sender: Remote, receiver: Remote, **more: Any) -> None:
    """It can, and hears of it."""
    number = sender.write(receiver, **more)
    assert wrote(sender) == [["wrote", number, ""]]


def test_data_and_then_its_notice_arrive(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    for byte, size in enumerate((1, 4 * KIB, 4 * MIB), start=1):
        expected = sender.ask("fill", offset=0, size=size, byte=byte)
        writes(sender, receiver, size=size, notice=f"chunk {byte}", at=64)
        assert [event[1:3] for event in receiver.ask("watch", for_s=60, until="noticed")] == [
            ["noticed", f"chunk {byte}"]
        ]
        assert receiver.ask("sum", offset=64, size=size) == expected


def test_a_stopped_target_makes_a_write_late_once_and_it_ends_when_the_target_goes_on(
    pair: tuple[Remote, Remote],
) -> None:
    sender, receiver = pair
    receiver.stop()
    number = sender.write(receiver, deadline_s=0.5)
    assert [event[1:] for event in sender.ask("watch", for_s=60, until="late")] == [["late", number, ""]]
    assert not sender.ask("watch", for_s=1.0)
    receiver.go_on()
    assert wrote(sender) == [["wrote", number, ""]]
    assert receiver.ask("watch", for_s=60, until="noticed")


def test_after_a_late_write_another_connection_is_used_and_the_old_one_is_followed_to_its_end(
    pair: tuple[Remote, Remote],
) -> None:
    sender, receiver = pair
    receiver.stop()
    old = sender.write(receiver, deadline_s=0.2)
    assert sender.ask("watch", for_s=60, until="late")[-1][1:3] == ["late", old]
    new = sender.write(receiver, at=MIB)
    assert sender.ask("writers") == 2
    receiver.go_on()
    seen: list[Any] = []
    while len(seen) < 2:
        seen += [event[1:3] for event in sender.ask("watch", for_s=30, until="wrote")]
    assert sorted(seen) == [["wrote", old], ["wrote", new]]
    assert sender.ask("writers") == 1, "nothing is under way on the old connection, and nobody else uses its writer"


def test_memory_is_unregistered_once_no_write_out_of_it_is_under_way(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    offset = sender.ask("register_more", size=MIB)
    receiver.stop()
    old = sender.write(receiver, offset=offset)
    sender.ask("distrust", incarnation=receiver.incarnation)
    assert sender.ask("watch", for_s=60, until="late")[-1][1:3] == ["late", old], "nobody waits for its deadline"
    sender.write(receiver, at=MIB)  # another writer knows the same memory
    assert sender.ask("unregister", offset=offset) is False
    receiver.go_on()
    seen: list[Any] = []
    while len(seen) < 2:
        seen += sender.ask("watch", for_s=30, until="wrote")
    assert sender.ask("unregister", offset=offset) is True
    with refused(FabricError, "memory_not_registered"):
        sender.write(receiver, offset=offset)
    writes(sender, receiver)


class Registering:
    """A NIXL agent that knows where its memory is. It may have no room for more, or not be able to describe it."""

    def __init__(self, name: str = "") -> None:
        self.known: list[int] = []
        self.is_full = self.is_mute = False
        self._header = _header(name)

    def registerMem(self, region: Any, backends: list[int]) -> None:
        if self.is_full:
            raise nixl.nixlBackendError("no room")
        self.known.append(region[0][0])

    def deregisterMem(self, region: Any, backends: list[int]) -> None:
        self.known.remove(region[0][0])

    def getLocalPartialMD(self, region: Any, has_connection: bool, backends: list[int]) -> bytes:
        if self.is_mute:
            raise nixl.nixlBackendError("no descriptor")
        return self._header


@pytest.mark.parametrize(("is_target", "full"), [(True, 0), (True, 1), (True, 2), (False, 1), (False, 2)])
def test_memory_that_one_agent_cannot_register_is_known_to_no_other(
    is_target: bool, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = [Registering() for _ in range(3)]  # the one that is written to, and two that write
    opening = iter(agents)
    monkeypatch.setattr(NixlFabric, "_open", lambda self, name: (next(opening), 0))
    fabric = NixlFabric("peer")
    fabric._writers.append(fabric._new_writer())
    fabric.register(MIB, KIB)
    fabric.register(2 * MIB, KIB, is_target=False)
    agents[full].is_full = True
    with refused(FabricError, "registration_failed"):
        fabric.register(3 * MIB, KIB, is_target=is_target)
    assert [each.known for each in agents] == [[MIB], [MIB, 2 * MIB], [MIB, 2 * MIB]]
    agents[full].is_full = False
    fabric.register(3 * MIB, KIB, is_target=is_target)
    fabric.register(4 * MIB, KIB, is_target=False)
    assert fabric.unregister(4 * MIB)
    assert [each.known for each in agents[1:]] == [[MIB, 2 * MIB, 3 * MIB]] * 2


def test_a_successor_that_cannot_be_described_leaves_the_fabric_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [Registering(name) for name in ("peer", "peer~1", "mute", "next")]
    opening = iter(agents)
    monkeypatch.setattr(NixlFabric, "_open", lambda self, name: (next(opening), 0))
    fabric = NixlFabric("peer")
    fabric.register(MIB, KIB)
    before = fabric.descriptor()
    agents[2].is_mute = True
    with refused(FabricError, "descriptor_failed"):
        fabric.successor("mute")
    assert fabric.name == "peer" and fabric.descriptor() == before and agents[0].known == [MIB]
    descriptor, become = fabric.successor("next")
    assert fabric.descriptor() == before != descriptor
    become()
    assert fabric.name == "next" and fabric.descriptor() == descriptor
    assert not agents[0].known and agents[3].known == [MIB]


def test_connections_that_are_not_trusted_are_replaced_and_closed(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    writes(sender, receiver)
    before = [Held.by(side.pid) for side in pair]
    made = sender.ask("writers_made")
    for i in range(1, 4):
        sender.ask("age", by_s=WRITER_S)
        sender.ask("distrust", incarnation=receiver.incarnation)
        writes(sender, receiver)
        assert (sender.ask("writers"), sender.ask("writers_made")) == (1, made + i)
    wait_for(lambda: all(Held.by(s.pid).is_within(b, 3 * UCX_KEEPS) for s, b in zip(pair, before, strict=True)))


def test_a_link_that_is_lost_again_and_again_makes_few_writers(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    sender.ask("age", by_s=WRITER_S)
    made = sender.ask("writers_made")
    for _ in range(4):
        sender.ask("distrust", incarnation=receiver.incarnation)
        writes(sender, receiver)
        sender.ask("age", by_s=-3600)  # however slow this machine is, the others follow soon
    assert sender.ask("writers_made") == made + 1, "the connection will do, as nothing was under way on it"
    receiver.stop()
    old = sender.write(receiver)
    sender.ask("distrust", incarnation=receiver.incarnation)
    new = sender.write(receiver, at=MIB)
    assert sender.ask("writers_made") == made + 2, "one is under way: the next waits for no connection"
    receiver.go_on()
    seen: set[int] = set()
    while seen != {old, new}:
        seen |= {event[2] for event in sender.ask("watch", for_s=30, until="wrote") if event[1] == "wrote"}


@pytest.mark.proves("G6")
def test_what_was_on_its_way_to_a_fabric_does_not_reach_its_successor(doomed: tuple[Remote, Remote]) -> None:
    sender, receiver = doomed
    writes(sender, receiver)
    receiver.ask("fill", offset=0, size=8 * MIB, byte=1)
    receiver.stop()
    sender.ask("fill", offset=0, size=8 * MIB, byte=2)
    number = sender.write(receiver, size=8 * MIB)  # more than both kernels buffer
    sender.stop()
    receiver.go_on()
    with Remote("peer-other") as other:
        other.ask("connect", incarnation="peer-next", descriptor=receiver.ask("succeed", name="peer-next"))
        found = receiver.ask("sum", offset=0, size=8 * MIB)
        sender.go_on()
        assert [event[1:3] for event in sender.ask("watch", for_s=60, until="failed")] == [["failed", number]]
        assert receiver.ask("sum", offset=0, size=8 * MIB) == found, "a write to the one before goes on"
        expected = other.ask("fill", offset=0, size=KIB, byte=3)
        other.ask(
            "write", incarnation="peer-next", offset=0, remote=receiver.address, size=KIB, notice="n", deadline_s=30
        )
        other.ask("watch", for_s=30, until="wrote")
        assert receiver.ask("sum", offset=0, size=KIB) == expected


def test_a_killed_target_fails_the_writes_under_way_and_those_after(doomed: tuple[Remote, Remote]) -> None:
    sender, receiver = doomed
    writes(sender, receiver)
    receiver.stop()
    numbers = [sender.write(receiver, size=4 * MIB) for _ in range(3)]
    receiver.kill()
    ended: dict[int, str] = {}
    while len(ended) < 3:
        events = sender.ask("watch", for_s=60, until="failed")
        assert events
        ended |= {event[2]: event[1] for event in events}
    assert ended == dict.fromkeys(numbers, "failed")
    began = time.monotonic()
    for _ in range(20):  # each as soon as the one before
        with refused(FabricError, "peer_lost"):
            sender.write(receiver)
    tried = (time.monotonic() - began) // HEAL_S  # on a busy machine that took so long
    assert Held.by(sender.pid).over <= UCX_KEEPS + tried
    time.sleep(HEAL_S)
    with pytest.raises(FabricError, match="any more"):  # the way back is tried again
        sender.write(receiver)


def test_a_peer_that_restarted_with_a_new_incarnation_is_written_again(doomed: tuple[Remote, Remote]) -> None:
    sender, receiver = doomed
    writes(sender, receiver)
    receiver.kill()
    sender.write(receiver)
    sender.ask("watch", for_s=60, until="failed")
    sender.ask("disconnect", incarnation=receiver.incarnation)
    with Remote("peer-recv-2") as again:
        sender.ask("connect", incarnation=again.incarnation, descriptor=again.descriptor)
        writes(sender, again)


def test_a_disconnect_waits_for_the_writes_under_way(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    receiver.stop()
    number = sender.write(receiver)
    sender.ask("disconnect", incarnation=receiver.incarnation)
    with refused(FabricError, "peer_not_connected"):
        sender.write(receiver)
    receiver.go_on()
    assert wrote(sender) == [["wrote", number, ""]]
    sender.ask("connect", incarnation=receiver.incarnation, descriptor=receiver.descriptor)
    writes(sender, receiver)


def test_closing_is_bounded_even_while_the_target_is_stopped(doomed: tuple[Remote, Remote]) -> None:
    sender, receiver = doomed
    writes(sender, receiver)
    receiver.stop()
    sender.write(receiver, size=4 * MIB)
    assert sender.ask("close") < 60


def test_refuses_descriptors_of_other_incarnations_and_garbage(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    good = bytes.fromhex(receiver.descriptor)
    for incarnation, descriptor, code in (
        ("peer-other", good, "descriptor_of_another_incarnation"),
        ("peer-rec", good, "descriptor_of_another_incarnation"),
        ("peer-send", bytes.fromhex(sender.descriptor), "descriptor_of_another_incarnation"),
        ("peer-other", b"", "descriptor_of_another_incarnation"),
        ("peer-other", bytes(4) + b"nixlSerDes|Agent" + b"\xff" * 64, "descriptor_of_another_incarnation"),
        ("peer-other", b"x" * (1 << 17), "descriptor_malformed"),
        ("peer-recv2", good[:20] + b"\x0a" + good[21:28] + b"peer-recv2|Conns\x08", "descriptor_malformed"),
    ):
        with pytest.raises(FabricError) as raised:
            sender.ask("connect", incarnation=incarnation, descriptor=descriptor.hex())
        assert raised.value.code == code, descriptor[:40]
    writes(sender, receiver)  # the honest peer was not touched


@pytest.mark.proves("G1")
def test_refuses_writes_outside_registered_memory(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    for at, size in ((8 * MIB, 64), (8 * MIB - 32, 64), (-64, 64), (0, 8 * MIB + 1), (0, 0)):
        with refused(FabricError, "memory_not_registered") as raised:
            sender.write(receiver, at=at, size=size)
        said = str(raised.value)
        assert (
            f"{size} bytes" in said
            and f"{receiver.address:x}"[:6] not in said
            and f"{sender.address:x}"[:6] not in said
        )
    with refused(FabricError, "peer_not_connected"):
        sender.ask("write", incarnation="nobody", offset=0, remote=receiver.address, size=1, notice="", deadline_s=1)


@pytest.mark.proves("G1")
def test_peers_write_only_into_targets(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    offset = receiver.ask("register_more", size=KIB)
    descriptor = receiver.ask("describe")["descriptor"]
    sender.ask("connect", incarnation=receiver.incarnation, descriptor=descriptor)
    with refused(FabricError, "memory_not_registered"):
        sender.write(receiver, at=offset, size=64)
    writes(sender, receiver)
    assert receiver.ask("unregister", offset=offset) is True


def test_an_idle_pair_sleeps(pair: tuple[Remote, Remote]) -> None:
    sender, receiver = pair
    writes(sender, receiver)
    shares = [idle_shares(pair) for _ in range(3)]  # what still ends with the write is in the first of them
    for side, least in zip(pair, map(min, zip(*shares, strict=True)), strict=True):
        assert least < 0.03, f"{side.incarnation} used {least:.1%} of a core while idle"


def idle_shares(pair: tuple[Remote, Remote]) -> list[float]:
    """Of a core, that each side uses in a while."""
    begin, before = time.monotonic(), [cpu_s(side.pid) for side in pair]
    time.sleep(1.5)
    passed = time.monotonic() - begin
    return [(cpu_s(side.pid) - spent) / passed for side, spent in zip(pair, before, strict=True)]


def test_listens_on_no_device_but_the_one_it_was_told(pair: tuple[Remote, Remote]) -> None:
    _, receiver = pair
    assert {place.rpartition(":")[0] for place in listening(receiver.pid)} == {"127.0.0.1"}


def test_a_fabric_with_nothing_to_write_into_has_no_descriptor() -> None:
    fabric = NixlFabric("peer-empty", net_devices="lo")
    with refused(FabricError, "descriptor_failed"):
        fabric.descriptor()
    fabric.close()
    fabric.close()


def test_forgets_those_that_were_left_longest_ago() -> None:
    fabrics = [NixlFabric(f"peer-{name}", net_devices="lo", idle_peers=2) for name in "abcd"]
    ours, *others = fabrics
    memory = [np.zeros(4096, np.uint8) for _ in others]
    for other, region in zip(others, memory, strict=True):
        other.register(region.ctypes.data, region.size)
        ours.connect(other._incarnation, other.descriptor())
    for other in others:
        ours.disconnect(other._incarnation)
    assert ours.known == ["peer-c", "peer-d"]
    ours.connect("peer-c", others[1].descriptor())
    ours.connect("peer-b", others[0].descriptor())
    for incarnation in ("peer-b", "peer-c"):
        ours.disconnect(incarnation)
    assert ours.known == ["peer-b", "peer-c"]
    for fabric in fabrics:
        fabric.close()
