"""Small pulls that wait to be launched, and which of them can share launches. Pure.

From Python, a launch takes longer than the kernel of a small pull. Pulls that differ in nothing but their places can be
one launch, with their places one behind the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvbridge_kernels.prepared_pull import PlacedPull, joined

from .memory import AttachedPool

# Chunks up to this size wait for others. The kernel of a larger one takes about as long as its launch from Python.
SMALL_BYTES = 8 << 20
MOST_BYTES = 32 << 20  # in one launch, so that the first of them does not wait long for the last
MOST_WAITING = 64


@dataclass(frozen=True, slots=True)
class SmallPull:
    """A pull of one chunk from the memory of `sender` into `receiver`, or of several with a ticket each."""

    tickets: Sequence[int]
    sender: AttachedPool
    receiver: AttachedPool
    pull: PlacedPull
    plane_words: int  # of tables, however many chunks share them
    place_words: int

    @property
    def size_bytes(self) -> int:
        return self.pull.chunks * self.pull.prepared.size_bytes


class SmallPulls:
    """Those that wait, the oldest first. Those that share launches also share `most_words` words of tables."""

    def __init__(self, most_words: int) -> None:
        self._most_words = most_words
        self._waiting: deque[SmallPull] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < MOST_WAITING

    def add(self, small: SmallPull) -> None:
        self._waiting.append(small)

    def take(self) -> SmallPull:
        """Take out the oldest, together with later ones that can share its launches."""
        oldest = self._waiting.popleft()
        together, others = [oldest], []
        left_bytes = MOST_BYTES - oldest.size_bytes
        left_words = self._most_words - oldest.plane_words - oldest.place_words
        for each in self._waiting:
            is_like = each.pull.prepared is oldest.pull.prepared
            if is_like and left_bytes >= each.size_bytes and left_words >= each.place_words:
                assert each.sender is oldest.sender and each.receiver is oldest.receiver
                together.append(each)
                left_bytes -= each.size_bytes
                left_words -= each.place_words
            else:
                others.append(each)
        self._waiting = deque(others)
        return SmallPull(
            tuple(ticket for each in together for ticket in each.tickets),
            oldest.sender,
            oldest.receiver,
            joined([each.pull for each in together]),
            oldest.plane_words,
            sum(each.place_words for each in together),
        )

    def is_using(self, pool: AttachedPool) -> bool:
        return any(pool in (each.sender, each.receiver) for each in self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
