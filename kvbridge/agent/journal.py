"""What became of the last requests: a line for each thing that happened, kept for `kvbridge trace`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from kvbridge_proto.status import MAX_ENTRIES, TraceEntry

KEPT = 8192  # entries: of some hundred requests, or of the last seconds of a busy agent
MOST_TEXT = 1024


class Journal:
    """Of one agent. `clock` is the one that its times are read from; entries say the time of day."""

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
        room: str = "",
        transfer: str = "",
        seconds: float | None = None,
    ) -> TraceEntry:
        """Something has happened now."""
        at_s = self._began_at + self._clock()
        entry = TraceEntry(
            at_s=at_s,
            what=what,
            request=request,
            room=room,
            transfer=transfer,
            text=text[:MOST_TEXT],
            seconds=seconds,
        )
        self._entries.append(entry)
        return entry

    def about(self, names: Collection[str]) -> tuple[TraceEntry, ...]:
        """What is known of these requests, rooms or transfers, and of all that belongs to them; the newest if too many.

        Without a name: of the want that took longest, of those that are kept.
        """
        if not names:
            slowest = max((each for each in self._entries if each.seconds is not None), key=_seconds, default=None)
            names = {slowest.request} if slowest is not None else set()
        known, count = set(names), -1
        while count < len(known):
            count = len(known)
            for entry in self._entries:
                if belongs(entry, known):
                    known.update(each for each in (entry.request, entry.room, entry.transfer) if each)
        return tuple(entry for entry in self._entries if belongs(entry, known))[-MAX_ENTRIES:]


def belongs(entry: TraceEntry, names: Collection[str]) -> bool:
    return entry.request in names or entry.transfer in names or entry.room in names


def names_in(entries: Iterable[TraceEntry]) -> set[str]:
    """The requests, rooms and transfers that they are about."""
    return {name for each in entries for name in (each.request, each.room, each.transfer) if name}


def _seconds(entry: TraceEntry) -> float:
    return entry.seconds or 0.0
