"""One record of what happens to the requests of one role, written by its runner once it has happened.

What happens is an event: a message of our engine or of a peer, a report of the data plane, or something that the
exchange has decided. The journal, the log, metrics, spans and the counts of prompts are views of these events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from kvbridge_proto.engine import Abandon, Done, Failed, Offer, Released, ToEngine, Want, Withdraw
from kvbridge_proto.peer import BlockTables, Body, Claim, Drained, Failing, Ready, Refuse, Settled
from kvbridge_proto.status import TraceEntry

from ..exchange.actions import Met, Notable
from ..exchange.orders import Broken, Landed, Pulled, ReceivingReport, SendingReport, Shipped, StageReached
from ..oneline import plain
from .journal import MOST_TEXT, Journal

K = TypeVar("K", int, str)
Role = Literal["sender", "receiver"]
Stage = Literal["claim", "begin", "move"]

MOST_REQUESTS = 16384  # per role: as many as may be open. And as many transfers. The oldest are forgotten first
MOST_TRANSFERS = 64  # of one request, the last; a receiver may claim nothing at all again and again
BEGINS: dict[Role, str] = {"sender": "offered", "receiver": "wanted"}
ENDS: dict[Role, tuple[str, ...]] = {"sender": ("released",), "receiver": ("done", "failed")}
FIRST_BYTES: dict[Role, tuple[str, ...]] = {"sender": ("readable", "gathering"), "receiver": ("reading", "landed")}
BEGINNINGS = ("gathering", "reading")
MOVED = {Met: "met", Landed: "scattered", Shipped: "written"}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What one agent knows of one request: its names, and until it has ended the first entry of each kind.

    It may have several transfers: one for each agent that sends or receives it. `request` is "" while only claims
    have come. `traceparent` is the engine's span.
    """

    role: Role
    request: str = ""
    traceparent: str = ""
    transfers: dict[str, None] = field(default_factory=dict)  # in the order of their claims
    first: dict[str, TraceEntry] = field(default_factory=dict)
    is_over: bool = False

    def add(self, entry: TraceEntry) -> None:
        known = self.first.get(entry.what)
        if known is None or entry.at_s < known.at_s:
            self.first[entry.what] = entry

    def join(self, transfer: str) -> None:
        self.transfers[transfer] = None
        if len(self.transfers) > MOST_TRANSFERS:
            del self.transfers[next(iter(self.transfers))]

    def stages(self) -> list[tuple[Stage, float, float]]:
        """Each stage that it went through, with its begin and end in seconds since 1970.

        claim: until receiver and sender had met. begin: until the first bytes could move. move: until its end.
        """
        began_at, claimed_at = self._first_of(BEGINS[self.role]), self._first_of("claimed")
        moved_at, over_at = self._first_of(*FIRST_BYTES[self.role]), self._first_of(*ENDS[self.role])
        if began_at is None or claimed_at is None:
            return []
        met_at = max(began_at, claimed_at)  # a claim may come before the offer
        found: list[tuple[Stage, float, float]] = [("claim", began_at, met_at)]
        if moved_at is not None:
            found.append(("begin", met_at, max(met_at, moved_at)))
            if over_at is not None:
                found.append(("move", max(met_at, moved_at), over_at))
        return found

    def _first_of(self, *whats: str) -> float | None:
        first: float | None = None
        for what in whats:
            if (entry := self.first.get(what)) is not None and (first is None or entry.at_s < first):
                first = entry.at_s
        return first


Event = Offer | Withdraw | Want | Abandon | ToEngine | Body | SendingReport | ReceivingReport | Notable | RequestRecord


class View(Protocol):
    """Looks at events of these kinds, on the loop. A RequestRecord is the event that a request has ended."""

    @property
    def kinds(self) -> Collection[type]: ...
    def see(self, event: Any, role: Role, at: float) -> None: ...


