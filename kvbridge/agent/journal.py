"""The latest events of requests, kept in memory for `kvbridge trace`."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable

from kvbridge_proto.status import MAX_ENTRIES, TraceEntry

KEPT = 8192  # entries: some hundred requests, or the last seconds of a busy agent
MOST_TEXT = 1024


class Journal:
    """One agent's journal. Times are read from `clock`; entries have seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept: int = KEPT) -> None:
        self._clock = clock
        self._began_at = time.time() - clock()
        self._entries: deque[TraceEntry] = deque(maxlen=kept)

    def note(
        self,
        what: str,
        text: str = "",
        *,
        request: str = "",
        rendezvous: str = "",
        transfer: str = "",
        seconds: float | None = None,
        at: float | None = None,
    ) -> TraceEntry:
        """Record an event that happened at `at` on our clock, or now."""
        entry = TraceEntry(
            at_s=self._began_at + (self._clock() if at is None else at),
            what=what,
            request=request,
            rendezvous=rendezvous,
            transfer=transfer,
            text=text[:MOST_TEXT],
            seconds=seconds,
        )
        self._entries.append(entry)
        return entry

    def about(self, names: Collection[str]) -> tuple[TraceEntry, ...]:
        """Entries about these requests, rendezvous ids or transfers, and about all that belongs to them, by time.

        At most MAX_ENTRIES, the newest. Without names: about the slowest want that is still kept.
        """
        if not names:
            slowest = max((each for each in self._entries if each.seconds is not None), key=_seconds, default=None)
            names = {slowest.request} if slowest is not None else set()
        beside = defaultdict[str, list[str]](list)  # each name, and those that an entry has beside it
        for entry in self._entries:
            together = _names(entry)
            for name in together:
                beside[name] += together
        known, ahead = set[str](), list(names)
        while ahead:  # each name is followed once, however long the chain: the agent's loop waits for us
            if (name := ahead.pop()) not in known:
                known.add(name)
                ahead += beside.get(name, ())
        found = (entry for entry in self._entries if belongs(entry, known))
        return tuple(sorted(found, key=lambda entry: entry.at_s)[-MAX_ENTRIES:])


def belongs(entry: TraceEntry, names: Collection[str]) -> bool:
    return entry.request in names or entry.transfer in names or entry.rendezvous in names


def names_in(entries: Iterable[TraceEntry]) -> set[str]:
    """The requests, rendezvous ids and transfers named in these entries."""
    return {name for each in entries for name in _names(each)}


def _names(entry: TraceEntry) -> list[str]:
    return [name for name in (entry.request, entry.rendezvous, entry.transfer) if name]


def _seconds(entry: TraceEntry) -> float:
    return entry.seconds or 0.0
