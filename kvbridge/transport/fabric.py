"""The data side's contract: one-sided writes into a peer's staging, each with a notice that follows its data.

What NIXL really does shaped it: a posted write cannot be recalled, has no deadline of its own, and its notice leaves
only when the initiator polls it to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import FabricError


@dataclass(frozen=True, slots=True)
class Wrote:
    """The write ended well: data and notice are at the peer, the local bytes are ours again."""

    id: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write ended with some, all or none of its bytes at the peer and no notice; the local bytes are ours again."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteLate:
    """The write's deadline passed, said once. It still reads the local and writes the remote bytes: reuse neither.

    Wrote or WriteFailed follows, perhaps minutes later, or the fabric is closed.
    """

    id: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """A notice reached us, and the data it came with before it. Anyone who knows our descriptor can send one."""

    payload: bytes


FabricEvent = Wrote | WriteFailed | WriteLate | Noticed


class Fabric(Protocol):
    """One agent's end of the data side.

    Every call is made on the thread that made the fabric. Whatever fails raises FabricError with a stable code;
    `poll` and `disconnect` never raise. Addresses are of this process, sizes in bytes, times in seconds of one
    monotonic clock.
    """

    @property
    def kind(self) -> str:
        """Both sides of a write are of one kind: `nixl`, `loopback`."""

    def register(self, address: int, size: int, *, is_target: bool = True) -> None:
        """Let writes read from this memory and, if `is_target`, let peers write into it. No two may overlap."""

    def descriptor(self) -> bytes:
        """What a peer needs to write here; names our incarnation and the targets registered before this call."""

    def connect(self, incarnation: str, descriptor: bytes) -> None:
        """Make the peer's targets writable. Nothing is sent yet; connecting twice is fine.

        `descriptor_of_another_incarnation` if it does not belong to `incarnation`, `descriptor_malformed`, `peer_busy`
        while writes to what another descriptor of this incarnation named are still under way.
        """

    def disconnect(self, incarnation: str) -> None:
        """No more writes to this peer. Its connection may be kept for when the same incarnation is connected again."""

    def write(
        self, incarnation: str, local_address: int, remote_address: int, size: int, notice: bytes, deadline: float
    ) -> int:
        """Post one write; its id comes back in the events of `poll`. May block while the bytes move.

        An empty notice is not sent: the peer hears nothing of the write.

        After a failed write a later one makes the connection anew, once all of the old have ended and not at once
        after it was last tried; until then, and while the peer is not there, `peer_lost`. That, `peer_not_connected`,
        `memory_not_registered` and `write_refused` mean: nothing was posted.
        """

    def notify(self, incarnation: str, notice: bytes) -> None:
        """Send a notice alone, about data that is at the peer already. Raises as `write` does."""

    def poll(self, now: float) -> Sequence[FabricEvent]:
        """What happened since the last call. Nothing moves on, and no notice leaves, without it."""

    @property
    def is_busy(self) -> bool:
        """A write is under way: poll hard."""

    def close(self) -> None:
        """Tear the fabric down: afterwards nothing of ours is read or sent any more. Idempotent."""


def not_registered(regions: Sequence[tuple[int, int, bool]], address: int, size: int, incarnation: str) -> FabricError:
    """For a write that goes beyond `regions`, ours, or the peer's. In offsets: addresses are no business of a log's."""
    places = [f"byte {address - begin} of {end - begin} of ours" for begin, end, _ in regions if begin <= address < end]
    origin = places[0] if places else "outside of ours"
    return FabricError(
        "memory_not_registered", f"write: {size} bytes from {origin} to {incarnation}: not all is registered"
    )
