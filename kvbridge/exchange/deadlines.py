"""Deadlines by name: every wait has one. Pure; the caller brings the clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
SPARE = 64


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
        self._shrink()

    def __len__(self) -> int:
        """How many entries are kept, cleared ones included."""
        return len(self._heap)

    def clear(self, key: K) -> None:
        self._at.pop(key, None)
        self._shrink()

    def put_off(self, seconds: float) -> None:
        """All of them come later by so much."""
        self._at = {key: at + seconds for key, at in self._at.items()}
        self._rebuild()

    def due(self, now: float) -> list[K]:
        """The keys whose time has come; they are cleared."""
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

    def _shrink(self) -> None:
        """Forget what was moved or cleared before a day's worth of it has gathered."""
        if len(self._heap) > 2 * len(self._at) + SPARE:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(at, index, key) for index, (key, at) in enumerate(self._at.items())]
        self._count = len(self._heap)
        heapq.heapify(self._heap)
