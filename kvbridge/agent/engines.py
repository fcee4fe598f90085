"""Our engine's side of the agent: who is attached, what it says, and its end.

One connection is one client. The first that attaches is the engine; others may only ask for the status. The end of the
engine's connection is the end of the engine: its memory is unmapped as soon as nothing touches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from kvbridge_proto.codec import BadFrame
from kvbridge_proto.common import OURS, AgentCard, Rank, negotiate
from kvbridge_proto.engine import (
    Abandon,
    Attach,
    Attached,
    Computed,
    Decline,
    Detach,
    Detached,
    Directory,
    Expect,
    Offer,
    Reclaim,
    Refused,
    Released,
    Rescale,
    Rescaled,
    ToAgent,
    ToEngine,
    Want,
    Withdraw,
)
from kvbridge_proto.engine import Failed as WantFailed
from kvbridge_proto.pool import Pool
from kvbridge_proto.status import EngineStatus, PoolQuery, PoolStatus, Status, StatusQuery, Trace, TraceQuery

from ..dataplane.attached import AttachedMemory, EngineLiveness
from ..dataplane.data_plane import DataPlane
from ..dataplane.resources import StagingEndpoints
from ..device.fence import FencePage
from ..device.memory import AttachedPool
from ..device.sharing import SharedHandles
from ..errors import EngineError, KVBridgeError
from ..exchange.route import Site
from ..exchange.session import AttachedEngine, engine_ranks
from ..failpoints import failpoint
from ..geometry.check import check_pool, rescaled
from ..geometry.plan import Planner
from ..geometry.traits import model_key, traits
from ..transport.local import LocalConnection
from .doors import Doors
from .journal import Journal
from .metrics import Metrics
from .peers import Peers
from .prompts import Prompts
from .receiver_runner import ReceiverRunner
from .sender_runner import SenderRunner

log = logging.getLogger("kvbridge.engine")
DETACHED = "detached"


class Engines:
    """Runs on the loop; `serve_connection` is one task per client."""

    def __init__(
        self,
        agent: Callable[[], AgentCard],
        data_plane: DataPlane,
        metrics: Metrics,
        status: Callable[[], Status],
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers: Peers
        self.doors: Doors
        self.receiver: ReceiverRunner
        self.sender: SenderRunner
        self.is_closing = False
        self.prompts = Prompts(metrics)
        self._agent = agent
        self._data_plane = data_plane
        self._metrics = metrics
        self._status = status
        self._journal = journal
        self._clock = clock
        self._connection: LocalConnection | None = None
        self._attached: AttachedMemory | None = None
        self._engine: AttachedEngine | None = None
        self._epoch = 0
        self._leaving: asyncio.Task[None] | None = None

    @property
    def engine(self) -> AttachedEngine | None:
        """What sessions are about, while an engine is attached."""
        return self._engine

    def tell(self, message: ToEngine) -> None:
        """To the attached engine; nobody else hears of its requests."""
        if self._connection is not None:
            self._connection.send(message)
            self.prompts.told(message, self._clock())

    async def serve_connection(self, connection: LocalConnection) -> None:
        """One client, from its first byte to its end."""
        try:
            while (received := await connection.receive()) is not None:
                message, fds = received
                if connection is self._connection:
                    self._data_plane.stir()
                try:
                    await self._hear(connection, message, fds)
                finally:
                    for fd in fds:
                        with contextlib.suppress(OSError):
                            os.close(fd)
        except BadFrame as error:
            self._metrics.rejected(error.code)
            log.warning("rejected a client: pid=%d code=%s %s", connection.pid, error.code, error)
            connection.send(Refused(code=error.code, reasons=(str(error)[:1024],)))
        finally:
            if connection is self._connection or self._leaving is not None:
                await self.leave("the engine's connection ended")

    def listen(self) -> None:
        """Note it where our engine has said nothing that we have not heard."""
        now = self._clock()
        if self._attached is not None and self._connection is not None and self._connection.is_silent:
            self._attached.liveness.heard_at = now

    async def leave(self, reason: str) -> None:
        """The engine is gone, or we are going: forget its requests, end its sessions, unmap its memory, say so.

        Returns when nothing touches its memory any more, whoever called first and even if a caller is cancelled.
        """
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(reason))
        leaving = self._leaving
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            if not leaving.done():
                await leaving
            raise
        finally:
            self._leaving = None

    async def _leave(self, reason: str) -> None:
        if self._engine is None:
            return
        epoch, connection, self._connection = self._engine.epoch, self._connection, None
        self.sender.engine_left()
        self.receiver.engine_left()
        self.peers.end_all(reason)
        self._engine = None
        self._metrics.left()
        attached, self._attached = self._attached, None
        if attached is not None:
            self.doors.withdraw(attached, reason)
        self.receiver.attached = self.sender.attached = None
        failpoint("agent.leaving")
        is_let_go = True
        if attached is not None:
            is_let_go = await self._data_plane.let_go(attached)  # what was begun is finished; nothing new can begin
            attached.close()
        if connection is not None:
            await self.sender.unread()
        if connection is not None and is_let_go:
            connection.send(Detached(epoch=epoch))  # without it the engine waits for the end of our process
        log.info("engine left: epoch=%d %s", epoch, reason)

    # What clients say:

    async def _hear(self, connection: LocalConnection, message: ToAgent, fds: list[int]) -> None:
        engine = self._engine
        match message:
            case StatusQuery():
                connection.send(self._status())
            case PoolQuery():
                connection.send(self._pool_status(engine))
            case TraceQuery(names=names):
                connection.send(Trace(agent=self._agent(), entries=self._journal.about(names)))
            case Attach():
                self._attach(connection, message, fds)
            case _ if engine is None or connection is not self._connection:
                if self._leaving is not None:  # a refusal says that nothing of it is touched: not before that is so
                    await asyncio.shield(self._leaving)
                about = getattr(message, "request", "")
                connection.send(Refused(code="not_attached", reasons=("attach first",), about=about))
            case Directory(ranks=ranks):
                self._directory(engine, ranks)
            case Offer() if self.is_closing and not self.sender.is_due(message):
                connection.send(Released(request=message.request, code="draining"))
            case Offer(fence=fence) | Want(fence=fence) if fence and self._has_no_fence():
                reason = f"fence: {fence}, but none came with attach"
                connection.send(Refused(code="no_fence", reasons=(reason,), about=message.request))
            case Offer():
                self.prompts.offered(message, self._clock())
                self.sender.offer(message, engine)
            case Withdraw(request=request, reason=reason, comes_again=comes_again):
                if self._attached is not None:
                    self._attached.liveness.withdrew(request, self._clock())
                self.sender.withdraw(request, reason, comes_again)
            case Reclaim(blocks=blocks):
                self.sender.reclaim(blocks)
            case Expect():
                if not self.is_closing:
                    self.receiver.expect(message)
            case Want() if self.is_closing and not self.receiver.knows(message.request):
                reason = "this agent is stopping"
                connection.send(WantFailed(request=message.request, code="draining", reason=reason))
            case Want():
                self.receiver.want(message, engine)
            case Abandon(request=request):
                self.receiver.abandon(request)
            case Computed():
                self.prompts.computed(message, self._clock())
            case Rescale():
                self._rescale(connection, message, engine)
            case Decline(revision=revision, reason=reason):
                self.receiver.declined(revision, reason)
            case Detach():
                await self.leave(DETACHED)

    def _attach(self, connection: LocalConnection, attach: Attach, fds: list[int]) -> None:
        try:
            version = self._check_attach(attach)
            attached = self._open(attach, fds)
        except KVBridgeError as error:
            return self._refuse(connection, "an engine", error)
        self._epoch += 1
        self._connection, self._attached = connection, attached
        self.receiver.attached = self.sender.attached = attached
        self.doors.share(attached)
        pool, agent = attach.pool, self._agent()
        own = Rank(tp_rank=pool.shard.tp_rank, pp_rank=pool.shard.pp_rank, address=agent.address)
        site, digests = self._data_plane.site, self._data_plane.digests
        self._engine = AttachedEngine(agent, self._epoch, pool, site, digests, (own,), attach.policy)
        log.info(
            "attached: %s epoch=%d pid=%d planes=%d memory=%s",
            _name(attach),
            self._epoch,
            connection.pid,
            len(pool.planes),
            ",".join(sorted({handle.kind for handle in attach.handles})),
        )
        self._metrics.attached(model_key(pool), traits(pool))
        connection.send(Attached(version=version, epoch=self._epoch, agent=agent, is_shared=bool(site.machine)))
        failpoint("agent.attached")
        twin, slot_bytes = Planner(pool, pool), self._data_plane.site.fabric.slot_bytes
        for is_sender in (True, False):  # most peers will be alike; what others need is made ready when they come
            self._data_plane.warm(attached, twin.samples(slot_bytes, is_sender))

    def _rescale(self, connection: LocalConnection, message: Rescale, engine: AttachedEngine) -> None:
        """Rows come under other scales: another epoch of the same memory. What is under way ends as its end comes."""
        try:
            pool = _checked(message, engine)
        except EngineError as error:
            return self._refuse(connection, "new scales", error, about=f"rescale {message.revision}")
        assert self._attached is not None
        self._epoch += 1
        reason = f"scales of the engine changed (revision {message.revision})"
        self.sender.rescaled(reason)
        self._engine = replace(engine, epoch=self._epoch, pool=pool, revision=message.revision)
        self.doors.withdraw(self._attached, reason)
        self._attached = self.receiver.attached = self.sender.attached = replace(self._attached, epoch=self._epoch)
        self.doors.share(self._attached)
        self.peers.renew(reason)
        self.receiver.rescaled(self._engine)
        log.info("rescaled: revision=%d epoch=%d planes=%d", message.revision, self._epoch, len(message.scales))
        connection.send(Rescaled(revision=message.revision, epoch=self._epoch))

    def pause(self) -> bool:
        """Begin nothing for our engine until `rebuild` or `resume`. Whether nothing is under way any more."""
        is_alone = self._engine is None or engine_ranks(self._engine.pool) == 1
        return all([self.receiver.pause(), self.sender.pause(is_alone)])

    def resume(self) -> None:
        """There will be no rebuild."""
        self.receiver.resume()
        self.sender.resume()

    def staged(self, site: Site) -> None:
        """There are slots now: sessions from here on name them, and those of before need none."""
        if self._engine is not None:
            self._engine = replace(self._engine, site=site)

    def rebuild(self, endpoints: StagingEndpoints, reason: str) -> None:
        """Other slots for the same engine and epoch: all sessions end, and new ones name these."""
        self.sender.rebuilt(reason)  # while its receivers hear it: their wants need not wait for what is over
        self.peers.renew(reason)
        if self._engine is not None:
            self._engine = replace(self._engine, site=endpoints.site)
        self.receiver.rebuilt(self._engine)  # first: what lands in the old slots from here on is nobody's
        self._data_plane.switch(endpoints)

    def _refuse(self, connection: LocalConnection, what: str, error: KVBridgeError, about: str = "") -> None:
        log.warning("refused %s: pid=%d code=%s %s", what, connection.pid, error.code, error)
        self._metrics.refused(error.code)
        reasons = tuple(reason[:1024] for reason in error.reasons[:64])
        connection.send(Refused(code=error.code, reasons=reasons, about=about))

    def _open(self, attach: Attach, fds: list[int]) -> AttachedMemory:
        """Map what the engine sent. Raises KVBridgeError; nothing stays mapped then."""
        with ExitStack() as opened:
            memory = AttachedPool.open(attach.pool, attach.handles, fds, self._data_plane.device)
            opened.callback(memory.close)
            failpoint("agent.attaching")
            fence = None if attach.fence_fd is None else FencePage(_fd(fds, attach.fence_fd))
            if fence is not None:
                opened.callback(fence.close)
            shared = SharedHandles.keep(attach.handles, fds) if self._data_plane.site.machine else None
            opened.pop_all()
        return AttachedMemory(self._epoch + 1, memory, fence, EngineLiveness(self._clock()), shared)

    def _has_no_fence(self) -> bool:
        return self._attached is None or self._attached.fence is None

    def _check_attach(self, attach: Attach) -> int:
        if self.is_closing:
            raise KVBridgeError("draining", "this agent is stopping")
        if self._leaving is not None:
            raise KVBridgeError("engine_present", "engine: the one before is still being detached; try again")
        if self._engine is not None and self._connection is not None:
            holder = self._engine.pool.engine
            reason = f"engine: {holder.kind} {holder.id} (pid {self._connection.pid}) is attached to this agent"
            raise KVBridgeError("engine_present", reason)
        version = negotiate(OURS, attach.versions)
        if version is None:
            theirs = attach.versions
            reason = f"versions: ours {OURS.oldest}-{OURS.newest}, theirs {theirs.oldest}-{theirs.newest}"
            raise KVBridgeError("version_mismatch", reason)
        return version

    def _directory(self, engine: AttachedEngine, ranks: tuple[Rank, ...]) -> None:
        self._engine = replace(engine, ranks=ranks)

    def _pool_status(self, engine: AttachedEngine | None) -> PoolStatus | Refused:
        if engine is None:
            return Refused(code="no_engine", reasons=("no engine is attached to this agent",))
        return PoolStatus(pool=engine.pool, slot_bytes=self._data_plane.site.fabric.slot_bytes)

    def engine_status(self) -> EngineStatus | None:
        engine = self._engine
        if engine is None or self._connection is None:
            return None
        pool = engine.pool
        return EngineStatus(
            engine=f"{pool.engine.kind} {pool.engine.version} {pool.engine.id}"[:256],
            epoch=engine.epoch,
            pid=self._connection.pid,
            model=pool.model.name,
            shard=f"tp {pool.shard.tp_rank}/{pool.shard.tp_size} pp {pool.shard.pp_rank}/{pool.shard.pp_size}",
            pool_bytes=sum(region.size_bytes for region in pool.regions),
            planes=len(pool.planes),
            model_key=model_key(pool),
            traits=traits(pool),
        )


def _fd(fds: list[int], index: int) -> int:
    if index >= len(fds):
        raise EngineError("fd_missing", f"fence_fd: {index}, {len(fds)} came with the message")
    return fds[index]


def _checked(message: Rescale, engine: AttachedEngine) -> Pool:
    """The pool under its new scales. Raises EngineError."""
    if message.revision <= engine.revision:
        raise EngineError("stale_revision", f"revision: {message.revision}, the last was {engine.revision}")
    planes = {(plane.layer, plane.part) for plane in engine.pool.planes}
    for each in message.scales:
        if (each.layer, each.part) not in planes:
            raise EngineError("scales_unknown_plane", f"scales: layer {each.layer} {each.part}, the pool has none")
    pool = rescaled(engine.pool, message.scales)
    if reasons := check_pool(pool):
        raise EngineError("bad_pool", *reasons)
    return pool


def _name(attach: Attach) -> str:
    pool = attach.pool
    return (
        f"{pool.engine.kind} {pool.engine.version} model={pool.model.name} tp={pool.shard.tp_rank}/{pool.shard.tp_size}"
    )
