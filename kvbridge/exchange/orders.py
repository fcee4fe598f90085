"""Orders from the exchange to the data plane, and its reports: one queue each way, in order. Records only. Pure.

Each end orders a transfer once. Every Stop is followed by exactly one `Quiet`, and by no report on that transfer after
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from kvbridge_proto.peer import Route, SlotLease, Sum
from kvbridge_proto.pool import Pool

from ..geometry.plan import Part, Plan
from ..geometry.tokens import BlockTable
from ..values import Value
from .session import EngineMemoryId

Failure = tuple[str, str] | None  # (code, reason)


class Order(Value):
    """What the exchange gives to the data plane."""


# To the data plane of a sender:


class SendOrder(Order):
    """Gather the chunks of a transfer in order, and write each into a slot lent by the receiver.

    `number` and `request` are the offer's. The order is over once the last chunk is written.
    """

    transfer: str
    number: int
    request: str
    incarnation: str
    plan: Plan
    token: bytes
    receiver_epoch: int
    digest_kind: str


class Progress(Order):
    """The first `ready` chunks are in these blocks of our engine once its fence has reached `fence`."""

    transfer: str
    tables: Mapping[int, BlockTable]
    ready: int
    fence: int


class Credit(Order):
    """The receiver lends these slots, for one write each."""

    transfer: str
    leases: tuple[SlotLease, ...]


class StopSending(Order):
    """Gather nothing more for this transfer, and end its waits for the engine's fence. What has begun goes on."""

    transfer: str
    code: str
    reason: str


class Digest(Order):
    """Digest a chunk that its receiver has read; `read` is the receiver's digest. Needs no slot.

    The receiver was told of the blocks, so the engine's fence has passed them. `number`, `request`: as in SendOrder.
    """

    transfer: str
    number: int
    request: str
    plan: Plan
    tables: Mapping[int, BlockTable]
    read: Sum


class Watch(Order):
    """Report when our engine's fence reaches this count: receivers wait for tokens computed by then."""

    fence: int


# To the data plane of a receiver:


class ReceiveOrder(Order):
    """Move the chunks of a transfer from our slots into the engine's blocks, once its fence has reached `fence`.

    `request` is our engine's name for the want. Given before the sender is asked for anything. The order is over once
    all chunks are in the blocks.
    """

    transfer: str
    request: str
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


class Lend(Order):
    """The sender may write these slots, each once. Given before the sender hears of it."""

    transfer: str
    leases: tuple[SlotLease, ...]


class StopReceiving(Order):
    """Begin nothing more for this transfer, and end its waits for the engine's fence. Moves under way go on."""

    transfer: str
    code: str
    reason: str


class Lease(Protocol):
    """How long what is read counts."""

    ends: float
    is_given_up: bool  # the transfer has ended: read no more

    def counts(self, now: float) -> bool:
        """Whether a read counts. `now` must be taken after the read was seen to end."""
        ...


class Pull(Order):
    """Read chunks [first_chunk, end_chunk) from the blocks of the sender's engine into ours, on the route `pull`.

    Begins once our engine's fence has reached `fence`. `memory_id` names the sender's memory, `peer_tables` its blocks;
    `tables` are ours. Reads that end after `lease` do not count. Chunks in `compared` are digested as they are read.
    `request` is as in ReceiveOrder. With `peer_fence`
    it is read ahead of the sender's answer: it fails at once (`fence_late`) if the fence of the sender's engine is not
    seen to have reached that count, and whether it counts is decided later, by when it ended.
    """

    transfer: str
    request: str
    memory_id: EngineMemoryId
    plan: Plan
    peer_tables: Mapping[int, BlockTable]
    tables: Mapping[int, BlockTable]
    first_chunk: int
    end_chunk: int
    lease: Lease
    fence: int
    compared: frozenset[int] = frozenset()
    peer_fence: int | None = None


class AwaitedPull(Order):
    """The sender of this transfer is asked for its blocks: prepare to read them into ours. As in Pull.

    Nothing comes of it if there is no time: then the Pull takes longer.
    """

    transfer: str
    memory_id: EngineMemoryId
    plan: Plan
    tables: Mapping[int, BlockTable]


