"""Small pulls that wait to be launched, and which of them can share launches. Pure.

From Python, a launch takes longer than the kernel of a small pull. Pulls that differ in nothing but their places can be
one launch, with their places one behind the other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvbridge_kernels.prepared_pull import PlacedPull, joined

from .memory import AttachedPool

# Two H100s, b83b81a: 64 pulls of 2 or 8 MiB take 0.74 of the time if they share launches. Chunks of 32 MiB gain
# nothing: their kernels take as long as a launch.
SMALL_BYTES = 8 << 20
MOST_WAITING = 64


@dataclass(frozen=True, slots=True)
class SmallPull:
    """A pull of one chunk from the memory of `sender` into `receiver`, or of several with a ticket each."""

    tickets: tuple[int, ...]
    sender: AttachedPool
    receiver: AttachedPool
    pull: PlacedPull

    @property
    def size_bytes(self) -> int:
        return self.pull.chunks * self.pull.prepared.size_bytes


class SmallPulls:
    """Those that wait, the oldest first. At most `most_bytes` share launches."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting: deque[SmallPull] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < MOST_WAITING

    def add(self, ticket: int, sender: AttachedPool, receiver: AttachedPool, pull: PlacedPull) -> None:
        self._waiting.append(SmallPull((ticket,), sender, receiver, pull))

    def next(self) -> SmallPull:
        """Take out the oldest, together with later ones that can share its launches."""
        oldest = self._waiting.popleft()
        together, others, left_bytes = [oldest], [], self._most_bytes - oldest.size_bytes
        for each in self._waiting:
            if each.pull.prepared is oldest.pull.prepared and left_bytes >= each.size_bytes:
                together.append(each)
                left_bytes -= each.size_bytes
            else:
                others.append(each)
        self._waiting = deque(others)
        tickets = tuple(ticket for each in together for ticket in each.tickets)
        return SmallPull(tickets, oldest.sender, oldest.receiver, joined([each.pull for each in together]))

    def is_using(self, pool: AttachedPool) -> bool:
        return any(pool in (each.sender, each.receiver) for each in self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
