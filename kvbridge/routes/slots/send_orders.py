"""The data plane's send orders: which chunk to gather next, and what is under way for each transfer. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge_proto.peer import SlotLease

from ...dataplane.attached import AttachedMemory
from ...dataplane.slots import SendSlot, SendSlots
from ...exchange.containers import FairQueue
from ...exchange.orders import (
    Broken,
    Credit,
    Failure,
    Gathered,
    Progress,
    Quiet,
    SendingReport,
    SendOrder,
    Sent,
    Shipped,
    StageReached,
    StopSending,
)
from ...geometry.tokens import BlockTable


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


@dataclass(frozen=True, slots=True)
class LeavingChunk:
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


class SendOrders:
    """All transfers that are being sent, and the slots they gather into.

    For the data plane's thread; any thread may read the counts.
    """

    def __init__(self, slots: int) -> None:
        self.slots = SendSlots(slots)
        self.moving = 0  # chunks under way, and not late
        self._gathering = 0
        self.has_reports = False
        self.open: dict[str, OrderedSend] = {}
        # Transfers that could begin a chunk when they were queued; they may have ended since.
        self._awaiting: FairQueue[OrderedSend] = FairQueue()
        self._reached: list[StageReached] = []
        self._shipped: dict[str, Shipped] = {}
        self._reports: list[SendingReport] = []

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
        self._awaiting.discard(stop.transfer)
        if ordered.writing and not ordered.gathering and not has_gathered:
            self.report(Gathered(stop.transfer))
        self._end_if_over(ordered)

    def begin(self) -> LeavingChunk | None:
        """The next chunk to gather, of the transfer that has waited longest. None without a free slot or a chunk.

        No more are gathered at once than there are slots, even if those were just replaced: the copier has no room.
        """
        while self.slots.free and self._gathering < len(self.slots) and (ordered := self._awaiting.take()) is not None:
            if ordered.can_begin:  # it may have ended since
                return self._begin(ordered)
        return None

    def _begin(self, ordered: OrderedSend) -> LeavingChunk:
        local, chunk = self.slots.take(), ordered.next_chunk
        assert local is not None
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
            self._awaiting.add(ordered.transfer, ordered.turn, ordered)

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
            self._reached.append(StageReached(transfer, "gathering", at, 0))
        if leaving.chunk == chunks - 1:
            self._reached.append(StageReached(transfer, "computed", at, chunks))

    def note_gathered(self, leaving: LeavingChunk, at: float) -> None:
        """The chunk has been gathered without a failure: for the journal."""
        ordered = leaving.ordered
        if self._has_gathered(ordered) and not ordered.is_broken:
            self._reached.append(StageReached(ordered.transfer, "gathered", at, ordered.order.plan.chunks))

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

    def take_reached(self) -> list[StageReached]:
        """The stages reached since the last call. They wait for a report: none of them is worth waking the loop."""
        reached, self._reached = self._reached, []
        return reached

    def report(self, report: SendingReport) -> None:
        """Add another report for the exchange."""
        self._reports.append(report)
        self.has_reports = True

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