SendingOrder = SendOrder | Progress | Credit | StopSending | Digest | Watch


class Fill(Order):
    """Write zeros to rows of our engine's blocks that no sender has (geometry/unfilled.py). Stopped as a transfer is.

    Begins once our engine's fence has reached `fence`. `zeros` is the pool that the zeros are read from, at the blocks
    of `zero_tables`; `tables` are ours. `request` is as in ReceiveOrder.
    """

    transfer: str
    request: str
    plan: Plan
    zeros: Pool
    zero_tables: Mapping[int, BlockTable]
    tables: Mapping[int, BlockTable]
    fence: int


class Warm(Order):
    """Begin to compile the kernels that parts like these need."""

    parts: Sequence[Part]


class WarmPull(Order):
    """The same for pulls of (the sender's, our) parts, with a digest or without (`kinds`).

    `memory_id` names the sender's memory; None stands for an equal sender, of which nobody knows yet.
    """

    memory_id: EngineMemoryId | None
    pairs: Sequence[tuple[Part, Part]]
    kinds: Sequence[bool]


ReceivingOrder = ReceiveOrder | Lend | StopReceiving | AwaitedPull | Pull | Fill | Warm | WarmPull

# From both:

TransferStage = Literal["gathering", "computed", "gathered", "landed", "reading", "read"]


class StageReached(Value):
    """A transfer reached this stage at `at`, with `chunks` chunks behind it. For the journal; comes with a report.

    A sender's stages: `gathering` (the first gather began), `computed` (the last one began: all rows are computed),
    `gathered` (the last one ended). A receiver's: `landed` (first and last), or each Pull's `reading` and `read`.
    """

    transfer: str
    stage: TransferStage
    at: float
    chunks: int


class RouteReport(Value):
    """What only the transfer's route understands."""

    transfer: str


class Broken(Value):
    """A chunk failed, or may have failed. Others of the transfer may be under way."""

    transfer: str
    code: str
    reason: str


class Quiet(Value):
    """After a Stop: this transfer no longer touches the engine's blocks or slots, and never will."""

    transfer: str


# From the data plane of a sender:


class Gathered(RouteReport):
    """The engine's blocks are no longer read for this transfer. Its writes may be under way."""


class Shipped(RouteReport):
    """`chunks` more chunks are in the receiver's slots. `gather_s` has the seconds each gather took."""

    chunks: int
    size_bytes: int
    gather_s: tuple[float, ...]


class Sent(RouteReport):
    """All chunks are in the receiver's slots."""


class Digested(RouteReport):
    """Our digest of a chunk (`found`) and the receiver's (`read`); or why there is none."""

    found: Sum
    read: Sum
    failure: Failure


class FenceReached(Value):
    """Our engine's fence has reached the count of a `Watch`, or the wait for it ended."""


# From the data plane of a receiver:


class Landed(RouteReport):
    """Writes under these leases have arrived whole and their slots are no longer read; `chunks` are in the blocks."""

    leases: tuple[SlotLease, ...]
    chunks: int
    size_bytes: int


class Dropped(Value):
    """A notice came that matches no order."""

    transfer: str
    slot: int


class Malformed(Value):
    """A notice could not be decoded."""

    code: str


class Summed(RouteReport):
    """Digests of chunks to compare, while later chunks of their `Pull` are still read."""

    digests: Mapping[int, int]


class Pulled(RouteReport):
    """The chunks of a `Pull` are in our engine's blocks. Or why it failed.

    `digests` has the chunks to compare for which no `Summed` came.
    """

    end_chunk: int
    chunks: int
    size_bytes: int
    digests: Mapping[int, int]
    failure: Failure
    at: float = 0.0  # when the last read was seen to have ended


SendingReport = StageReached | Gathered | Shipped | Sent | Broken | Quiet | Digested | FenceReached


class Filled(Value):
    """The rows of a `Fill` are zeros. Or why not."""

    transfer: str
    failure: Failure


ReceivingReport = StageReached | Landed | Broken | Quiet | Dropped | Malformed | Summed | Pulled | Filled
