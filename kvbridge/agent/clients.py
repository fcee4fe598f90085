"""Serves the clients of the agent's socket: the engine, and commands that ask for status. A connection is one client.

The client that attaches is the engine. When its connection ends, the engine has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvbridge_proto.engine import (
    Abandon,
    Attach,
    Computed,
    Decline,
    Detach,
    Directory,
    Expect,
    NoOffer,
    Offer,
    Reclaim,
    Refused,
    Release,
    ReleasedAll,
    Rescale,
    ToAgent,
    Want,
    Weights,
    Withdraw,
)
from kvbridge_proto.engine import Failed as WantFailed
from kvbridge_proto.framing import BadFrame
from kvbridge_proto.status import PoolQuery, Status, StatusQuery, Trace, TraceQuery

from ..dataplane.attached import CurrentEngine
from ..dataplane.data_plane import DataPlane
from ..exchange.sender import released
from ..transport.local import LocalConnection, Unfit
from ..unix_socket import close_fds
from .engines import Engines
from .journal import Journal
from .metrics import Metrics, Prompts
from .runners import ReceiverRunner, SenderRunner

log = logging.getLogger("kvbridge.engine")
DETACHED = "detached"


@dataclass(eq=False, repr=False)
class Clients:
    """Runs on the loop; `serve` is one task per client."""

    _current: CurrentEngine
    _engines: Engines
    _receiver: ReceiverRunner
    _sender: SenderRunner
    _prompts: Prompts
    _data_plane: DataPlane
    _metrics: Metrics
    _journal: Journal
    _status: Callable[[], Status]
    _clock: Callable[[], float]

    async def serve(self, connection: LocalConnection) -> None:
        """Serve one client until its connection ends, and close it. What fails is logged, and costs nobody else."""
        try:
            await self._serve(connection)
        except Exception:
            log.exception("a client's connection failed: pid=%d", connection.pid)
        finally:
            connection.close()

    async def _serve(self, connection: LocalConnection) -> None:
        try:
            while (received := await connection.receive()) is not None:
                message, fds = received
                if connection is self._current.connection:
                    self._data_plane.linger.keep_awake()
                try:
                    await self._on_message(connection, message, fds)
                finally:
                    if fds:
                        close_fds(fds)
        except BadFrame as error:
            self._metrics.rejected(error.code)
            log.warning("rejected a client: pid=%d code=%s %s", connection.pid, error.code, error)
            connection.send(Refused(code=error.code, reasons=(str(error)[:1024],)))
        finally:
            if connection is self._current.connection or self._engines.leaving is not None:
                await self._engines.leave("the engine's connection ended")

    async def _on_message(self, connection: LocalConnection, message: ToAgent | Unfit, fds: list[int]) -> None:
        engine = self._current.engine
        match message:
            case StatusQuery():
                connection.send(self._status())
            case PoolQuery():
                connection.send(self._engines.pool_status())
            case TraceQuery(names=names):
                connection.send(Trace(agent=self._engines.card, entries=self._journal.about(names)))
            case Release() if connection is not self._current.connection:
                offers = self._sender.release()
                log.info("a command released what nobody had claimed: offers=%d pid=%d", offers, connection.pid)
                connection.send(ReleasedAll(offers=offers))
            case Attach():
                self._engines.attach(connection, message, fds)
            case _ if engine is None or connection is not self._current.connection:
                if (leaving := self._engines.leaving) is not None:  # Refused promises that its memory is not touched
                    await asyncio.shield(leaving)
                number = getattr(message, "number", 0)
                connection.send(Refused(code="not_attached", reasons=("attach first",), number=number))
            case Unfit():
                self._refuse(connection, message)
            case Directory(ranks=ranks):
                self._engines.name_ranks(engine, ranks)
            case Offer() if self._engines.is_closing and not self._sender.is_due(message):
                connection.send(released(message, "draining"))
            case Offer(fence=fence) | Want(fence=fence) if fence and self._has_no_fence():
                reason = f"fence: {fence}, but none came with attach"
                connection.send(Refused(code="no_fence", reasons=(reason,), number=message.number))
            case Offer():
                self._sender.offer(message, engine)
            case Withdraw(number=number):
                if (memory := self._current.memory) is not None:
                    memory.liveness.withdrew(number, self._clock())
                self._sender.withdraw(message)
            case NoOffer():
                self._sender.no_offer(message)
            case Release():
                self._sender.release()
            case Reclaim(blocks=blocks) if (memory := self._current.memory) is not None:
                self._sender.do(self._sender.sending.reclaim(blocks, self._clock(), memory.has_reached))
            case Expect() if not self._engines.is_closing:
                self._receiver.expect(message)
            case Want(number=number, request=name) if self._engines.is_closing and not self._receiver.knows(number):
                reason = "this agent is stopping"
                connection.send(WantFailed(number=number, request=name, code="draining", reason=reason))
            case Want():
                self._receiver.want(message, engine)
            case Abandon():
                self._receiver.abandon(message)
            case Computed():
                self._prompts.computed(message, self._clock())
            case Rescale():
                self._engines.rescale(connection, message, engine)
            case Weights():
                self._engines.reweigh(connection, message, engine)
            case Decline(revision=revision, reason=reason):
                self._receiver.do(self._receiver.receiving.declined(revision, reason, self._clock()))
            case Detach():
                await self._engines.leave(DETACHED)

    def _refuse(self, connection: LocalConnection, unfit: Unfit) -> None:
        """Refuse an offer or a want that cannot be, alone. What is open under its number must not seem over."""
        code, number = "message_invalid", unfit.number
        self._metrics.rejected(code)
        log.warning("refused: %s %d: code=%s %s", unfit.kind, number, code, unfit.reason)
        if unfit.kind == "offer" and self._sender.knows(number):
            return self._sender.withdraw(Withdraw(number=number, reason=unfit.reason))  # its Released follows
        is_open = unfit.kind == "want" and self._receiver.knows(number)
        about = f"want {number}" if is_open else ""
        connection.send(Refused(code=code, reasons=(unfit.reason,), about=about, number=0 if is_open else number))

    def _has_no_fence(self) -> bool:
        memory = self._current.memory
        return memory is None or memory.fence is None
