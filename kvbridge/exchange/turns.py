"""Who waits for a slot. Pure."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")
SPARE = 64


class Turns(Generic[T]):
    """Who came, or had a slot, longest ago goes first; of equals, who was able to use one first. Each name once."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, T]] = {}
        self._heap: list[tuple[int, int, str]] = []  # (turn, count, name), gone ones included
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: str, turn: int, what: T) -> None:
        """Unless it waits already. `turn` must not change while it does."""
        if name in self._waiting:
            return
        self._count += 1
        self._waiting[name] = self._count, what
        heapq.heappush(self._heap, (turn, self._count, name))

    def take(self) -> T | None:
        """Whose turn it is; it does not wait any more."""
        while self._heap:
            _, count, name = heapq.heappop(self._heap)
            if name in self._waiting and self._waiting[name][0] == count:
                return self._waiting.pop(name)[1]
        return None

    def discard(self, name: str) -> None:
        if self._waiting.pop(name, None) is not None and len(self._heap) > 2 * len(self._waiting) + SPARE:
            counts = {name: count for name, (count, _) in self._waiting.items()}
            self._heap = [each for each in self._heap if counts.get(each[2]) == each[1]]
            heapq.heapify(self._heap)
