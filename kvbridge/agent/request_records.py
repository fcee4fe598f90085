"""Collects the journal's entries of each open request, and hands the record on once the request has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kvbridge_proto.peer import BlockTables, Body, Drained, Failing, Refuse
from kvbridge_proto.status import TraceEntry

from ..exchange.orders import StageReached, TransferStage
from .journal import Journal
from .request_names import MOST_TRANSFERS, RequestNames

K = TypeVar("K", int, str)
Role = Literal["sender", "receiver"]
Stage = Literal["claim", "begin", "move"]

MOST_RECORDS = 4096  # per role; the oldest go first, and so do requests whose end was never noted
BEGINS: dict[Role, str] = {"sender": "offered", "receiver": "wanted"}
ENDS: dict[Role, tuple[str, ...]] = {"sender": ("released",), "receiver": ("done", "failed")}
BEGINNINGS: tuple[TransferStage, ...] = ("gathering", "reading")
FIRST_BYTES: dict[Role, tuple[str, ...]] = {"sender": ("readable", "gathering"), "receiver": ("reading", "landed")}


@dataclass(slots=True)
class RequestRecord:
    """What one agent knows of one request: the first entry of each kind, and the names of its transfers."""

    role: Role
    first: dict[str, TraceEntry] = field(default_factory=dict)
    transfers: set[str] = field(default_factory=set)
    traceparent: str = ""  # the engine's span, from its request

    def add(self, entry: TraceEntry) -> None:
        known = self.first.get(entry.what)
        if known is None or entry.at_s < known.at_s:
            self.first[entry.what] = entry
        if entry.transfer and len(self.transfers) < MOST_TRANSFERS:
            self.transfers.add(entry.transfer)

    @property
    def stages(self) -> Iterator[tuple[Stage, float, float]]:
        """Each stage that it went through, with its begin and end in seconds since 1970.

        claim: until receiver and sender had met. begin: until the first bytes could move. move: until its end.
        """
        began_at, claimed_at = self._first_of(BEGINS[self.role]), self._first_of("claimed")
        moved_at, over_at = self._first_of(*FIRST_BYTES[self.role]), self._first_of(*ENDS[self.role])
        if began_at is None or claimed_at is None:
            return
        met_at = max(began_at, claimed_at)  # a claim may come before the offer
        yield "claim", began_at, met_at
        if moved_at is not None:
            yield "begin", met_at, max(met_at, moved_at)
            if over_at is not None:
                yield "move", max(met_at, moved_at), over_at

    def _first_of(self, *whats: str) -> float | None:
        return min((self.first[what].at_s for what in whats if what in self.first), default=None)


class CarryTimes:
    """When the last rows of transfers that have still to be carried were computed."""

    def __init__(self, most: int = MOST_RECORDS) -> None:
        self._computed_at: dict[str, float] = {}
        self._most = most

    def computed(self, transfer: str, at: float) -> None:
        """More of its rows, perhaps the last, were computed at `at`."""
        self._computed_at[transfer] = at
        if len(self._computed_at) > self._most:  # of transfers that failed
            del self._computed_at[next(iter(self._computed_at))]

    def carried(self, transfer: str, at: float) -> float | None:
        """It has been carried. Returns for how many seconds its last rows had been computed, if that is known."""
        computed_at = self._computed_at.pop(transfer, None)
        return None if computed_at is None else max(0.0, at - computed_at)


class RequestRecords:
    """Writes the journal for one role. `ended` is called with each request that has ended."""

    def __init__(
        self, role: Role, journal: Journal, ended: Callable[[RequestRecord], None], most: int = MOST_RECORDS
    ) -> None:
        self._role: Role = role
        self._journal = journal
        self._ended = ended
        self._most = most
        self.names = RequestNames()
        self._of_number: dict[int, RequestRecord] = {}  # the open offers or wants
        self._of_transfer: dict[str, RequestRecord] = {}  # also claims whose request is not known yet

    def note(
        self,
        what: str,
        text: str = "",
        *,
        number: int = 0,
        request: str = "",
        rendezvous: str = "",
        transfer: str = "",
        seconds: float | None = None,
        traceparent: str = "",
        at: float | None = None,
    ) -> None:
        """Record an event that happened at `at` on the journal's clock, or now.

        `number` is the offer's or want's. `request` is needed only when it begins.
        """
        if what == BEGINS[self._role]:
            self.names.begin(number, request)
        if number and transfer:
            self.names.join(number, transfer)
        request = request or self.names.request_of(number)
        entry = self._journal.note(
            what, text, request=request, rendezvous=rendezvous, transfer=transfer, seconds=seconds, at=at
        )
        if (record := self._record(entry, number)) is None:
            return
        record.add(entry)
        record.traceparent = record.traceparent or traceparent
        if transfer:
            self._keep(self._of_transfer, transfer, record)
        if what in ENDS[self._role]:
            self._of_number.pop(number, None)
            for each in record.transfers:
                self._of_transfer.pop(each, None)
            self._ended(record)

    def note_message(self, body: Body, at: float, number: int = 0) -> None:
        """Record what a message says of a transfer, on either side."""
        match body:
            case BlockTables(transfer=transfer, tokens=tokens, blocks=blocks) if blocks:
                self.note("readable", f"tokens up to {tokens}", number=number, transfer=transfer, at=at)
            case Refuse(about=transfer, code=code, reasons=reasons):
                self.note("refused", f"{code}: {'; '.join(reasons)}", transfer=transfer, at=at)
            case (
                Failing(transfer=transfer, code=code, reason=reason)
                | Drained(transfer=transfer, code=code, reason=reason)
            ) if code:
                self.note("broken", f"{code}: {reason}", transfer=transfer, at=at)

    def reach(self, report: StageReached) -> None:
        """Record a stage that a transfer reached."""
        chunks = f"from chunk {report.chunks}" if report.stage in BEGINNINGS else f"{report.chunks} chunks so far"
        self.note(report.stage, chunks, transfer=report.transfer, at=report.at)

    def _record(self, entry: TraceEntry, number: int) -> RequestRecord | None:
        """The record that an entry belongs to; None after the request has ended."""
        record = self._of_number.get(number)
        by_transfer = self._of_transfer.get(entry.transfer)
        if record is None and entry.what == BEGINS[self._role]:
            self._keep(self._of_number, number, record := RequestRecord(self._role))
        if by_transfer is None and record is None and entry.what == "claimed":
            return RequestRecord(self._role)
        if record is None:
            return by_transfer
        if by_transfer is not None and by_transfer is not record:  # claimed before its request was known
            for each in by_transfer.first.values():
                record.add(each)
        return record

    def _keep(self, kept: dict[K, RequestRecord], key: K, record: RequestRecord) -> None:
        kept[key] = record
        if len(kept) > self._most:
            del kept[next(iter(kept))]
