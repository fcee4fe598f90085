"""What our engine's rows took to get to each receiver: a view of the sender's record."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvbridge_proto.peer import BlockTables, Settled

from ..exchange.actions import Met
from ..exchange.orders import Sent, StageReached
from .record import Role

MOST_OPEN = 4096  # transfers that have still to be carried; the oldest go first: some of them failed
MOST_RECEIVERS = 1024  # those that have got nothing for longest go first


@dataclass(slots=True)
class Total:
    """Of all transfers to one receiver. Seconds as of `kvbridge_carry_seconds`."""

    transfers: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _UnderWay:
    receiver: str  # its incarnation
    size_bytes: int
    computed_at: float | None = None  # its last rows so far


class Rates:
    """`observe` is told of each transfer how long it took from when its last rows were computed."""

    kinds: Collection[type] = (Met, StageReached, BlockTables, Sent, Settled)

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._open: dict[str, _UnderWay] = {}  # by transfer
        self._totals: dict[str, Total] = {}  # by the receiver's incarnation

    def to(self, receiver: str) -> Total:
        """What was carried to the agent of this incarnation."""
        return self._totals.get(receiver) or Total()

    def see(self, event: Any, role: Role, at: float) -> None:
        if role != "sender":
            return
        match event:
            case Met(transfer=transfer, receiver=receiver, size_bytes=size_bytes) if size_bytes:
                self._open[transfer] = _UnderWay(receiver, size_bytes)
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
            # An answer without blocks only renews a lease.
            case StageReached(transfer=transfer, stage="computed") | BlockTables(transfer=transfer, blocks=(_, *_)):
                if (known := self._open.get(transfer)) is not None:
                    known.computed_at = at
            case Sent(transfer=transfer) | Settled(transfer=transfer):
                if (known := self._open.pop(transfer, None)) is not None and known.computed_at is not None:
                    self._end(known, max(0.0, at - known.computed_at))

    def _end(self, known: _UnderWay, seconds: float) -> None:
        self._observe(seconds)
        total = self._totals[known.receiver] = self._totals.pop(known.receiver, Total())  # the latest last
        total.transfers += 1
        total.size_bytes += known.size_bytes
        total.seconds += seconds
        if len(self._totals) > MOST_RECEIVERS:
            del self._totals[next(iter(self._totals))]
