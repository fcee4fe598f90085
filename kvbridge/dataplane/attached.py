"""What an engine attached: its memory, and the fence that says how far its stream is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from kvbridge_proto.engine import Attach

from ..device.fence import FencePage
from ..device.memory import AttachedPool
from ..device.sharing import SharedHandles
from ..errors import EngineError
from ..failpoints import failpoint

KEPT = 1024


@dataclass(slots=True)
class EngineLiveness:
    """How far the loop has heard our engine, on its clock. The loop writes it, the data plane reads it.

    An engine that takes blocks back waits for us to stop reading them, but not for ever (READERS_S): what was read
    while we stood still may be another request's.
    """

    heard_at: float = float("inf")  # all that it had said by then
    withdrawals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By request: when the last was heard, and after when the first was said."""
    forgotten_at: float = float("-inf")  # when the last of those was heard that are not kept any more
    has_left: bool = False  # its memory is about to be unmapped: nothing is made ready for it, or heard of it, any more

    def withdrew(self, request: str, now: float) -> None:
        _, said_after = self.withdrawals.get(request, (now, self.heard_at))
        self.withdrawals[request] = now, min(said_after, self.heard_at)
        if len(self.withdrawals) > KEPT:
            oldest = next(iter(self.withdrawals))
            self.forgotten_at = max(
                self.forgotten_at, self.withdrawals[oldest][0]
            )  # first: the data plane looks at both
            del self.withdrawals[oldest]

    def has_withdrawn(self, request: str, since: float, before: float) -> bool:
        """Whether it may have been heard after `since` that this one was withdrawn, said by `before`."""
        at, said_after = self.withdrawals.get(request, (float("-inf"), 0.0))
        return since <= self.forgotten_at or (at >= since and said_after <= before)


@dataclass(frozen=True, slots=True)
class AttachedMemory:
    """One epoch of our engine. Close it when nothing touches the memory any more."""

    epoch: int
    memory: AttachedPool
    fence: FencePage | None
    liveness: EngineLiveness = field(default_factory=EngineLiveness)
    shared: SharedHandles | None = None  # what receivers of this host open it by

    @classmethod
    def open(
        cls, attach: Attach, fds: list[int], epoch: int, heard_at: float, device: str, is_shared: bool
    ) -> AttachedMemory:
        """Map what the engine sent, on `device`. Raises KVBridgeError; nothing stays mapped then.

        With `is_shared` the handles are kept, for receivers of this host to open.
        """
        with ExitStack() as opened:
            memory = AttachedPool.open(attach.pool, attach.handles, fds, device)
            opened.callback(memory.close)
            failpoint("agent.attaching")
            fence = None if attach.fence_fd is None else FencePage(_fd(fds, attach.fence_fd))
            if fence is not None:
                opened.callback(fence.close)
            shared = SharedHandles.keep(attach.handles, fds) if is_shared else None
            opened.pop_all()
        return cls(epoch, memory, fence, EngineLiveness(heard_at), shared)

    def has_reached(self, count: int) -> bool:
        """Whether the engine's stream has finished what it counted as `count`."""
        return self.fence is None or self.fence.reached(count)

    def close(self) -> None:
        self.memory.close()
        if self.fence is not None:
            self.fence.close()
        if self.shared is not None:
            self.shared.close()


def _fd(fds: list[int], index: int) -> int:
    if index >= len(fds):
        raise EngineError("fd_missing", f"fence_fd: {index}, {len(fds)} came with the message")
    return fds[index]
