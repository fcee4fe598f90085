"""Requests that are under way, by what the journal was told of them: each is looked back at when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvbridge_proto.status import TraceEntry

from .journal import Journal

Role = Literal["source", "sink"]
Stage = Literal["claim", "begin", "move"]

MOST = 4096  # of each role; the oldest go first, and with them those whose end nobody told
BEGINS: dict[Role, str] = {"source": "offered", "sink": "wanted"}
ENDS: dict[Role, tuple[str, ...]] = {"source": ("released",), "sink": ("done", "failed")}
FIRST_BYTES: dict[Role, tuple[str, ...]] = {"source": ("readable", "written"), "sink": ("reading", "landed")}


@dataclass(slots=True)
class Life:
    """What one agent knows of one request: the first entry of each kind, and the names of its transfers."""

    role: Role
    first: dict[str, TraceEntry] = field(default_factory=dict)
    transfers: set[str] = field(default_factory=set)
    traceparent: str = ""  # the engine's span, as its request said it

    def add(self, entry: TraceEntry) -> None:
        known = self.first.get(entry.what)
        if known is None or entry.at_s < known.at_s:
            self.first[entry.what] = entry
        if entry.transfer:
            self.transfers.add(entry.transfer)

    @property
    def stages(self) -> Iterator[tuple[Stage, float, float]]:
        """Each stage that it went through, with its begin and end, seconds since 1970.

        claim: until receiver and sender had met. begin: until the first bytes could move. move: until it was over.
        """
        began_at, claimed_at = self._first_of(BEGINS[self.role]), self._first_of("claimed")
        moved_at, over_at = self._first_of(*FIRST_BYTES[self.role]), self._first_of(*ENDS[self.role])
        if began_at is None or claimed_at is None:
            return
        met_at = max(began_at, claimed_at)  # a sender may be asked before its engine has anything to offer
        yield "claim", began_at, met_at
        if moved_at is not None:
            yield "begin", met_at, max(met_at, moved_at)
            if over_at is not None:
                yield "move", max(met_at, moved_at), over_at

    def _first_of(self, *whats: str) -> float | None:
        return min((self.first[what].at_s for what in whats if what in self.first), default=None)


class Lives:
    """The journal as one role writes it. `ended` hears of each request that is over."""

    def __init__(self, role: Role, journal: Journal, ended: Callable[[Life], None], most: int = MOST) -> None:
        self._role: Role = role
        self._journal = journal
        self._ended = ended
        self._most = most
        self._of_request: dict[str, Life] = {}
        self._of_transfer: dict[str, Life] = {}  # also of claims that nobody has found a request for

    def note(
        self,
        what: str,
        text: str = "",
        *,
        request: str = "",
        room: str = "",
        transfer: str = "",
        seconds: float | None = None,
        traceparent: str = "",
    ) -> None:
        """Something has happened now."""
        entry = self._journal.note(what, text, request=request, room=room, transfer=transfer, seconds=seconds)
        if (life := self._life(entry)) is None:
            return
        life.add(entry)
        life.traceparent = life.traceparent or traceparent
        if transfer:
            self._keep(self._of_transfer, transfer, life)
        if what in ENDS[self._role]:
            self._of_request.pop(request, None)
            for each in life.transfers:
                self._of_transfer.pop(each, None)
            self._ended(life)

    def _life(self, entry: TraceEntry) -> Life | None:
        """Whose entry it is; None for what comes after the end."""
        life = self._of_request.get(entry.request)
        by_transfer = self._of_transfer.get(entry.transfer)
        if life is None and entry.what == BEGINS[self._role]:
            self._keep(self._of_request, entry.request, life := Life(self._role))
        if by_transfer is None and life is None and entry.what == "claimed":
            return Life(self._role)
        if life is None:
            return by_transfer
        if by_transfer is not None and by_transfer is not life:  # claimed before anybody knew by which request
            for each in by_transfer.first.values():
                life.add(each)
        return life

    def _keep(self, kept: dict[str, Life], name: str, life: Life) -> None:
        kept[name] = life
        if len(kept) > self._most:
            del kept[next(iter(kept))]
