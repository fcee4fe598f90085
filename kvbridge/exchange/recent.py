"""A set that remembers only its newest members, for names that nobody is bound to take back. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Recent(Generic[K]):
    """The last `most` that were added."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: dict[K, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: K) -> bool:
        return name in self._names

    def add(self, name: K) -> None:
        """It is the newest, also if it was known."""
        self.discard(name)
        self._names[name] = None
        if len(self._names) > self._most:
            self.discard(next(iter(self._names)))

    def discard(self, name: K) -> None:
        self._names.pop(name, None)

    def clear(self) -> None:
        self._names.clear()
