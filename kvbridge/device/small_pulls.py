"""Small pulls that wait to be launched, and which of them can share launches. Pure.

From Python, a launch takes longer than the kernel of a small pull. Pulls that differ in nothing but their places can be
one launch, with their places one behind the other.
"""

from __future__ import annotations

from collections import deque

from kvbridge_kernels.prepared import Placed, joined

from ..values import Value, replace
from .memory import AttachedPool

# Chunks up to this size wait for others. The kernel of a larger one takes about as long as its launch from Python.
SMALL_PULL_BYTES = 8 << 20
MOST_TOGETHER_BYTES = 32 << 20  # in one launch, so that the first of them does not wait long for the last
MOST_SMALL_PULLS = 64


class SmallPull(Value):
    """A pull from the memory of `sender` into `receiver`, with a ticket for each chunk.

    At most `most` chunks like these can share launches.
    """

    tickets: tuple[int, ...]
    sender: AttachedPool
    receiver: AttachedPool
    pull: Placed
    most: int


class SmallPulls:
    """Those that wait, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[SmallPull] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < MOST_SMALL_PULLS

    def add(self, small: SmallPull) -> None:
        self._waiting.append(small)

    def take(self) -> SmallPull:
        """Take out the oldest, together with later ones that can share its launches."""
        oldest = self._waiting.popleft()
        prepared = oldest.pull.prepared
        most = min(oldest.most, MOST_TOGETHER_BYTES // max(1, prepared.slot_bytes))
        together, others = [oldest], []
        for each in self._waiting:
            if each.pull.prepared is prepared and len(together) < most:
                assert each.sender is oldest.sender and each.receiver is oldest.receiver
                together.append(each)
            else:
                others.append(each)
        self._waiting = deque(others)
        tickets = tuple(ticket for each in together for ticket in each.tickets)
        return replace(oldest, tickets=tickets, pull=joined([each.pull for each in together]))

    def is_using(self, pool: AttachedPool) -> bool:
        return any(pool in (each.sender, each.receiver) for each in self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
