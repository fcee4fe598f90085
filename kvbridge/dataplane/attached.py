"""An attached engine: its memory, its fence, how far it was heard; and what jobs of the data plane wait for.

A job is a generator: it yields a wait and is resumed with the outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvbridge_proto.engine import READERS_S, Attach, ToEngine

from ..device.copier import BlockCopier, Compiling, Moved
from ..device.fence import FencePage
from ..device.mapping import SharedHandles
from ..device.memory import AttachedPool
from ..errors import EngineError, KVBridgeError
from ..exchange.orders import Digest, Failure, Fill, Lease, Pull, ReceiveOrder, SendOrder, StopReceiving, StopSending
from ..exchange.session import AttachedEngine
from ..failpoints import failpoint
from ..transport.fabric import Fabric, WriteFailed, WriteLate, Wrote
from ..transport.local import LocalConnection
from ..values import Value

log = logging.getLogger("kvbridge.data_plane")

GATHER_HEARD_S = READERS_S / 2  # a gather counts only if our engine's messages were read within this time
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
            fence_fd = None if attach.fence_fd is None else _fd(fds, attach.fence_fd)
            fence = None if fence_fd is None else FencePage(fence_fd)
            if fence is not None:
                opened.callback(fence.close)
            shared = SharedHandles.keep(attach.handles, fds, fence_fd) if is_shared else None
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


@dataclass(frozen=True, slots=True)
class Attachment:
    """One epoch of an engine: what sessions need of it, its memory, and its connection (None once it is leaving).

    `version` is that of the protocol which was agreed on with its adapter.
    """

    engine: AttachedEngine
    memory: AttachedMemory
    connection: LocalConnection | None
    version: int

    def __post_init__(self) -> None:
        epochs = self.engine.epoch, self.memory.epoch
        assert epochs[0] == epochs[1], f"epoch: {epochs[0]} of the engine, {epochs[1]} of its memory"


class CurrentEngine:
    """Runs on the loop. Everything is None while no engine is attached."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.attachment: Attachment | None
        self.engine: AttachedEngine | None
        self.memory: AttachedMemory | None
        self.connection: LocalConnection | None
        self.change(None)
        self._clock = clock

    def change(self, attachment: Attachment | None) -> None:
        """This one is attached from now on, or none. Another thread sees one or the other, and nothing between."""
        self.attachment = attachment
        self.engine = None if attachment is None else attachment.engine
        self.memory = None if attachment is None else attachment.memory
        self.connection = None if attachment is None else attachment.connection

    def hang_up(self) -> None:
        """The engine is leaving: send it nothing more. Its memory stays for moves under way."""
        if self.attachment is not None:
            self.change(replace(self.attachment, connection=None))

    def tell(self, message: ToEngine) -> None:
        """Send this to the engine, or drop it if none is connected: its requests concern nobody else."""
        if self.connection is not None:
            self.connection.send(message)

    def note_if_silent(self) -> None:
        """Note the time if we have read everything that the engine has sent so far."""
        now = self._clock()
        if self.memory is not None and self.connection is not None and self.connection.is_silent:
            self.memory.liveness.heard_at = now


class Stoppable(Protocol):
    """A transfer that the exchange may stop."""

    @property
    def transfer(self) -> str: ...
    @property
    def stop(self) -> StopSending | StopReceiving | None: ...


class WaitOnLoop(Value):
    """Is polled until it `is_over`, then the job is resumed with None.

    EngineError is thrown into the job if the engine leaves (`engine_left`) or the deadline passes (`late`).
    """

    attached: AttachedMemory
    deadline: float

    @property
    def is_over(self) -> bool:
        raise NotImplementedError

    def late(self) -> EngineError:
        raise NotImplementedError


class WaitFence(WaitOnLoop):
    """Until the engine's stream has finished all work up to `count`, or `what`, the transfer that waits, is to stop."""

    count: int
    what: Stoppable | None

    @property
    def is_over(self) -> bool:
        return (self.what is not None and self.what.stop is not None) or self.attached.has_reached(self.count)

    def late(self) -> EngineError:
        return EngineError("fence_late", f"fence: {self.count} was not reached in time")


