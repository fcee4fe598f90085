"""What the data plane's thread knows of its orders: what to gather next, what may land, and what is under way. Pure.

Our slots that chunks are gathered into are here too. Chunks that land are checked without asking the loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Generic, TypeVar

from kvbridge_proto.peer import Notice, SlotLease
from kvbridge_proto.status import SlotCounts

from ..exchange.containers import PeerQueue, Shares
from ..exchange.orders import (
    Broken,
    Credit,
    Dropped,
    Failure,
    Gathered,
    Landed,
    Lend,
    Progress,
    Quiet,
    ReceiveOrder,
    ReceivingReport,
    SendingReport,
    SendOrder,
    Sent,
    Shipped,
    StageReached,
    StopReceiving,
    StopSending,
    Summed,
    TransferStage,
)
from ..geometry.tokens import BlockTable
from ..values import Value
from .attached import AttachedMemory


class SendSlot(Value):
    """One slot that we gather into, for `peer`. `era` is the number of the `make` that made it."""

    index: int
    era: int
    peer: Hashable


class SendSlots:
    """The slots we gather into. Only we write them, but a write out of one may stay under way for ever."""

    def __init__(self, count: int) -> None:
        self._era = 0
        self._late: set[SendSlot] = set()
        self._taken: Counter[int] = Counter()  # by era: slots that are gathered into, or that a write reads
        self._shares = Shares()
        self.turn = 0  # slots taken so far
        self.make(count)

    def __len__(self) -> int:
        return self._count

    @property
    def free(self) -> int:
        return len(self._free)

    def may_take(self, peer: Hashable) -> bool:
        """Whether there is a slot for this peer, within its share."""
        return self._shares.may_take(peer, self.free)

    def take(self, peer: Hashable) -> SendSlot:
        """Take a free slot."""
        self.turn += 1
        self._taken[self._era] += 1
        self._shares.take(peer)
        return SendSlot(self._free.popleft(), self._era, peer)

    def quarantine(self, local: SendSlot) -> None:
        """The write out of this slot is late: nobody knows when it ends."""
        if local.era == self._era:
            self._late.add(local)

    def give_back(self, local: SendSlot) -> None:
        """The write out of this slot has ended."""
        self._taken[local.era] -= 1
        if local.era != self._era:
            return
        assert local.index not in self._free
        self._late.discard(local)
        self._free.append(local.index)
        self._shares.give_back(local.peer)

    def is_used(self, era: int) -> bool:
        """Whether any slot of this `make` may still be read by a write."""
        return self._taken[era] > 0

    def make(self, count: int) -> int:
        """Replace the slots by `count` new ones. Old ones are left to the writes out of them. Returns the new era."""
        self._era += 1
        self._count = count
        self._free = deque(range(count))
        self._late.clear()
        self._shares.clear()
        return self._era

    def counts(self) -> SlotCounts:
        """How many slots are in which state; `quarantined` are those with a late write. Any thread may ask."""
        late, free = len(self._late), self.free
        return SlotCounts(free=free, lent=max(0, self._count - free - late), landed=0, quarantined=late)


@dataclass(slots=True, eq=False)
class OrderedSend:
    """One transfer that is being sent."""

    order: SendOrder
    attached: AttachedMemory
    asked_at: float  # time of the exchange's last order; it knew of no withdrawal then
    turn: int  # when it came, or last got a slot to gather into
    tables: Mapping[int, BlockTable] = field(default_factory=dict)
    ready: deque[tuple[int, int]] = field(default_factory=deque)  # (end_chunk, fence): ready once fence is reached
    leases: deque[SlotLease] = field(default_factory=deque)  # not used yet
    next_chunk: int = 0
    gathering: int = 0
    writing: int = 0  # begun and not over, gathers included
    is_broken: bool = False  # a chunk failed
    stop: StopSending | None = None

    @property
    def transfer(self) -> str:
        return self.order.transfer

    @property
    def can_begin(self) -> bool:
        """Whether the next chunk is ready and the receiver has lent a slot for it."""
        return bool(self.ready and self.leases) and not self.is_broken and self.stop is None


class LeavingChunk(Value):
    """A chunk on its way from the engine's blocks, through our slot `local`, to a slot that its receiver lent."""

    ordered: OrderedSend
    tables: Mapping[int, BlockTable]
    chunk: int
    fence: int
    local: SendSlot
    lease: SlotLease
    asked_at: float

    @property
    def order(self) -> SendOrder:
        return self.ordered.order

    @property
    def attached(self) -> AttachedMemory:
        return self.ordered.attached

    @property
    def size_bytes(self) -> int:
        return self.order.plan.chunk(self.chunk).size_bytes


