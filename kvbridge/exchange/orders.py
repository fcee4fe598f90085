"""What the exchange asks of the data plane, and what that reports: one queue each way, in order. Records only. Pure.

A transfer is ordered once, at each of its ends. After its Stop there is always one `Quiet`, and nothing of that
transfer after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge_proto.peer import Route, SlotLease, Sum

from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable
from .leases import ReadLease
from .session import Whose

Failure = tuple[str, str] | None  # (code, reason)

# To the data plane of a sender:


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Gather the chunks of a transfer, in their order, and write each into a slot that its receiver lends.

    `request` is our engine's name for what it has offered. It is over once the last chunk is written.
    """

    transfer: str
    request: str
    incarnation: str
    plan: Plan
    token: bytes
    receiver_epoch: int
    digest_kind: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The first `ready` chunks are in these blocks of our engine once its fence has reached `fence`."""

    transfer: str
    tables: Mapping[int, BlockTable]
    ready: int
    fence: int


@dataclass(frozen=True, slots=True)
class Credit:
    """The receiver lends these slots, for one write each."""

    transfer: str
    leases: tuple[SlotLease, ...]


@dataclass(frozen=True, slots=True)
class StopSending:
    """Gather nothing more for this transfer, and end what waits for the engine's fence. What is begun goes on."""

    transfer: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest a chunk that its receiver has read, `read` being what it found. It takes no slot.

    Its receiver was told of the blocks, so the engine's fence has reached them. `request` is as in SendOrder.
    """

    transfer: str
    request: str
    plan: Plan
    tables: Mapping[int, BlockTable]
    read: Sum


@dataclass(frozen=True, slots=True)
class Watch:
    """Say when our engine's fence has reached this count: readers wait for what was computed until then."""

    fence: int


# To the data plane of a receiver:


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Put the chunks of a transfer that land in our slots into the engine's blocks, not before the fence says so.

    Given before the sender is asked for anything. It is over once all chunks are in the blocks.
    """

    transfer: str
    plan: Plan
    tables: Mapping[int, BlockTable]
    token: bytes
    sender_incarnation: str
    receiver_incarnation: str
    sender_epoch: int
    receiver_epoch: int
    digest_kind: str
    route: Route
    fence: int


@dataclass(frozen=True, slots=True)
class Lend:
    """The sender may write these slots, each once. Given before the sender hears of it."""

    transfer: str
    leases: tuple[SlotLease, ...]


@dataclass(frozen=True, slots=True)
class StopReceiving:
    """Begin nothing more of this transfer, and end what waits for the engine's fence. What is being moved goes on."""

    transfer: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Read chunks [first_chunk, end_chunk) out of the blocks of the sender's engine into ours, on the route `pull`.

    Not before the fence says so. `peer_tables` are of the engine `whose` memory that is, `tables` of ours.
    What was read after the end of `lease` does not count. Chunks that are `compared` are digested as they are read.
    """

    transfer: str
    whose: Whose
    plan: Plan
    peer_tables: Mapping[int, BlockTable]
    tables: Mapping[int, BlockTable]
    first_chunk: int
    end_chunk: int
    lease: ReadLease
    fence: int
    compared: frozenset[int] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Of all its chunks."""
        return sum(self.plan.chunk(index).size_bytes for index in range(self.first_chunk, self.end_chunk))


SendingOrder = SendOrder | Progress | Credit | StopSending | Digest | Watch
ReceivingOrder = ReceiveOrder | Lend | StopReceiving | Pull

# From both:


@dataclass(frozen=True, slots=True)
class Broken:
    """A chunk did not come through, or may not have. Others of the transfer may be under way."""

    transfer: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """After a Stop: neither the engine's blocks nor slots are touched for this transfer, and will not be."""

    transfer: str


# From the data plane of a sender:


@dataclass(frozen=True, slots=True)
class Gathered:
    """The engine's blocks are read no more for this transfer. Writes of it may be under way."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """So many chunks are in the receiver's slots. Each took so many seconds to be gathered."""

    transfer: str
    chunks: int
    size_bytes: int
    gather_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """All chunks are in the receiver's slots."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Digested:
    """What a chunk's rows are in our engine's blocks, and what its receiver had `read`; or why nobody knows."""

    transfer: str
    found: Sum
    read: Sum
    failure: Failure


@dataclass(frozen=True, slots=True)
class FenceReached:
    """Our engine's stream is as far as `Watch` said, or nobody can wait for it any more."""


# From the data plane of a receiver:


@dataclass(frozen=True, slots=True)
class Landed:
    """Writes under these leases have arrived whole, and are read no more; so many chunks of them are in the blocks."""

    transfer: str
    leases: tuple[SlotLease, ...]
    chunks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A notice came that no order waits for."""

    transfer: str
    slot: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """What came was no notice at all."""

    code: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """The chunks of a `Pull` are in our engine's blocks, with the digests of those that were compared; or why not."""

    transfer: str
    end_chunk: int
    chunks: int
    size_bytes: int
    digests: Mapping[int, int]
    failure: Failure


SendingReport = Gathered | Shipped | Sent | Broken | Quiet | Digested | FenceReached
ReceivingReport = Landed | Broken | Quiet | Dropped | Malformed | Pulled
