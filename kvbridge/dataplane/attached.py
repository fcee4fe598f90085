"""An attached engine: its memory, and the fence that says how far its stream is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from kvbridge_proto.engine import Attach

from ..device.fence import FencePage
from ..device.memory import AttachedPool
from ..device.sharing import SharedHandles
from ..errors import EngineError
from ..failpoints import failpoint

KEPT_WITHDRAWALS = 1024


@dataclass(slots=True)
class EngineLiveness:
    """How far the loop has read our engine's messages, on its own clock. The loop writes it, the data plane reads it.

    An engine that takes blocks back waits READERS_S at most for us to stop reading them. What was read while this agent
    stalled may belong to another request.
    """

    heard_at: float = float("inf")  # everything sent before this time has been read
    withdrawals: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By offer: when its last withdrawal was read, and a time after which its first was sent."""
    forgotten_at: float = float("-inf")  # when the newest of the withdrawals dropped from it was read
    has_left: bool = False  # its memory is about to be unmapped: warm nothing for it, expect no message from it

    def withdrew(self, number: int, now: float) -> None:
        _, said_after = self.withdrawals.get(number, (now, self.heard_at))
        self.withdrawals[number] = now, min(said_after, self.heard_at)
        if len(self.withdrawals) > KEPT_WITHDRAWALS:
            oldest = next(iter(self.withdrawals))
            self.forgotten_at = max(
                self.forgotten_at, self.withdrawals[oldest][0]
            )  # before the deletion: the data plane checks both
            del self.withdrawals[oldest]

    def has_withdrawn(self, number: int, since: float, before: float) -> bool:
        """Whether a withdrawal of this offer may have been read since `since`, and sent by `before`."""
        at, said_after = self.withdrawals.get(number, (float("-inf"), 0.0))
        return since <= self.forgotten_at or (at >= since and said_after <= before)


@dataclass(frozen=True, slots=True)
class AttachedMemory:
    """One epoch of our engine. Close it once nothing touches the memory."""

    epoch: int
    memory: AttachedPool
    fence: FencePage | None
    liveness: EngineLiveness = field(default_factory=EngineLiveness)
    shared: SharedHandles | None = None  # with these, receivers on this host open the memory

    @classmethod
    def open(
        cls, attach: Attach, fds: list[int], epoch: int, heard_at: float, device: str, is_shared: bool
    ) -> AttachedMemory:
        """Map what the engine sent, on `device`. Raises KVBridgeError, with nothing left mapped.

        With `is_shared` the handles are kept, for receivers on this host.
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
        """Whether the engine's stream has finished all work up to `count`."""
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