Report = TypeVar("Report")


class OrderReports(Generic[Report]):
    """What the exchange has to be told of orders."""

    def __init__(self) -> None:
        self.has_reports = False
        self._reports: list[Report] = []
        self._reached: list[StageReached] = []

    def report(self, report: Report) -> None:
        """Add another report for the exchange."""
        self._reports.append(report)
        self.has_reports = True

    def reach(self, transfer: str, stage: TransferStage, at: float, chunks: int) -> None:
        """A transfer reached a stage: for the journal."""
        self._reached.append(StageReached(transfer, stage, at, chunks))

    def take_reached(self) -> list[StageReached]:
        """The stages reached since the last call. They wait for a report: none of them is worth waking the loop."""
        reached, self._reached = self._reached, []
        return reached


class SendOrders(OrderReports[SendingReport]):
    """All transfers that are being sent, and the slots they gather into.

    For the data plane's thread; any thread may read the counts.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = SendSlots(slots)
        self.moving = 0  # chunks under way, and not late
        self._gathering = 0
        self.open: dict[str, OrderedSend] = {}
        # Transfers that could begin a chunk when they were queued; they may have ended since.
        self._awaiting: PeerQueue[OrderedSend] = PeerQueue()
        self._shipped: dict[str, Shipped] = {}

    def order(self, order: SendOrder, attached: AttachedMemory, asked_at: float) -> None:
        """Send chunks of this transfer as they become ready and slots are lent for them."""
        self.open[order.transfer] = OrderedSend(order, attached, asked_at, self.slots.turn)

    def progress(self, progress: Progress, asked_at: float) -> None:
        """More chunks of a transfer are ready."""
        if (ordered := self.open.get(progress.transfer)) is not None:
            ordered.asked_at = asked_at
            ordered.tables = progress.tables
            ordered.ready.append((progress.ready, progress.fence))
            self._queue(ordered)

    def credit(self, credit: Credit, asked_at: float) -> None:
        """More slots are lent to a transfer."""
        if (ordered := self.open.get(credit.transfer)) is not None:
            ordered.asked_at = asked_at
            ordered.leases.extend(credit.leases)
            self._queue(ordered)

    def stop(self, stop: StopSending) -> None:
        """Begin nothing more of this transfer. Quiet is reported once none of it is under way."""
        if (ordered := self.open.get(stop.transfer)) is None:
            self.report(Quiet(stop.transfer))
            return
        has_gathered = self._has_gathered(ordered)
        ordered.stop = stop
        self._awaiting.discard(ordered.order.incarnation, stop.transfer)
        if ordered.writing and not ordered.gathering and not has_gathered:
            self.report(Gathered(stop.transfer))
        self._end_if_over(ordered)

    def begin(self) -> LeavingChunk | None:
        """The next chunk to gather, of the transfer that has waited longest. None without a free slot or a chunk.

        A receiver that does not let its writes end, as it is slow or frozen, has no more than its share of the slots.
        No more are gathered at once than there are slots, even if those were just replaced: the copier has no room.
        """
        while self.slots.free and self._gathering < len(self.slots):
            if (ordered := self._awaiting.take(self.slots.may_take)) is None:
                return None
            if ordered.can_begin:  # it may have ended since
                return self._begin(ordered)
        return None

    def _begin(self, ordered: OrderedSend) -> LeavingChunk:
        local, chunk = self.slots.take(ordered.order.incarnation), ordered.next_chunk
        end_chunk, fence = ordered.ready[0]
        leaving = LeavingChunk(ordered, ordered.tables, chunk, fence, local, ordered.leases.popleft(), ordered.asked_at)
        ordered.turn = self.slots.turn
        ordered.next_chunk += 1
        ordered.gathering += 1
        self._gathering += 1
        ordered.writing += 1
        self.moving += 1
        if ordered.next_chunk == end_chunk:
            ordered.ready.popleft()
        self._queue(ordered)
        return leaving

    def _queue(self, ordered: OrderedSend) -> None:
        if ordered.can_begin:
            self._awaiting.add(ordered.order.incarnation, ordered.transfer, ordered.turn, ordered)

    def gathered(self, leaving: LeavingChunk) -> None:
        """The chunk has been gathered, or never will be."""
        ordered = leaving.ordered
        ordered.gathering -= 1
        self._gathering -= 1
        if not ordered.gathering and (ordered.stop is not None or ordered.next_chunk == ordered.order.plan.chunks):
            self.report(Gathered(ordered.transfer))

    def note_gathering(self, leaving: LeavingChunk, at: float) -> None:
        """The chunk began to be gathered: for the journal."""
        transfer, chunks = leaving.order.transfer, leaving.order.plan.chunks
        if leaving.chunk == 0:
            self.reach(transfer, "gathering", at, 0)
        if leaving.chunk == chunks - 1:
            self.reach(transfer, "computed", at, chunks)

    def note_gathered(self, leaving: LeavingChunk, at: float) -> None:
        """The chunk has been gathered without a failure: for the journal."""
        ordered = leaving.ordered
        if self._has_gathered(ordered) and not ordered.is_broken:
            self.reach(ordered.transfer, "gathered", at, ordered.order.plan.chunks)

    def _has_gathered(self, ordered: OrderedSend) -> bool:
        return not ordered.gathering and ordered.next_chunk == ordered.order.plan.chunks

    def late(self, leaving: LeavingChunk, code: str, reason: str) -> None:
        """Nobody waits for the chunk's write any more. It may still land, so its slots stay in use until it ends."""
        self.slots.quarantine(leaving.local)
        self.moving -= 1
        self._fail(leaving.ordered, code, reason)

    def written(self, leaving: LeavingChunk, gather_s: float, failure: Failure, is_late: bool = False) -> None:
        """The chunk's write has ended, or will not begin: our slot is no longer read."""
        ordered, transfer = leaving.ordered, leaving.ordered.transfer
        self.slots.give_back(leaving.local)
        self.moving -= not is_late
        ordered.writing -= 1
        if failure is None:
            before = self._shipped.get(transfer) or Shipped(transfer, 0, 0, ())
            size_bytes, gathers = before.size_bytes + leaving.size_bytes, (*before.gather_s, gather_s)
            self._shipped[transfer] = Shipped(transfer, before.chunks + 1, size_bytes, gathers)
            self.has_reports = True
        else:
            self._fail(ordered, *failure)
        self._end_if_over(ordered)

    def take_reports(self) -> list[SendingReport]:
        """The reports since the last call. Shipped go first: nothing is shipped after a transfer's Sent or Quiet."""
        reports = [*self._shipped.values(), *self._reports]
        self._shipped, self._reports, self.has_reports = {}, [], False
        return reports

    @property
    def without_credit(self) -> int:
        """How many transfers have chunks ready, but no slot lent to them."""
        return sum(bool(each.ready) and not each.leases for each in list(self.open.values()))

    @property
    def without_slot(self) -> int:
        """How many transfers wait for a free slot of ours to gather into."""
        return len(self._awaiting)

    def _fail(self, ordered: OrderedSend, code: str, reason: str) -> None:
        if ordered.stop is None and not ordered.is_broken:
            self.report(Broken(ordered.transfer, code, reason))
        ordered.is_broken = True

    def _end_if_over(self, ordered: OrderedSend) -> None:
        if ordered.writing:
            return
        is_sent = ordered.next_chunk == ordered.order.plan.chunks and not ordered.is_broken
        if ordered.stop is None and not is_sent:
            return
        del self.open[ordered.transfer]
        self.report(Sent(ordered.transfer) if ordered.stop is None else Quiet(ordered.transfer))


