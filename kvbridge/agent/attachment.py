"""What an engine attached: its memory, and the fence that says how far its stream is."""

from __future__ import annotations

from dataclasses import dataclass

from ..device.fence import FencePage
from ..device.memory import AttachedPool


@dataclass(frozen=True, slots=True)
class Attachment:
    """One epoch of our engine. Close it when nothing touches the memory any more."""

    epoch: int
    memory: AttachedPool
    fence: FencePage | None

    def has_reached(self, count: int) -> bool:
        """Whether the engine's stream has finished what it counted as `count`."""
        return self.fence is None or self.fence.reached(count)

    def close(self) -> None:
        self.memory.close()
        if self.fence is not None:
            self.fence.close()
