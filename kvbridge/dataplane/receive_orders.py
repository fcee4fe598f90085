"""The data plane's receive orders: chunks that land are checked against them, without asking the loop. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import starmap

from kvbridge_proto.peer import Notice, SlotLease

from ..exchange.orders import (
    Broken,
    Dropped,
    Failure,
    Landed,
    Lend,
    Quiet,
    ReceiveOrder,
    ReceivingReport,
    StageReached,
    StopReceiving,
    Summed,
    TransferStage,
)
from .attached import AttachedMemory


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


@dataclass(frozen=True, slots=True)
class LandedChunk:
    """A chunk that landed and matched its order, on its way into the engine's blocks."""

    ordered: OrderedReceive
    order: ReceiveOrder
    attached: AttachedMemory
    notice: Notice

    @property
    def size_bytes(self) -> int:
        return self.notice.chunk_bytes


class ReceiveOrders:
    """All transfers that are being received. For the data plane's thread; any thread may read the counts."""

    def __init__(self) -> None:
        self.lent = 0  # leases that nothing has landed under: while there are any, poll for notices
        self.scattering = 0  # slots that are being read
        self.has_reports = False
        self._open: dict[str, OrderedReceive] = {}
        self._reached: list[StageReached] = []
        self._landed: dict[str, Landed] = {}
        self._summed: dict[str, dict[int, int]] = {}  # by transfer: digests by chunk
        self._reports: list[ReceivingReport] = []

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

    def reach(self, transfer: str, stage: TransferStage, at: float, chunks: int) -> None:
        """A transfer reached a stage: for the journal."""
        self._reached.append(StageReached(transfer, stage, at, chunks))

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

    def take_reached(self) -> list[StageReached]:
        """The stages reached since the last call. They wait for a report: none of them is worth waking the loop."""
        reached, self._reached = self._reached, []
        return reached

    def report(self, report: ReceivingReport) -> None:
        """Add another report for the exchange."""
        self._reports.append(report)
        self.has_reports = True

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