class Record:
    """Of one role. It writes the journal and the log, and shows each event to the `views` that look at its kind."""

    def __init__(
        self,
        role: Role,
        journal: Journal,
        clock: Callable[[], float],
        views: Sequence[View] = (),
        most: int = MOST_REQUESTS,
    ) -> None:
        self._role: Role = role
        self._log = logging.getLogger(f"kvbridge.{role}")
        self._entries, self._began_at = journal.entries, journal.began_at
        self._clock = clock
        self._views = {
            kind: [each.see for each in views if kind in each.kinds] for view in views for kind in view.kinds
        }
        self._most = most
        self._of_number: dict[int, RequestRecord] = {}  # by the offer's or want's number; also for a while after it
        self._of_transfer: dict[str, RequestRecord] = {}  # also claims whose request is not known yet

    def note(self, event: Event, at: float | None = None, peer: str = "", number: int = 0) -> None:
        """It has happened, at `at` on our clock, or now.

        `peer` is who claims or is claimed from. `number` is the offer's or want's, if the event does not say it.
        """
        if isinstance(event, StageReached):
            at = event.at
        elif at is None:
            at = self._clock()
        if (entry := told(event, self._role, peer)) is not None:
            self._tell(event, *entry, at, number)
        for see in self._views.get(type(event), ()):
            see(event, self._role, at)

    def _tell(self, event: Any, what: str, text: str, at: float, number: int) -> None:
        """Write it in the journal, and for whoever debugs in the log."""
        number = number or getattr(event, "number", 0)
        transfer = getattr(event, "transfer", "") or getattr(event, "about", "")
        record = self._of_number.get(number) or self._of_transfer.get(transfer)
        if record is None or (transfer and self._of_transfer.get(transfer) is not record):
            record = self._join(record, event, what, number, transfer)
        entry = TraceEntry(
            at_s=self._began_at + at,
            what=what,
            request="" if record is None else record.request,
            rendezvous=getattr(event, "rendezvous", ""),
            transfer=transfer,
            text=text[:MOST_TEXT],
            seconds=getattr(event, "seconds", None),
        )
        self._entries.append(entry)
        if self._log.isEnabledFor(logging.DEBUG):
            took = "" if entry.seconds is None else f" ms={entry.seconds * 1e3:.2f}"
            where = f"rendezvous={entry.rendezvous} " if entry.rendezvous else ""
            self._say(logging.DEBUG, what, "%s%s%s", (where, text, took), number, transfer)
        if record is not None and not record.is_over:
            record.add(entry)
            if what in ENDS[self._role]:
                self._end(record, number, at)

    def _join(
        self, record: RequestRecord | None, event: Any, what: str, number: int, transfer: str
    ) -> RequestRecord | None:
        """Remember that this transfer is of the request, or that the request begins. None if neither is known."""
        if record is None and what == BEGINS[self._role]:
            record = RequestRecord(self._role, event.request, event.traceparent)
            self._keep(self._of_number, number, record)
        elif record is None and what == "claimed":
            record = RequestRecord(self._role)
        if record is None or not transfer:
            return record
        early = self._of_transfer.get(transfer)
        if early is not None and not record.is_over:  # claimed before its request was known
            for each in early.first.values():
                record.add(each)
        record.join(transfer)
        self._keep(self._of_transfer, transfer, record)
        return record

    def _end(self, record: RequestRecord, number: int, at: float) -> None:
        """The request has ended: show what was recorded of it, and keep its names only."""
        record.is_over = True
        names = RequestRecord(self._role, record.request, transfers=record.transfers, is_over=True)
        self._of_number[number] = names
        for transfer in record.transfers:
            if transfer in self._of_transfer:  # else it was forgotten: nothing would ever remove it again
                self._of_transfer[transfer] = names
        for see in self._views.get(RequestRecord, ()):
            see(record, self._role, at)

    def _keep(self, kept: dict[K, RequestRecord], key: K, record: RequestRecord) -> None:
        kept[key] = record
        if len(kept) > self._most:
            del kept[next(iter(kept))]

    def warn(self, event: str, text: str = "", *args: object, number: int = 0, transfer: str = "") -> None:
        """Log a warning about an offer or want, named by its number, or about a transfer."""
        self._say(logging.WARNING, event, text, args, number, transfer)

    def _say(self, level: int, event: str, text: str, args: tuple[object, ...], number: int, transfer: str) -> None:
        """Log a line with `request=` and `transfer=`, as far as they are known: all transfers, with commas."""
        record = self._of_number.get(number) or self._of_transfer.get(transfer)
        if record is not None:
            transfer = transfer or ",".join(record.transfers)
        request = "" if record is None else record.request
        known = {name: value for name, value in (("request", request), ("transfer", transfer)) if value}
        line = " ".join((*(f"{name}=%s" for name in known), text)).rstrip()
        self._log.log(level, f"{event}: {line}", *map(plain, known.values()), *args)


def told(event: Event, role: Role, peer: str) -> tuple[str, str] | None:
    """What the journal says of an event: a word and a text (docs/operations.md has the words). None if nothing."""
    match event:
        case Offer(first_token=first, tokens=tokens, is_last=is_last):
            return "offered", f"tokens [{first}, {tokens}){', all there are' * is_last}"
        case Want(first_token=first, end_token=end, sender=sender):
            return "wanted", f"tokens [{first}, {end}) of {sender}"
        case Claim() if role == "receiver":
            return "claimed", f"of {peer}"
        case Claim(first_token=first, end_token=end):
            return "claimed", f"tokens [{first}, {end}) by {peer}"
        case BlockTables(tokens=tokens, blocks=blocks) if blocks:
            return "readable", f"tokens up to {tokens}"
        case Ready(chunks=chunks) if role == "receiver":
            return "ready", f"{chunks} chunks can be written"
        case StageReached(stage=stage, chunks=chunks):
            return stage, f"from chunk {chunks}" if stage in BEGINNINGS else f"{chunks} chunks so far"
        case Met(chunks=chunks, size_bytes=size_bytes) | Shipped(chunks=chunks, size_bytes=size_bytes):
            return MOVED[type(event)], f"{chunks} chunks, {size_bytes} bytes"
        case Landed(chunks=chunks, size_bytes=size_bytes) if chunks:
            return MOVED[Landed], f"{chunks} chunks, {size_bytes} bytes"
        case Settled() if role == "sender":
            return "settled", ""
        case Done(moved_bytes=moved, unfilled_layers=layers):
            return "done", f"{moved} bytes" + (f", zeros in {layers} draft layers" if layers else "")
        case Released(code=code, reason=reason):
            return "released", f"{code} {reason}".strip()
    return _why_ended(event)


def _why_ended(event: Event) -> tuple[str, str] | None:
    """The same of what ends a request early."""
    match event:
        case Withdraw(reason=reason):
            return "withdrawn", reason
        case Abandon():
            return "abandoned", ""
        case Refuse(code=code, reasons=reasons):
            return "refused", f"{code}: {'; '.join(reasons)}"
        case Failed(code=code, reason=reason):
            return "failed", f"{code}: {reason}"
        case (
            Broken(code=code, reason=reason)
            | Failing(code=code, reason=reason)
            | Drained(code=code, reason=reason)
            | Pulled(failure=(code, reason))
        ) if code:
            return "broken", f"{code}: {reason}"
    return None