@dataclass(slots=True, eq=False)
class OrderedReceive:
    """One transfer that is being received. `order` is None on the route `pull`."""

    transfer: str
    order: ReceiveOrder | None = None
    attached: AttachedMemory | None = None
    leases: dict[int, int] = field(default_factory=dict)  # generation by slot, where nothing has landed yet
    missing: set[int] = field(default_factory=set)  # chunks that have not landed
    moving: int = 0  # scatters and reads under way
    stop: StopReceiving | None = None


class LandedChunk(Value):
    """A chunk that landed and matched its order, on its way into the engine's blocks."""

    ordered: OrderedReceive
    order: ReceiveOrder
    attached: AttachedMemory
    notice: Notice

    @property
    def size_bytes(self) -> int:
        return self.notice.chunk_bytes


class ReceiveOrders(OrderReports[ReceivingReport]):
    """All transfers that are being received. For the data plane's thread; any thread may read the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = 0  # leases that nothing has landed under: while there are any, poll for notices
        self.scattering = 0  # slots that are being read
        self._open: dict[str, OrderedReceive] = {}
        self._landed: dict[str, Landed] = {}
        self._summed: dict[str, dict[int, int]] = {}  # by transfer: digests by chunk

    def order(self, order: ReceiveOrder, attached: AttachedMemory) -> None:
        """Accept chunks of this transfer, once slots are lent for them."""
        missing = set(range(order.plan.chunks))
        self._open[order.transfer] = OrderedReceive(order.transfer, order, attached, missing=missing)

    def lend(self, lend: Lend) -> None:
        """Accept chunks in these slots."""
        if (ordered := self._open.get(lend.transfer)) is None:
            return  # all chunks have landed: nothing will be written under these leases
        ordered.leases.update((lease.slot, lease.generation) for lease in lend.leases)
        self.lent += len(lend.leases)

    def stop(self, stop: StopReceiving) -> None:
        """Accept nothing more of this transfer. Quiet is reported once none of it is being moved."""
        if (ordered := self._open.get(stop.transfer)) is None:
            self.report(Quiet(stop.transfer))
            return
        ordered.stop = stop
        self._forget_leases(ordered)
        self._end_if_over(ordered)

    def landed(self, notice: Notice) -> LandedChunk | None:
        """A notice came. Returns its chunk if everything matches an order, otherwise None and Dropped is reported."""
        ordered = self._open.get(notice.transfer)
        if ordered is None or ordered.order is None or not matches(notice, ordered, ordered.order):
            self.report(Dropped(notice.transfer, notice.slot))
            return None
        assert ordered.attached is not None
        del ordered.leases[notice.slot]
        self.lent -= 1
        ordered.missing.discard(notice.chunk)
        ordered.moving += 1
        self.scattering += 1
        return LandedChunk(ordered, ordered.order, ordered.attached, notice)

    def note_landed(self, landed: LandedChunk, at: float) -> None:
        """The chunk came in: for the journal, if it is the first or the last of its transfer."""
        chunks, missing = landed.order.plan.chunks, len(landed.ordered.missing)
        if missing in (0, chunks - 1):
            self.reach(landed.ordered.transfer, "landed", at, chunks - missing)

    def scattered(self, landed: LandedChunk, failure: Failure) -> None:
        """The chunk's slot is no longer read. `failure` says why its rows do not count, if they do not."""
        ordered, notice = landed.ordered, landed.notice
        lease, transfer = SlotLease(notice.slot, notice.generation), ordered.transfer
        before = self._landed.get(transfer) or Landed(transfer, (), 0, 0)
        chunks, size_bytes = (1, landed.size_bytes) if failure is None else (0, 0)
        leases = (*before.leases, lease)
        self._landed[transfer] = Landed(transfer, leases, before.chunks + chunks, before.size_bytes + size_bytes)
        self.has_reports = True
        if failure is not None and ordered.stop is None:
            self.report(Broken(transfer, *failure))
        self.scattering -= 1
        self.end_move(ordered)

    def begin_read(self, transfer: str) -> OrderedReceive:
        """Rows of this transfer are pulled from now on, until `end_move`."""
        ordered = self._open.setdefault(transfer, OrderedReceive(transfer))
        ordered.moving += 1
        return ordered

    def summed(self, transfer: str, chunk: int, digest: int) -> None:
        """A chunk to compare has been read; later chunks of the same pull have not."""
        self._summed.setdefault(transfer, {})[chunk] = digest
        self.has_reports = True

    def end_move(self, ordered: OrderedReceive) -> None:
        """A move of it is over: a scatter, or the pull that `begin_read` announced."""
        ordered.moving -= 1
        self._end_if_over(ordered)

    def take_reports(self) -> list[ReceivingReport]:
        """The reports since the last call. Landed and Summed go first: a transfer's Quiet or Pulled is its last one."""
        reports = [*self._landed.values(), *starmap(Summed, self._summed.items()), *self._reports]
        self._landed, self._summed, self._reports, self.has_reports = {}, {}, [], False
        return reports

    def _end_if_over(self, ordered: OrderedReceive) -> None:
        if ordered.moving or (ordered.missing and ordered.stop is None):
            return
        if ordered.leases:
            self._forget_leases(ordered)
        del self._open[ordered.transfer]
        if ordered.stop is not None:
            self.report(Quiet(ordered.transfer))

    def _forget_leases(self, ordered: OrderedReceive) -> None:
        self.lent -= len(ordered.leases)
        ordered.leases.clear()


def matches(notice: Notice, ordered: OrderedReceive, order: ReceiveOrder) -> bool:
    """Whether every field of a notice is what we expect."""
    return (
        ordered.leases.get(notice.slot) == notice.generation
        and notice.chunk in ordered.missing
        and notice.chunk_bytes == order.plan.chunk(notice.chunk).size_bytes
        and notice.token == order.token
        and notice.sender_incarnation == order.sender_incarnation
        and notice.receiver_incarnation == order.receiver_incarnation
        and notice.sender_epoch == order.sender_epoch
        and notice.receiver_epoch == order.receiver_epoch
    )
