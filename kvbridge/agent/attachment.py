"""What an engine attached: its memory, and the fence that says how far its stream is."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..device.fence import FencePage
from ..device.memory import AttachedPool

KEPT = 1024


@dataclass(slots=True)
class Word:
    """How far the loop has heard our engine, on its clock. The loop writes it, the mover reads it.

    An engine that takes blocks back waits for us to stop reading them, but not for ever (READERS_S): what was read
    while we stood still may be another request's.
    """

    heard_at: float = float("inf")  # all that it had said by then
    withdrawals: tuple[tuple[float, float], ...] = ()  # the last: when each was heard, and after when it was said
    has_left: bool = False  # its memory is about to be unmapped: nothing is made ready for it, or heard of it, any more

    def withdrew(self, now: float) -> None:
        self.withdrawals = (*self.withdrawals[1 - KEPT :], (now, self.heard_at))

    def has_withdrawn(self, since: float, before: float) -> bool:
        """Whether a withdrawal was heard after `since` that may have been said by `before`."""
        return any(at >= since and said_after <= before for at, said_after in self.withdrawals)


@dataclass(frozen=True, slots=True)
class Attachment:
    """One epoch of our engine. Close it when nothing touches the memory any more."""

    epoch: int
    memory: AttachedPool
    fence: FencePage | None
    word: Word = field(default_factory=Word)

    def has_reached(self, count: int) -> bool:
        """Whether the engine's stream has finished what it counted as `count`."""
        return self.fence is None or self.fence.reached(count)

    def close(self) -> None:
        self.memory.close()
        if self.fence is not None:
            self.fence.close()
