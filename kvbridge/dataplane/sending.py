"""The send orders of the data plane: which chunk is gathered next, and what is under way of each transfer. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge_proto.peer import Lease

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
    StopSending,
)
from ..exchange.turns import Turns
from ..geometry.tokens import BlockTable
from .attachment import Attachment
from .slots import LocalSlot, LocalSlots


@dataclass(slots=True, eq=False)
class Dispatch:
    """One transfer that is being sent."""

    order: SendOrder
    attachment: Attachment
    asked_at: float  # when our exchange, which had heard of no end of it, asked for something last
    turn: int  # when it came, or had a slot to gather into last
    tables: Mapping[int, BlockTable] = field(default_factory=dict)
    ready: deque[tuple[int, int]] = field(default_factory=deque)  # (end_chunk, fence): chunks up to there, from then on
    leases: deque[Lease] = field(default_factory=deque)  # under which nothing was begun
    next_chunk: int = 0
    gathering: int = 0
    writing: int = 0  # begun and not over, gathers included
    is_broken: bool = False  # a chunk did not come through
    stop: StopSending | None = None

    @property
    def transfer(self) -> str:
        return self.order.transfer

    @property
    def can_begin(self) -> bool:
        """Whether the next chunk is ready, and has a slot to go to."""
        return bool(self.ready and self.leases) and not self.is_broken and self.stop is None


@dataclass(frozen=True, slots=True)
class Departure:
    """A chunk on its way out of the engine's blocks, over our slot `local`, into one that its receiver lent."""

    dispatch: Dispatch
    tables: Mapping[int, BlockTable]
    chunk: int
    fence: int
    local: LocalSlot
    lease: Lease
    asked_at: float

    @property
    def order(self) -> SendOrder:
        return self.dispatch.order

    @property
    def attachment(self) -> Attachment:
        return self.dispatch.attachment

    @property
    def size_bytes(self) -> int:
        return self.order.plan.chunk(self.chunk).size_bytes


class Sending:
    """All transfers that are being sent, and the slots they gather into. On the data plane's thread, but for the
    counts, which anybody may read."""

    def __init__(self, slots: int) -> None:
        self.slots = LocalSlots(slots)
        self.moving = 0  # chunks that are under way, and not late
        self._open: dict[str, Dispatch] = {}
        self._hungry: Turns[Dispatch] = Turns()  # that can begin a chunk, or have ended since
        self._shipped: dict[str, Shipped] = {}
        self._reports: list[SendingReport] = []

    def order(self, order: SendOrder, attachment: Attachment, asked_at: float) -> None:
        """Chunks of this transfer go out as they are ready and slots are lent for them."""
        self._open[order.transfer] = Dispatch(order, attachment, asked_at, self.slots.turn)

    def progress(self, progress: Progress, asked_at: float) -> None:
        """More of its chunks are ready."""
        if (dispatch := self._open.get(progress.transfer)) is not None:
            dispatch.asked_at = asked_at
            dispatch.tables = progress.tables
            dispatch.ready.append((progress.ready, progress.fence))
            self._queue(dispatch)

    def credit(self, credit: Credit, asked_at: float) -> None:
        """More slots are lent to it."""
        if (dispatch := self._open.get(credit.transfer)) is not None:
            dispatch.asked_at = asked_at
            dispatch.leases.extend(credit.leases)
            self._queue(dispatch)

    def stop(self, stop: StopSending) -> None:
        """Begin nothing more of this transfer. Quiet is reported once nothing of it is under way."""
        if (dispatch := self._open.get(stop.transfer)) is None:
            self._reports.append(Quiet(stop.transfer))
            return
        has_gathered = self._has_gathered(dispatch)
        dispatch.stop = stop
        self._hungry.discard(stop.transfer)
        if dispatch.writing and not dispatch.gathering and not has_gathered:
            self._reports.append(Gathered(stop.transfer))
        self._end_if_over(dispatch)

    def begin(self) -> Departure | None:
        """Who has waited longest for a slot gathers a chunk into it. None while there is no slot, or nobody to."""
        while self.slots.free and (dispatch := self._hungry.take()) is not None:
            if dispatch.can_begin:  # it may have ended since
                return self._begin(dispatch)
        return None

    def _begin(self, dispatch: Dispatch) -> Departure:
        local, chunk = self.slots.take(), dispatch.next_chunk
        assert local is not None
        end_chunk, fence = dispatch.ready[0]
        departure = Departure(
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

    def _queue(self, dispatch: Dispatch) -> None:
        if dispatch.can_begin:
            self._hungry.add(dispatch.transfer, dispatch.turn, dispatch)

    def gathered(self, departure: Departure) -> None:
        """It has left the engine's blocks, or will not be read any more."""
        dispatch = departure.dispatch
        dispatch.gathering -= 1
        if not dispatch.gathering and (dispatch.stop is not None or dispatch.next_chunk == dispatch.order.plan.chunks):
            self._reports.append(Gathered(dispatch.transfer))

    def _has_gathered(self, dispatch: Dispatch) -> bool:
        return not dispatch.gathering and dispatch.next_chunk == dispatch.order.plan.chunks

    def late(self, departure: Departure, reason: str) -> None:
        """Its write has passed its deadline. It may still land, so its slots stay as they are until it ends."""
        self.slots.doubt(departure.local)
        self.moving -= 1
        self._fail(departure.dispatch, "write_timeout", reason)

    def written(self, departure: Departure, gather_s: float, failure: Failure, is_late: bool = False) -> None:
        """Its write has ended, or will not begin: nothing is read out of our slot any more."""
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
        """What there is to report since the last call. Nothing is shipped of a transfer that is sent, or quiet."""
        reports = [*self._shipped.values(), *self._reports]
        self._shipped, self._reports = {}, []
        return reports

    def report(self, report: SendingReport) -> None:
        """Something else that our exchange waits for."""
        self._reports.append(report)

    @property
    def without_credit(self) -> int:
        """Transfers of which chunks are ready, and for which no slot is lent."""
        return sum(bool(each.ready) and not each.leases for each in list(self._open.values()))

    @property
    def without_slot(self) -> int:
        """Transfers that could go on if we had a free slot to gather into."""
        return len(self._hungry)

    def _fail(self, dispatch: Dispatch, code: str, reason: str) -> None:
        if dispatch.stop is None and not dispatch.is_broken:
            self._reports.append(Broken(dispatch.transfer, code, reason))
        dispatch.is_broken = True

    def _end_if_over(self, dispatch: Dispatch) -> None:
        if dispatch.writing:
            return
        is_sent = dispatch.next_chunk == dispatch.order.plan.chunks and not dispatch.is_broken
        if dispatch.stop is None and not is_sent:
            return
        del self._open[dispatch.transfer]
        self._reports.append(Sent(dispatch.transfer) if dispatch.stop is None else Quiet(dispatch.transfer))
