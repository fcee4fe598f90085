"""Small collections: by deadline, by turn, most recent only. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

SPARE_ENTRIES = 64

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Times at which something ends. Setting a key again moves it."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def set(self, key: K, at: float) -> None:
        self._at[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._at) + SPARE_ENTRIES:  # stale entries outnumber live ones
            self._rebuild()

    def __len__(self) -> int:
        """How many entries are kept, cleared ones included."""
        return len(self._heap)

    def clear(self, key: K) -> None:
        self._at.pop(key, None)
        if len(self._heap) > 2 * len(self._at) + SPARE_ENTRIES:
            self._rebuild()

    def put_off(self, seconds: float) -> None:
        """Delay all deadlines by `seconds`."""
        self._at = {key: at + seconds for key, at in self._at.items()}
        self._rebuild()

    def at(self, key: K) -> float | None:
        """When this one is due, or None."""
        return self._at.get(key)

    def due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has passed."""
        keys = []
        while (first := self._first()) is not None and first[0] <= now:
            heapq.heappop(self._heap)
            del self._at[first[2]]
            keys.append(first[2])
        return keys

    def next(self) -> float | None:
        """When the next one is due, or None."""
        first = self._first()
        return None if first is None else first[0]

    def _first(self) -> tuple[float, int, K] | None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _rebuild(self) -> None:
        self._heap = [(at, index, key) for index, (key, at) in enumerate(self._at.items())]
        self._count = len(self._heap)
        heapq.heapify(self._heap)


T = TypeVar("T")


class FairQueue(Generic[T]):
    """A fair queue: the lowest turn goes first; among equals, the one added first. Each name waits once."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, T]] = {}
        self._heap: list[tuple[int, int, str]] = []  # (turn, count, name), gone ones included
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: str, turn: int, what: T) -> None:
        """Queue `what`, unless `name` is queued already. `turn` must not change while it waits."""
        if name in self._waiting:
            return
        self._count += 1
        self._waiting[name] = self._count, what
        heapq.heappush(self._heap, (turn, self._count, name))

    def take(self) -> T | None:
        """Remove and return the next one, or None."""
        while self._heap:
            _, count, name = heapq.heappop(self._heap)
            if name in self._waiting and self._waiting[name][0] == count:
                return self._waiting.pop(name)[1]
        return None

    def discard(self, name: str) -> None:
        if self._waiting.pop(name, None) is not None and len(self._heap) > 2 * len(self._waiting) + SPARE_ENTRIES:
            counts = {name: count for name, (count, _) in self._waiting.items()}
            self._heap = [each for each in self._heap if counts.get(each[2]) == each[1]]
            heapq.heapify(self._heap)


class Recent(Generic[K]):
    """The last `most` names added."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: dict[K, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: K) -> bool:
        return name in self._names

    def add(self, name: K) -> None:
        """Make it the newest, even if it was known."""
        self.discard(name)
        self._names[name] = None
        if len(self._names) > self._most:
            self.discard(next(iter(self._names)))

    def discard(self, name: K) -> None:
        self._names.pop(name, None)

    def clear(self) -> None:
        self._names.clear()