class WaitEngineHeard(WaitOnLoop):
    """Until the loop has read all that the engine had sent by `at`."""

    at: float

    @property
    def is_over(self) -> bool:
        return self.attached.liveness.heard_at >= self.at

    def late(self) -> EngineError:
        return EngineError("engine_unheard", "what the engine said was not heard in time")


class WaitLease(WaitOnLoop):
    """Until the lease covers `at`, or the transfer has ended."""

    lease: Lease
    at: float

    @property
    def is_over(self) -> bool:
        return self.lease.is_given_up or self.lease.counts(self.at)

    def late(self) -> EngineError:
        return EngineError("lease_over", "the sender did not say in time that its blocks were still there")


class WaitCopier(WaitOnLoop):
    """Until the copier may begin another move."""

    copier: BlockCopier

    @property
    def is_over(self) -> bool:
        return self.copier.has_room

    def late(self) -> EngineError:
        return EngineError("too_many_moves", "other moves did not end in time")


class WaitKernels(WaitOnLoop):
    """Until kernels are compiled, or failed to compile."""

    compiling: Compiling

    @property
    def is_over(self) -> bool:
        return self.compiling.is_over()

    def late(self) -> EngineError:
        return EngineError("not_compiled", "kernels were not compiled in time")


class WaitMove(Value):
    """Until the copier's move is over; resumed with Moved."""

    ticket: int


class WaitWrite(Value):
    """Until the write has ended or is late; resumed with the event. After WriteLate, wait again for the end."""

    fabric: Fabric
    id: int


Wait = WaitOnLoop | WaitMove | WaitWrite
Event = Moved | Wrote | WriteFailed | WriteLate | None
Job = Generator[Wait, Event, None]
Settle = Callable[[Any, Exception | None], None]  # takes a job's result, or its error


def begun(attached: AttachedMemory, count: int, ends: float, what: Stoppable) -> Generator[Wait, Event, None]:
    """Wait until our engine has finished with the blocks. Raises EngineError if the transfer is stopped by then."""
    if what.stop is None and not attached.has_reached(count):
        yield WaitFence(attached, ends, count, what)
    if (stop := what.stop) is not None:
        raise EngineError(stop.code, stop.reason)


def started(
    begin: Callable[[], Generator[Wait, Event, int]],
    attached: AttachedMemory,
    wait_s: float,
    clock: Callable[[], float],
) -> Generator[Wait, Event, int]:
    """Begin a move and return its ticket. If kernels are missing, wait for them and run `begin` again."""
    while True:
        try:
            return (yield from begin())
        except Compiling as compiling:
            wait = WaitKernels(attached, clock() + wait_s, compiling)
        yield wait


def taken_back(
    attached: AttachedMemory, number: int, asked_at: float, wait_s: float, clock: Callable[[], float]
) -> Generator[Wait, Event, Failure]:
    """The failure if the engine may have reused the blocks while they were read. It can only if this agent stalled.

    An engine reuses blocks READERS_S after it withdrew them or gave us up. A withdrawal was sent after we last
    found the socket empty and before we read it. Once the engine is gone, the socket is not found empty again.
    """
    liveness, now = attached.liveness, clock()
    if liveness.has_left:  # no withdrawal will be read any more
        return "engine_left", "the engine left while its blocks were read"
    if now - liveness.heard_at >= GATHER_HEARD_S:
        yield WaitEngineHeard(attached, now + wait_s, now)
    if not liveness.has_withdrawn(number, asked_at, now - GATHER_HEARD_S):
        return None
    reason = "blocks were withdrawn while this agent was stalled in a gather"
    return "blocks_taken_back", reason


def failure_of(code: str, error: Exception, order: SendOrder | Digest | ReceiveOrder | Pull | Fill) -> tuple[str, str]:
    """Code and reason of a transfer's failure. An error that is not KVBridgeError is logged with its traceback."""
    if isinstance(error, KVBridgeError):
        return error.code, str(error)
    log.error("%s: request=%s transfer=%s", code, order.request, order.transfer, exc_info=error)
    return code, f"{type(error).__name__}: {error}"
