"""Our slots that chunks are gathered into before they are sent. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kvbridge_proto.status import SlotCounts


@dataclass(frozen=True, slots=True)
class SendSlot:
    """One slot that we gather into. `era` is the number of the `make` that made it."""

    index: int
    era: int


class SendSlots:
    """The slots we gather into. Only we write them, but a write out of one may stay under way for ever."""

    def __init__(self, count: int) -> None:
        self._era = 0
        self._late: set[SendSlot] = set()
        self._taken: Counter[int] = Counter()  # by era: slots that are gathered into, or that a write reads
        self.turn = 0  # slots taken so far
        self.make(count)

    def __len__(self) -> int:
        return self._count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> SendSlot | None:
        if not self._free:
            return None
        self.turn += 1
        self._taken[self._era] += 1
        return SendSlot(self._free.popleft(), self._era)

    def quarantine(self, local: SendSlot) -> None:
        """The write out of this slot is late: nobody knows when it ends."""
        if local.era == self._era:
            self._late.add(local)

    def give_back(self, local: SendSlot) -> None:
        """The write out of this slot has ended."""
        self._taken[local.era] -= 1
        if local.era != self._era:
            return
        assert local.index not in self._free
        self._late.discard(local)
        self._free.append(local.index)

    def is_used(self, era: int) -> bool:
        """Whether any slot of this `make` may still be read by a write."""
        return self._taken[era] > 0

    def make(self, count: int) -> int:
        """Replace the slots by `count` new ones. Old ones are left to the writes out of them. Returns the new era."""
        self._era += 1
        self._count = count
        self._free = deque(range(count))
        self._late.clear()
        return self._era

    def counts(self) -> SlotCounts:
        """How many slots are in which state; `quarantined` are those with a late write. Any thread may ask."""
        late, free = len(self._late), self.free
        return SlotCounts(free=free, lent=max(0, self._count - free - late), landed=0, quarantined=late)
