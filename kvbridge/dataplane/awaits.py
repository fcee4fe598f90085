"""What a job of the data plane waits for. A job is a generator: it yields a wait and is resumed with the outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from kvbridge_proto.engine import READERS_S

from ..device.copier import BlockCopier, Compiling, Moved
from ..errors import EngineError, KVBridgeError
from ..exchange.orders import Digest, Failure, Fill, Lease, Pull, ReceiveOrder, SendOrder, StopReceiving, StopSending
from ..transport.fabric import Fabric, WriteFailed, WriteLate, Wrote
from .attached import AttachedMemory

log = logging.getLogger("kvbridge.data_plane")

GATHER_HEARD_S = READERS_S / 2  # a gather counts only if our engine's messages were read within this time


class Stoppable(Protocol):
    """A transfer that the exchange may stop."""

    @property
    def transfer(self) -> str: ...
    @property
    def stop(self) -> StopSending | StopReceiving | None: ...


@dataclass(frozen=True, slots=True)
class WaitFence:
    """Until the engine's stream has finished all work up to `count`, or `what` is to stop; resumed with None.

    EngineError is thrown into the job if the engine leaves (`engine_left`) or the deadline passes (`fence_late`).
    """

    attached: AttachedMemory
    count: int
    deadline: float
    what: Stoppable | None  # the transfer that waits

    @property
    def is_over(self) -> bool:
        return (self.what is not None and self.what.stop is not None) or self.attached.has_reached(self.count)

    def late(self) -> EngineError:
        return EngineError("fence_late", f"fence: {self.count} was not reached in time")


@dataclass(frozen=True, slots=True)
class WaitEngineHeard:
    """Until the loop has read all that the engine had sent by `at`; resumed with None, or EngineError as above."""

    attached: AttachedMemory
    at: float
    deadline: float

    @property
    def is_over(self) -> bool:
        return self.attached.liveness.heard_at >= self.at

    def late(self) -> EngineError:
        return EngineError("engine_unheard", "what the engine said was not heard in time")


@dataclass(frozen=True, slots=True)
class WaitLease:
    """Until the lease covers `at`, or the transfer has ended; resumed with None, or EngineError as above."""

    attached: AttachedMemory
    lease: Lease
    at: float
    deadline: float

    @property
    def is_over(self) -> bool:
        return self.lease.is_given_up or self.lease.counts(self.at)

    def late(self) -> EngineError:
        return EngineError("lease_over", "the sender did not say in time that its blocks were still there")


@dataclass(frozen=True, slots=True)
class WaitCopier:
    """Until the copier may begin another move; resumed with None, or EngineError as above."""

    attached: AttachedMemory
    copier: BlockCopier
    deadline: float

    @property
    def is_over(self) -> bool:
        return self.copier.has_room

    def late(self) -> EngineError:
        return EngineError("too_many_moves", "other moves did not end in time")


@dataclass(frozen=True, slots=True)
class WaitKernels:
    """Until kernels are compiled, or failed to compile; resumed with None, or EngineError as above."""

    attached: AttachedMemory
    compiling: Compiling
    deadline: float

    @property
    def is_over(self) -> bool:
        return self.compiling.is_over()

    def late(self) -> EngineError:
        return EngineError("not_compiled", "kernels were not compiled in time")


@dataclass(frozen=True, slots=True)
class WaitMove:
    """Until the copier's move is over; resumed with Moved."""

    ticket: int


@dataclass(frozen=True, slots=True)
class WaitWrite:
    """Until the write has ended or is late; resumed with the event. After WriteLate, wait again for the end."""

    fabric: Fabric
    id: int


WaitOnLoop = WaitFence | WaitEngineHeard | WaitLease | WaitCopier | WaitKernels  # polled
Wait = WaitOnLoop | WaitMove | WaitWrite
Event = Moved | Wrote | WriteFailed | WriteLate | None
Job = Generator[Wait, Event, None]
Settle = Callable[[Any, Exception | None], None]  # takes a job's result, or its error


def begun(attached: AttachedMemory, count: int, ends: float, what: Stoppable) -> Generator[Wait, Event, None]:
    """Wait until our engine has finished with the blocks. Raises EngineError if the transfer is stopped by then."""
    if what.stop is None and not attached.has_reached(count):
        yield WaitFence(attached, count, ends, what)
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
            wait = WaitKernels(attached, compiling, clock() + wait_s)
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
        yield WaitEngineHeard(attached, now, now + wait_s)
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
