"""The receive orders of the data plane: what lands is checked against them, without asking anybody. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    StopReceiving,
)
from .attached import AttachedMemory


@dataclass(slots=True, eq=False)
class OrderedReceive:
    """One transfer that is being received. `order` is None where its rows are pulled."""

    transfer: str
    order: ReceiveOrder | None = None
    attachment: AttachedMemory | None = None
    leases: dict[int, int] = field(default_factory=dict)  # generations by slot, of those that nothing has landed under
    missing: set[int] = field(default_factory=set)  # chunks that have not landed
    moving: int = 0  # scatters and reads under way
    stop: StopReceiving | None = None


@dataclass(frozen=True, slots=True)
class LandedChunk:
    """A chunk that landed and counts, on its way into the engine's blocks."""

    receipt: OrderedReceive
    order: ReceiveOrder
    attachment: AttachedMemory
    notice: Notice

    @property
    def size_bytes(self) -> int:
        return self.notice.chunk_bytes


class ReceiveOrders:
    """All transfers that are being received. On the data plane's thread, but for the counts, which anybody may read."""

    def __init__(self) -> None:
        self.lent = 0  # leases that nothing has landed under: notices must be looked for
        self.scattering = 0  # slots that are being read
        self._open: dict[str, OrderedReceive] = {}
        self._landed: dict[str, Landed] = {}
        self._reports: list[ReceivingReport] = []

    def order(self, order: ReceiveOrder, attachment: AttachedMemory) -> None:
        """Chunks of this transfer may come, once slots are lent for them."""
        missing = set(range(order.plan.chunks))
        self._open[order.transfer] = OrderedReceive(order.transfer, order, attachment, missing=missing)

    def lend(self, lend: Lend) -> None:
        """Chunks may come in these slots."""
        if (receipt := self._open.get(lend.transfer)) is None:
            return  # all of it is here: nothing will be written under them
        receipt.leases.update((lease.slot, lease.generation) for lease in lend.leases)
        self.lent += len(lend.leases)

    def stop(self, stop: StopReceiving) -> None:
        """Take nothing more of this transfer. Quiet is reported once nothing of it is being moved."""
        if (receipt := self._open.get(stop.transfer)) is None:
            self._reports.append(Quiet(stop.transfer))
            return
        receipt.stop = stop
        self._forget_leases(receipt)
        self._end_if_over(receipt)

    def landed(self, notice: Notice) -> LandedChunk | None:
        """A chunk came in. It counts only if everything matches; anything else is reported as dropped: None."""
        receipt = self._open.get(notice.transfer)
        if receipt is None or receipt.order is None or not matches(notice, receipt, receipt.order):
            self._reports.append(Dropped(notice.transfer, notice.slot))
            return None
        assert receipt.attachment is not None
        del receipt.leases[notice.slot]
        self.lent -= 1
        receipt.missing.discard(notice.chunk)
        receipt.moving += 1
        self.scattering += 1
        return LandedChunk(receipt, receipt.order, receipt.attachment, notice)

    def scattered(self, arrival: LandedChunk, failure: Failure) -> None:
        """Its slot is read no more; `failure` says why its rows were not taken over."""
        receipt, notice = arrival.receipt, arrival.notice
        lease, transfer = SlotLease(notice.slot, notice.generation), receipt.transfer
        before = self._landed.get(transfer) or Landed(transfer, (), 0, 0)
        chunks, size_bytes = (1, arrival.size_bytes) if failure is None else (0, 0)
        leases = (*before.leases, lease)
        self._landed[transfer] = Landed(transfer, leases, before.chunks + chunks, before.size_bytes + size_bytes)
        if failure is not None and receipt.stop is None:
            self._reports.append(Broken(transfer, *failure))
        self.scattering -= 1
        self._moved(receipt)

    def begin_read(self, transfer: str) -> OrderedReceive:
        """Rows of it are pulled from here on, until `end_read`."""
        receipt = self._open.setdefault(transfer, OrderedReceive(transfer))
        receipt.moving += 1
        return receipt

    def end_read(self, receipt: OrderedReceive) -> None:
        """They are not any more."""
        self._moved(receipt)

    def take_reports(self) -> list[ReceivingReport]:
        """What there is to report since the last call. Nothing lands of a transfer that something else is said of."""
        reports = [*self._landed.values(), *self._reports]
        self._landed, self._reports = {}, []
        return reports

    def report(self, report: ReceivingReport) -> None:
        """Something else that our exchange waits for."""
        self._reports.append(report)

    def _moved(self, receipt: OrderedReceive) -> None:
        receipt.moving -= 1
        self._end_if_over(receipt)

    def _end_if_over(self, receipt: OrderedReceive) -> None:
        if receipt.moving or (receipt.missing and receipt.stop is None):
            return
        self._forget_leases(receipt)
        del self._open[receipt.transfer]
        if receipt.stop is not None:
            self._reports.append(Quiet(receipt.transfer))

    def _forget_leases(self, receipt: OrderedReceive) -> None:
        self.lent -= len(receipt.leases)
        receipt.leases.clear()


def matches(notice: Notice, receipt: OrderedReceive, order: ReceiveOrder) -> bool:
    """Whether a notice is what we are waiting for, in every field."""
    return (
        receipt.leases.get(notice.slot) == notice.generation
        and notice.chunk in receipt.missing
        and notice.chunk_bytes == order.plan.chunk(notice.chunk).size_bytes
        and notice.token == order.token
        and notice.sender_incarnation == order.sender_incarnation
        and notice.receiver_incarnation == order.receiver_incarnation
        and notice.sender_epoch == order.sender_epoch
        and notice.receiver_epoch == order.receiver_epoch
    )
