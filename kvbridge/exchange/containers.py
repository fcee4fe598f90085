"""Small collections: by deadline, by turn, by share, most recent only. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

SPARE_ENTRIES = 64
SHARE = 2  # slots that a peer may hold for each that is free: one that stands still leaves a third

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
        while (first := self.next()) is not None and first <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            keys.append(key)
        return keys

    def next(self) -> float | None:
        """When the next one is due, or None."""
        heap, at = self._heap, self._at
        while heap and at.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _rebuild(self) -> None:
        self._heap = [(at, index, key) for index, (key, at) in enumerate(self._at.items())]
        self._count = len(self._heap)
        heapq.heapify(self._heap)


T = TypeVar("T")


class FairQueue(Generic[T]):
    """A fair queue: the lowest turn goes first; among equals, the one added first. Each name waits once."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[int, T]] = {}
        self._heap: list[tuple[int, int, Hashable]] = []  # (turn, count, name), gone ones included
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: Hashable, turn: int, what: T) -> None:
        """Queue `what`, unless `name` is queued already. `turn` must not change while it waits."""
        if name in self._waiting:
            return
        self._count += 1
        self._waiting[name] = self._count, what
        heapq.heappush(self._heap, (turn, self._count, name))

    def take(self) -> T | None:
        """Remove and return the next one, or None."""
        if self.turn is None:
            return None
        _, _, name = heapq.heappop(self._heap)
        return self._waiting.pop(name)[1]

    @property
    def turn(self) -> int | None:
        """That of the next one, or None."""
        while self._heap:
            turn, count, name = self._heap[0]
            if name in self._waiting and self._waiting[name][0] == count:
                return turn
            heapq.heappop(self._heap)
        return None

    def discard(self, name: Hashable) -> None:
        if self._waiting.pop(name, None) is not None and len(self._heap) > 2 * len(self._waiting) + SPARE_ENTRIES:
            counts = {name: count for name, (count, _) in self._waiting.items()}
            self._heap = [each for each in self._heap if counts.get(each[2]) == each[1]]
            heapq.heapify(self._heap)


class PeerQueue(Generic[T]):
    """A fair queue of several peers. Those whose share is used up keep their places, and the others go first."""

    def __init__(self) -> None:
        self._of: dict[Hashable, FairQueue[T]] = {}
        self._peers: FairQueue[Hashable] = FairQueue()  # each with the turn of its first

    def __len__(self) -> int:
        return sum(map(len, list(self._of.values())))  # any thread may ask: `list` copies atomically

    def add(self, peer: Hashable, name: str, turn: int, what: T) -> None:
        """As `FairQueue.add`."""
        self._of.setdefault(peer, FairQueue()).add(name, turn, what)
        self._line_up(peer)

    def take(self, may_take: Callable[[Hashable], bool]) -> T | None:
        """Remove and return the next one of a peer that may take one, or None."""
        found, asked = None, []
        while found is None and (peer := self._peers.take()) is not None:
            asked.append(peer)
            if may_take(peer):
                found = self._of[peer].take()
        for peer in asked:
            self._line_up(peer)
        return found

    def discard(self, peer: Hashable, name: str) -> None:
        if peer in self._of:
            self._of[peer].discard(name)
            self._line_up(peer)

    def _line_up(self, peer: Hashable) -> None:
        self._peers.discard(peer)
        if (turn := self._of[peer].turn) is None:
            del self._of[peer]
        else:
            self._peers.add(peer, turn, peer)


class Shares:
    """How many slots each peer holds. What it holds is the others' loss, until it gives it back.

    A peer that is slow or frozen keeps what it gets. So no peer takes more than SHARE times as many as are free then,
    but each may have one.
    """

    def __init__(self) -> None:
        self._held: Counter[Hashable] = Counter()

    def may_take(self, peer: Hashable, free: int) -> bool:
        """Whether this peer may take one more of the free slots."""
        held = self._held[peer]
        return free > 0 and (held == 0 or held < SHARE * free)

    def take(self, peer: Hashable) -> None:
        self._held[peer] += 1

    def give_back(self, peer: Hashable) -> None:
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]

    def clear(self) -> None:
        self._held.clear()


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
