"""The data plane's send orders: which chunk to gather next, and what is under way for each transfer. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge_proto.peer import SlotLease

from ..exchange.containers import FairQueue
from ..exchange.orders import (
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
from ..geometry.tokens import BlockTable
from .attached import AttachedMemory
from .slots import SendSlot, SendSlots


@dataclass(slots=True, eq=False)
class OrderedSend:
    """One transfer that is being sent."""

    order: SendOrder
    attachment: AttachedMemory
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

    dispatch: OrderedSend
    tables: Mapping[int, BlockTable]
    chunk: int
    fence: int
    local: SendSlot
    lease: SlotLease
    asked_at: float

    @property
    def order(self) -> SendOrder:
        return self.dispatch.order

    @property
    def attachment(self) -> AttachedMemory:
        return self.dispatch.attachment

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
        self._open: dict[str, OrderedSend] = {}
        self._awaiting_slots: FairQueue[OrderedSend] = (
            FairQueue()
        )  # could begin a chunk when queued; may have ended since
        self._reached: list[StageReached] = []
        self._shipped: dict[str, Shipped] = {}
        self._reports: list[SendingReport] = []

    def order(self, order: SendOrder, attachment: AttachedMemory, asked_at: float) -> None:
        """Send chunks of this transfer as they become ready and slots are lent for them."""
        self._open[order.transfer] = OrderedSend(order, attachment, asked_at, self.slots.turn)

    def progress(self, progress: Progress, asked_at: float) -> None:
        """More chunks of a transfer are ready."""
        if (dispatch := self._open.get(progress.transfer)) is not None:
            dispatch.asked_at = asked_at
            dispatch.tables = progress.tables
            dispatch.ready.append((progress.ready, progress.fence))
            self._queue(dispatch)

    def credit(self, credit: Credit, asked_at: float) -> None:
        """More slots are lent to a transfer."""
        if (dispatch := self._open.get(credit.transfer)) is not None:
            dispatch.asked_at = asked_at
            dispatch.leases.extend(credit.leases)
            self._queue(dispatch)

    def stop(self, stop: StopSending) -> None:
        """Begin nothing more of this transfer. Quiet is reported once none of it is under way."""
        if (dispatch := self._open.get(stop.transfer)) is None:
            self._reports.append(Quiet(stop.transfer))
            return
        has_gathered = self._has_gathered(dispatch)
        dispatch.stop = stop
        self._awaiting_slots.discard(stop.transfer)
        if dispatch.writing and not dispatch.gathering and not has_gathered:
            self._reports.append(Gathered(stop.transfer))
        self._end_if_over(dispatch)

    def begin(self) -> LeavingChunk | None:
        """The next chunk to gather, of the transfer that has waited longest. None without a free slot or a chunk."""
        while self.slots.free and (dispatch := self._awaiting_slots.take()) is not None:
            if dispatch.can_begin:  # it may have ended since
                return self._begin(dispatch)
        return None

    def _begin(self, dispatch: OrderedSend) -> LeavingChunk:
        local, chunk = self.slots.take(), dispatch.next_chunk
        assert local is not None
        end_chunk, fence = dispatch.ready[0]
        departure = LeavingChunk(
            dispatch, dispatch.tables, chunk, fence, local, dispatch.leases.popleft(), dispatch.asked_at
        )
        dispatch.turn = self.slots.turn
        dispatch.next_chunk += 1
        dispatch.gathering += 1
        dispatch.writing += 1
        self.moving += 1
        if dispatch.next_chunk == end_chunk:
            dispatch.ready.popleft()
        self._queue(dispatch)
        return departure

    def _queue(self, dispatch: OrderedSend) -> None:
        if dispatch.can_begin:
            self._awaiting_slots.add(dispatch.transfer, dispatch.turn, dispatch)

    def gathered(self, departure: LeavingChunk) -> None:
        """The chunk has been gathered, or never will be."""
        dispatch = departure.dispatch
        dispatch.gathering -= 1
        if not dispatch.gathering and (dispatch.stop is not None or dispatch.next_chunk == dispatch.order.plan.chunks):
            self._reports.append(Gathered(dispatch.transfer))

    def note_gathering(self, departure: LeavingChunk, at: float) -> None:
        """The chunk began to be gathered: for the journal."""
        transfer, chunks = departure.order.transfer, departure.order.plan.chunks
        if departure.chunk == 0:
            self._reached.append(StageReached(transfer, "gathering", at, 0))
        if departure.chunk == chunks - 1:
            self._reached.append(StageReached(transfer, "computed", at, chunks))

    def note_gathered(self, departure: LeavingChunk, at: float) -> None:
        """The chunk has been gathered without a failure: for the journal."""
        dispatch = departure.dispatch
        if self._has_gathered(dispatch) and not dispatch.is_broken:
            self._reached.append(StageReached(dispatch.transfer, "gathered", at, dispatch.order.plan.chunks))

    def _has_gathered(self, dispatch: OrderedSend) -> bool:
        return not dispatch.gathering and dispatch.next_chunk == dispatch.order.plan.chunks

    def late(self, departure: LeavingChunk, reason: str) -> None:
        """The chunk's write has passed its deadline. It may still land, so its slots stay in use until it ends."""
        self.slots.doubt(departure.local)
        self.moving -= 1
        self._fail(departure.dispatch, "write_timeout", reason)

    def written(self, departure: LeavingChunk, gather_s: float, failure: Failure, is_late: bool = False) -> None:
        """The chunk's write has ended, or will not begin: our slot is no longer read."""
        dispatch, transfer = departure.dispatch, departure.dispatch.transfer
        self.slots.give_back(departure.local)
        self.moving -= not is_late
        dispatch.writing -= 1
        if failure is None:
            before = self._shipped.get(transfer) or Shipped(transfer, 0, 0, ())
            size_bytes, gathers = before.size_bytes + departure.size_bytes, (*before.gather_s, gather_s)
            self._shipped[transfer] = Shipped(transfer, before.chunks + 1, size_bytes, gathers)
        else:
            self._fail(dispatch, *failure)
        self._end_if_over(dispatch)

    def take_reports(self) -> list[SendingReport]:
        """The reports since the last call. Shipped go first: nothing is shipped after a transfer's Sent or Quiet."""
        reports = [*self._shipped.values(), *self._reports]
        self._shipped, self._reports = {}, []
        return reports

    def take_reached(self) -> list[StageReached]:
        """The stages reached since the last call. They wait for a report: none of them is worth waking the loop."""
        reached, self._reached = self._reached, []
        return reached

    def report(self, report: SendingReport) -> None:
        """Add another report for the exchange."""
        self._reports.append(report)

    @property
    def without_credit(self) -> int:
        """How many transfers have chunks ready, but no slot lent to them."""
        return sum(bool(each.ready) and not each.leases for each in list(self._open.values()))

    @property
    def without_slot(self) -> int:
        """How many transfers wait for a free slot of ours to gather into."""
        return len(self._awaiting_slots)

    def _fail(self, dispatch: OrderedSend, code: str, reason: str) -> None:
        if dispatch.stop is None and not dispatch.is_broken:
            self._reports.append(Broken(dispatch.transfer, code, reason))
        dispatch.is_broken = True

    def _end_if_over(self, dispatch: OrderedSend) -> None:
        if dispatch.writing:
            return
        is_sent = dispatch.next_chunk == dispatch.order.plan.chunks and not dispatch.is_broken
        if dispatch.stop is None and not is_sent:
            return
        del self._open[dispatch.transfer]
        self._reports.append(Sent(dispatch.transfer) if dispatch.stop is None else Quiet(dispatch.transfer))
