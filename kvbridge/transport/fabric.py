"""The contract of a data fabric: one-sided writes into a peer's staging, each with a notice that follows its data.

It is shaped by what NIXL does: a posted write cannot be recalled, has no deadline of its own, and its notice leaves
only when the initiator polls the write to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import FabricError
from ..values import Value


class Wrote(Value):
    """The write succeeded: data and notice are at the peer, and the local bytes may be reused."""

    id: int


class WriteFailed(Value):
    """The write failed: some, all or none of its bytes are at the peer, no notice. The local bytes may be reused."""

    id: int
    reason: str


class WriteLate(Value):
    """The write's deadline passed, or its peer is distrusted. Reported once.

    It still reads the local and writes the remote bytes: reuse neither.

    Wrote or WriteFailed follows, perhaps minutes later, or the fabric is closed.
    """

    id: int


class Noticed(Value):
    """A notice reached us, after the data it came with. Anyone who knows our descriptor can send one."""

    payload: bytes


FabricEvent = Wrote | WriteFailed | WriteLate | Noticed


class Fabric(Protocol):
    """One agent's end of the fabric.

    Every call must come from the thread that made the fabric. Failures raise FabricError with a stable code; `poll`
    and `disconnect` never raise. Addresses are those of the process that owns the memory, sizes are in bytes, times in
    seconds of one monotonic clock.
    """

    @property
    def name(self) -> str:
        """Under which peers know it, unique among all fabrics."""

    @property
    def kind(self) -> str:
        """`nixl` or `loopback`. Both sides of a write must be of the same kind."""

    def register(self, address: int, size: int, *, is_target: bool = True) -> None:
        """Let writes read from this memory and, if `is_target`, let peers write into it. Regions must not overlap.

        Raises FabricError, with nothing registered.
        """

    def successor(self, name: str) -> tuple[bytes, Callable[[], None]]:
        """Prepare to be another fabric for peers, with the same targets. Raises FabricError.

        Returns its descriptor, and what to call to become it. That call does not fail. Our own writes go on, and what
        was on its way to the one before reaches us no more. Only a process of this machine may still write: it can do
        that without our fabric.
        """

    def unregister(self, address: int) -> bool:
        """Undo one `register` of memory that is no target. False, and nothing done, while a write out of it goes on."""

    def descriptor(self) -> bytes:
        """What a peer needs to write here. It names our incarnation and the targets registered so far."""

    def connect(self, incarnation: str, descriptor: bytes) -> None:
        """Make the peer's targets writable. Nothing is sent yet; connecting twice is fine.

        Raises FabricError `descriptor_of_another_incarnation` if it does not belong to `incarnation`,
        `descriptor_malformed`, or `peer_busy` while writes by another descriptor of this incarnation are under way.
        """

    def disconnect(self, incarnation: str) -> None:
        """Allow no more writes to this peer. Its connection may be kept in case this incarnation is connected again."""

    def distrust(self, incarnation: str) -> None:
        """The path to this peer was down: writes under way are late, and the next one uses another connection.

        A write that is late by itself does the same.
        """

    def write(
        self, incarnation: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        """Post one write and return its id, which the events of `poll` name. May block while the bytes move.

        An empty notice is not sent: the peer is not told of the write.

        After a failed write a later one reconnects, but only once all old writes have ended, and not soon after the
        last try. Until then, and while the peer is not there, it raises `peer_lost`. If `peer_lost`,
        `peer_not_connected`, `memory_not_registered` or `write_refused` is raised, nothing was posted.
        """

    def notify(self, incarnation: str, notice: bytes) -> None:
        """Send a notice alone, about data that is already at the peer. Raises as `write` does."""

    def poll(self, now: float) -> Sequence[FabricEvent]:
        """What happened since the last call. Without this call no write makes progress and no notice leaves."""

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way. If so, poll without pause."""

    def close(self) -> None:
        """Tear the fabric down: afterwards none of our memory is read or sent any more. Idempotent."""


def not_registered(regions: Sequence[tuple[int, int, bool]], address: int, size: int, incarnation: str) -> FabricError:
    """The error for a write beyond our `regions`, or the peer's. It names offsets: addresses do not belong in logs."""
    places = [f"byte {address - begin} of {end - begin} of ours" for begin, end, _ in regions if begin <= address < end]
    origin = places[0] if places else "outside of ours"
    return FabricError(
        "memory_not_registered", f"write: {size} bytes from {origin} to {incarnation}: not all is registered"
    )
