"""Fabrics that tests tell to stall or fail: what they do alike, and one inside a process, whose writes are memmoves."""

from __future__ import annotations

import abc
import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbridge.errors import FabricError
from kvbridge.transport.fabric import FabricEvent, Noticed, WriteFailed, WriteLate, Wrote, not_registered

PREFIX = b"loopback:"


@dataclass(slots=True)
class Write:
    """A write under way. Its local bytes are read when it lands, not when it is posted."""

    id: int
    incarnation: str
    local: int
    remote: int
    size: int
    notice: bytes
    deadline: float
    is_late: bool = False


W = TypeVar("W", bound=Write)


class PlayedFabric(abc.ABC, Generic[W]):
    """Keeps the contract of `fabric.Fabric` as to peers, and to the ends of writes and their notices."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._peers: set[str] = set()
        self._lost: set[str] = set()
        self._writes: dict[int, W] = {}
        self._count = 0
        self._notices: deque[bytes] = deque()

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_busy(self) -> bool:
        return bool(self._writes)

    def disconnect(self, incarnation: str) -> None:
        self._peers.discard(incarnation)
        self._lost.discard(incarnation)

    def poll(self, now: float) -> list[FabricEvent]:
        events: list[FabricEvent] = []
        for write in list(self._writes.values()):
            if (ended := self._ended(write)) is not None:
                del self._writes[write.id]
                if isinstance(ended, WriteFailed):
                    self._lost.add(write.incarnation)
                elif write.notice:
                    self._tell(write.incarnation, write.notice)
                events.append(ended)
            elif now >= write.deadline and not write.is_late:
                write.is_late = True
                events.append(WriteLate(write.id))
        while self._notices:
            events.append(Noticed(self._notices.popleft()))
        return events

    @abc.abstractmethod
    def _ended(self, write: W) -> Wrote | WriteFailed | None:
        """How a write has ended; None if it is under way."""

    @abc.abstractmethod
    def _tell(self, incarnation: str, notice: bytes) -> None:
        """Have a notice arrive at a peer, if it is still there."""

    def _next(self, incarnation: str) -> int:
        """The number of a write or notice to this peer. Raises FabricError if there may be none."""
        if incarnation not in self._peers:
            raise FabricError("peer_not_connected", f"peer: {incarnation} is not connected")
        if incarnation in self._lost and any(write.incarnation == incarnation for write in self._writes.values()):
            raise FabricError("peer_lost", f"peer: writes to {incarnation} are still to fail")
        self._lost.discard(incarnation)
        self._count += 1
        return self._count


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
        """Writes to `incarnation`, under way or later, fail; half of each one's bytes land."""
        self.failing[incarnation] = reason


class LoopbackFabric(PlayedFabric[Write]):
    """Its `incarnation` is unique in its network."""

    kind = "loopback"

    def __init__(self, network: LoopbackNetwork, incarnation: str) -> None:
        super().__init__(incarnation)
        self._network = network
        self._regions: list[tuple[int, int, bool]] = []
        with network.lock:
            if incarnation in network.fabrics:
                raise FabricError("incarnation_taken", f"incarnation: {incarnation} is in the network already")
            network.fabrics[incarnation] = self

    def register(self, address: int, size: int, *, is_target: bool = True) -> None:
        if size < 1 or any(address < end and begin < address + size for begin, end, _ in self._regions):
            raise FabricError("region_overlaps", f"region: {size} bytes are empty or overlap another")
        self._regions.append((address, address + size, is_target))

    def successor(self, name: str) -> tuple[bytes, Callable[[], None]]:
        def become() -> None:
            with self._network.lock:
                self._network.fabrics[name] = self._network.fabrics.pop(self._name)
                self._name = name

        return PREFIX + name.encode(), become

    def unregister(self, address: int) -> bool:
        (region,) = [each for each in self._regions if each[0] == address]
        if any(region[0] <= write.local < region[1] for write in self._writes.values()):
            return False
        self._regions.remove(region)
        return True

    def descriptor(self) -> bytes:
        return PREFIX + self._name.encode()

    def connect(self, incarnation: str, descriptor: bytes) -> None:
        if not descriptor.startswith(PREFIX):
            raise FabricError("descriptor_malformed", f"descriptor: not of a {self.kind} fabric")
        named = descriptor.removeprefix(PREFIX).decode(errors="replace")
        if named != incarnation:
            raise FabricError(
                "descriptor_of_another_incarnation", f"incarnation: peer says {incarnation}, its descriptor {named}"
            )
        self._peers.add(incarnation)

    def distrust(self, incarnation: str) -> None:
        for write in self._writes.values():
            if write.incarnation == incarnation:
                write.deadline = -math.inf

    def write(
        self, incarnation: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        number, target = self._next(incarnation), self._network.fabrics.get(incarnation)
        if not self._covers(local_address, size) or (target and not target._covers(remote_address, size, True)):
            raise not_registered(self._regions, local_address, size, incarnation)
        self._writes[number] = Write(number, incarnation, local_address, remote_address, size, notice, deadline)
        return number

    def notify(self, incarnation: str, notice: bytes) -> None:
        self._next(incarnation)
        if incarnation not in self._network.fabrics or incarnation in self._network.failing:
            raise FabricError("peer_lost", f"peer: {incarnation} is not there any more")
        self._tell(incarnation, notice)

    def close(self) -> None:
        with self._network.lock:
            if self._network.fabrics.get(self._name) is self:
                del self._network.fabrics[self._name]
        self._writes.clear()
        self._notices.clear()

    def _ended(self, write: Write) -> Wrote | WriteFailed | None:
        if write.incarnation in self._network.stalled:
            return None
        with self._network.lock:  # the target's `close` must not take its memory away meanwhile
            is_there = write.incarnation in self._network.fabrics
            reason = self._network.failing.get(write.incarnation) if is_there else "peer_gone"
            if is_there:
                ctypes.memmove(write.remote, write.local, write.size // 2 if reason else write.size)
        return WriteFailed(write.id, reason) if reason else Wrote(write.id)

    def _tell(self, incarnation: str, notice: bytes) -> None:
        with self._network.lock:
            if target := self._network.fabrics.get(incarnation):
                target._notices.append(notice)

    def _covers(self, address: int, size: int, as_target: bool = False) -> bool:
        return size > 0 and any(
            begin <= address and address + size <= end and (is_target or not as_target)
            for begin, end, is_target in self._regions
        )
