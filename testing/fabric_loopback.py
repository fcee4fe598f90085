"""A fabric inside one process: writes are memmoves, and the network can be told to stall or fail."""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.errors import FabricError
from kvbridge.transport.fabric import FabricEvent, Noticed, WriteFailed, WriteLate, Wrote, not_registered

PREFIX = b"loopback:"


class LoopbackNetwork:
    """Joins the loopback fabrics of one process. Each may be on a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fabrics: dict[str, LoopbackFabric] = {}
        self.stalled: set[str] = set()
        self.failing: dict[str, str] = {}

    def stall(self, incarnation: str) -> None:
        """Writes to `incarnation` neither end nor land until `resume`. Then the sender's bytes of that time land."""
        self.stalled.add(incarnation)

    def resume(self, incarnation: str) -> None:
        self.stalled.discard(incarnation)

    def fail(self, incarnation: str, reason: str = "peer_gone") -> None:
        """Writes to `incarnation`, under way or later, fail until `heal`; half of each one's bytes land."""
        self.failing[incarnation] = reason

    def heal(self, incarnation: str) -> None:
        self.failing.pop(incarnation, None)


@dataclass(slots=True)
class _LoopbackWrite:
    incarnation: str
    local_address: int
    remote_address: int
    size: int
    notice: bytes
    deadline: float
    is_late: bool = False


class LoopbackFabric:
    """Keeps the contract of `fabric.Fabric`; `incarnation` is unique in its network."""

    kind = "loopback"

    def __init__(self, network: LoopbackNetwork, incarnation: str) -> None:
        self._network = network
        self._incarnation = incarnation
        self._regions: list[tuple[int, int, bool]] = []
        self._peers: set[str] = set()
        self._lost: set[str] = set()
        self._writes: dict[int, _LoopbackWrite] = {}
        self._count = 0
        self._notices: deque[bytes] = deque()
        with network.lock:
            if incarnation in network.fabrics:
                raise FabricError("incarnation_taken", f"incarnation: {incarnation} is in the network already")
            network.fabrics[incarnation] = self

    def register(self, address: int, size: int, *, is_target: bool = True) -> None:
        if size < 1 or any(address < end and begin < address + size for begin, end, _ in self._regions):
            raise FabricError("region_overlaps", f"region: {size} bytes are empty or overlap another")
        self._regions.append((address, address + size, is_target))

    @property
    def name(self) -> str:
        return self._incarnation

    def successor(self, name: str) -> tuple[bytes, Callable[[], None]]:
        def become() -> None:
            with self._network.lock:
                self._network.fabrics[name] = self._network.fabrics.pop(self._incarnation)
                self._incarnation = name

        return PREFIX + name.encode(), become

    def unregister(self, address: int) -> bool:
        (region,) = [each for each in self._regions if each[0] == address]
        if any(region[0] <= write.local_address < region[1] for write in self._writes.values()):
            return False
        self._regions.remove(region)
        return True

    def descriptor(self) -> bytes:
        return PREFIX + self._incarnation.encode()

    def connect(self, incarnation: str, descriptor: bytes) -> None:
        if not descriptor.startswith(PREFIX):
            raise FabricError("descriptor_malformed", f"descriptor: not of a {self.kind} fabric")
        named = descriptor.removeprefix(PREFIX).decode(errors="replace")
        if named != incarnation:
            raise FabricError(
                "descriptor_of_another_incarnation", f"incarnation: peer says {incarnation}, its descriptor {named}"
            )
        self._peers.add(incarnation)

    def disconnect(self, incarnation: str) -> None:
        self._peers.discard(incarnation)
        self._lost.discard(incarnation)

    def distrust(self, incarnation: str) -> None:
        for write in self._writes.values():
            if write.incarnation == incarnation:
                write.deadline = -math.inf

    def write(
        self, incarnation: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        if incarnation not in self._peers:
            raise FabricError("peer_not_connected", f"peer: {incarnation} is not connected")
        if incarnation in self._lost and any(write.incarnation == incarnation for write in self._writes.values()):
            raise FabricError("peer_lost", f"peer: writes to {incarnation} are still to fail")
        self._lost.discard(incarnation)
        target = self._network.fabrics.get(incarnation)
        if not self._covers(local_address, size) or (target and not target._covers(remote_address, size, True)):
            raise not_registered(self._regions, local_address, size, incarnation)
        self._count += 1
        self._writes[self._count] = _LoopbackWrite(incarnation, local_address, remote_address, size, notice, deadline)
        return self._count

    def notify(self, incarnation: str, notice: bytes) -> None:
        if incarnation not in self._peers:
            raise FabricError("peer_not_connected", f"peer: {incarnation} is not connected")
        with self._network.lock:
            target = self._network.fabrics.get(incarnation)
            if target is None or incarnation in self._network.failing:
                raise FabricError("peer_lost", f"peer: {incarnation} is not there any more")
            target._notices.append(notice)

    def poll(self, now: float) -> list[FabricEvent]:
        events: list[FabricEvent] = []
        for number, write in list(self._writes.items()):
            if event := self._advance(number, write, now):
                events.append(event)
        while self._notices:
            events.append(Noticed(self._notices.popleft()))
        return events

    @property
    def is_busy(self) -> bool:
        return bool(self._writes)

    def close(self) -> None:
        with self._network.lock:
            if self._network.fabrics.get(self._incarnation) is self:
                del self._network.fabrics[self._incarnation]
        self._writes.clear()
        self._notices.clear()

    def _advance(self, number: int, write: _LoopbackWrite, now: float) -> FabricEvent | None:
        if write.incarnation in self._network.stalled:
            if now < write.deadline or write.is_late:
                return None
            write.is_late = True
            return WriteLate(number)
        del self._writes[number]
        with self._network.lock:  # the target's `close` must not take its memory away meanwhile
            target = self._network.fabrics.get(write.incarnation)
            reason = "peer_gone" if target is None else self._network.failing.get(write.incarnation)
            moved = write.size if reason is None else write.size // 2
            if target is not None:
                ctypes.memmove(write.remote_address, write.local_address, moved)
            if target is not None and reason is None:
                if write.notice:
                    target._notices.append(write.notice)
                return Wrote(number)
        self._lost.add(write.incarnation)
        return WriteFailed(number, reason or "peer_gone")

    def _covers(self, address: int, size: int, as_target: bool = False) -> bool:
        return size > 0 and any(
            begin <= address and address + size <= end and (is_target or not as_target)
            for begin, end, is_target in self._regions
        )
