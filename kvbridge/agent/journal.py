"""The latest events of requests, kept in memory for `kvbridge trace`."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping

from kvbridge_proto.status import MAX_ENTRIES, TraceEntry

KEPT = 8192  # entries: some hundred requests, or the last seconds of a busy agent
MOST_TEXT = 1024


class Journal:
    """One agent's journal: its two records append to `entries`. `began_at` is the time at which `clock` showed 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept: int = KEPT) -> None:
        self.began_at = time.time() - clock()
        self.entries: deque[TraceEntry] = deque(maxlen=kept)

    def about(self, names: Collection[str]) -> tuple[TraceEntry, ...]:
        """Entries about these requests, rendezvous ids or transfers, and about all that belongs to them, by time.

        A single name may also be an id that a client knows: `meant`. At most MAX_ENTRIES, the newest. Without names:
        about the slowest want that is still kept.
        """
        if not names:
            slowest = max((each for each in self.entries if each.seconds is not None), key=_seconds, default=None)
            names = {slowest.request} if slowest is not None else set()
        beside = names_beside(self.entries)
        if len(names) == 1:
            names = meant(next(iter(names)), beside)
        known = followed(names, beside)
        found = (entry for entry in self.entries if belongs(entry, known))
        return tuple(sorted(found, key=lambda entry: entry.at_s)[-MAX_ENTRIES:])


def belongs(entry: TraceEntry, names: Collection[str]) -> bool:
    return entry.request in names or entry.transfer in names or entry.rendezvous in names


def names_beside(entries: Iterable[TraceEntry]) -> Mapping[str, list[str]]:
    """Each request, rendezvous id and transfer in these entries, with the names that stand beside it in one."""
    beside = defaultdict[str, list[str]](list)
    for entry in entries:
        together = _names(entry)
        for name in together:
            beside[name] += together
    return beside


def followed(names: Iterable[str], beside: Mapping[str, list[str]]) -> set[str]:
    """These names and all others of the same requests."""
    known, ahead = set[str](), list(names)
    while ahead:  # each name is followed once, however long the chain: the agent's loop waits for us
        if (name := ahead.pop()) not in known:
            known.add(name)
            ahead += beside.get(name, ())
    return known


def meant(name: str, known: Collection[str]) -> set[str]:
    """Which of the `known` names this one means: itself, or else all that contain it as a word.

    A client knows its own id or its answer's; engines and routers put more around it: `X` becomes `cmpl-X` in vLLM's
    answer, `1_cmpl-X-0-1f2e3d4c` in the engine and `X/0/<digest>` as rendezvous id.
    """
    return {name} if name in known else {each for each in known if name and _is_word_of(name, each)}


def _is_word_of(name: str, text: str) -> bool:
    """Whether it occurs with no letter or digit on either side."""
    first = text.find(name)
    while first >= 0:
        end = first + len(name)
        if not text[max(0, first - 1) : first].isalnum() and not text[end : end + 1].isalnum():
            return True
        first = text.find(name, first + 1)
    return False


def _names(entry: TraceEntry) -> list[str]:
    return [name for name in (entry.request, entry.rendezvous, entry.transfer) if name]


def _seconds(entry: TraceEntry) -> float:
    return entry.seconds or 0.0
