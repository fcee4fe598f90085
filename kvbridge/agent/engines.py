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
from kvbridge_proto.words import OURS, Agent, Rank, negotiate

from ..dataplane.attachment import Attachment, Word
from ..dataplane.equipment import Docks
from ..dataplane.mover import Mover
from ..device.fence import FencePage
from ..device.memory import AttachedPool
from ..device.sharing import SharedHandles
from ..errors import EngineError, KVBridgeError
from ..exchange.route import Site
from ..exchange.session import Home, engine_ranks
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
from .sink import Sink
from .source import Source

log = logging.getLogger("kvbridge.engine")
DETACHED = "detached"


class Engines:
    """Runs on the loop; `serve_connection` is one task per client."""

    def __init__(
        self,
        agent: Callable[[], Agent],
        mover: Mover,
        metrics: Metrics,
        status: Callable[[], Status],
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers: Peers
        self.doors: Doors
        self.sink: Sink
        self.source: Source
        self.is_closing = False
        self.prompts = Prompts(metrics)
        self._agent = agent
        self._mover = mover
        self._metrics = metrics
        self._status = status
        self._journal = journal
        self._clock = clock
        self._connection: LocalConnection | None = None
        self._attached: Attachment | None = None
        self._home: Home | None = None
        self._epoch = 0
        self._leaving: asyncio.Task[None] | None = None

    @property
    def home(self) -> Home | None:
        """What sessions are about, while an engine is attached."""
        return self._home

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
                    self._mover.stir()
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
            self._attached.word.heard_at = now

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
        if self._home is None:
            return
        epoch, connection, self._connection = self._home.epoch, self._connection, None
        self.source.engine_left()
        self.sink.engine_left()
        self.peers.end_all(reason)
        self._home = None
        self._metrics.left()
        attached, self._attached = self._attached, None
        if attached is not None:
            self.doors.withdraw(attached, reason)
        self.sink.attached = self.source.attached = None
        failpoint("agent.leaving")
        is_let_go = True
        if attached is not None:
            is_let_go = await self._mover.let_go(attached)  # what was begun is finished; nothing new can begin
            attached.close()
        if connection is not None:
            await self.source.unread()
        if connection is not None and is_let_go:
            connection.send(Detached(epoch=epoch))  # without it the engine waits for the end of our process
        log.info("engine left: epoch=%d %s", epoch, reason)

    # What clients say:

    async def _hear(self, connection: LocalConnection, message: ToAgent, fds: list[int]) -> None:
        home = self._home
        match message:
            case StatusQuery():
                connection.send(self._status())
            case PoolQuery():
                connection.send(self._pool_status(home))
            case TraceQuery(names=names):
                connection.send(Trace(agent=self._agent(), entries=self._journal.about(names)))
            case Attach():
                self._attach(connection, message, fds)
            case _ if home is None or connection is not self._connection:
                if self._leaving is not None:  # a refusal says that nothing of it is touched: not before that is so
                    await asyncio.shield(self._leaving)
                about = getattr(message, "request", "")
                connection.send(Refused(code="not_attached", reasons=("attach first",), about=about))
            case Directory(ranks=ranks):
                self._directory(home, ranks)
            case Offer() if self.is_closing and not self.source.is_due(message):
                connection.send(Released(request=message.request, code="draining"))
            case Offer(fence=fence) | Want(fence=fence) if fence and self._has_no_fence():
                reason = f"fence: {fence}, but none came with attach"
                connection.send(Refused(code="no_fence", reasons=(reason,), about=message.request))
            case Offer():
                self.prompts.offered(message, self._clock())
                self.source.offer(message, home)
            case Withdraw(request=request, reason=reason, comes_again=comes_again):
                if self._attached is not None:
                    self._attached.word.withdrew(request, self._clock())
                self.source.withdraw(request, reason, comes_again)
            case Reclaim(blocks=blocks):
                self.source.reclaim(blocks)
            case Expect():
                if not self.is_closing:
                    self.sink.expect(message)
            case Want() if self.is_closing and not self.sink.knows(message.request):
                reason = "this agent is stopping"
                connection.send(WantFailed(request=message.request, code="draining", reason=reason))
            case Want():
                self.sink.want(message, home)
            case Abandon(request=request):
                self.sink.abandon(request)
            case Computed():
                self.prompts.computed(message, self._clock())
            case Rescale():
                self._rescale(connection, message, home)
            case Decline(revision=revision, reason=reason):
                self.sink.declined(revision, reason)
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
        self.sink.attached = self.source.attached = attached
        self.doors.share(attached)
        pool, agent = attach.pool, self._agent()
        own = Rank(tp_rank=pool.shard.tp_rank, pp_rank=pool.shard.pp_rank, address=agent.address)
        site, digests = self._mover.site, self._mover.digests
        self._home = Home(agent, self._epoch, pool, site, digests, (own,), attach.policy)
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
        twin, slot_bytes = Planner(pool, pool), self._mover.site.fabric.slot_bytes
        for is_source in (True, False):  # most peers will be alike; what others need is made ready when they come
            self._mover.warm(attached, twin.samples(slot_bytes, is_source))

    def _rescale(self, connection: LocalConnection, message: Rescale, home: Home) -> None:
        """Rows come under other scales: another epoch of the same memory. What is under way ends as its end comes."""
        try:
            pool = _checked(message, home)
        except EngineError as error:
            return self._refuse(connection, "new scales", error, about=f"rescale {message.revision}")
        assert self._attached is not None
        self._epoch += 1
        reason = f"scales of the engine changed (revision {message.revision})"
        self.source.rescaled(reason)
        self._home = replace(home, epoch=self._epoch, pool=pool, revision=message.revision)
        self.doors.withdraw(self._attached, reason)
        self._attached = self.sink.attached = self.source.attached = replace(self._attached, epoch=self._epoch)
        self.doors.share(self._attached)
        self.peers.renew(reason)
        self.sink.rescaled(self._home)
        log.info("rescaled: revision=%d epoch=%d planes=%d", message.revision, self._epoch, len(message.scales))
        connection.send(Rescaled(revision=message.revision, epoch=self._epoch))

    def pause(self) -> bool:
        """Begin nothing for our engine until `rebuild` or `resume`. Whether nothing is under way any more."""
        is_alone = self._home is None or engine_ranks(self._home.pool) == 1
        return all([self.sink.pause(), self.source.pause(is_alone)])

    def resume(self) -> None:
        """There will be no rebuild."""
        self.sink.resume()
        self.source.resume()

    def staged(self, site: Site) -> None:
        """There are slots now: sessions from here on name them, and those of before need none."""
        if self._home is not None:
            self._home = replace(self._home, site=site)

    def rebuild(self, docks: Docks, reason: str) -> None:
        """Other slots for the same engine and epoch: all sessions end, and new ones name these."""
        self.source.rebuilt(reason)  # while its sinks hear it: their wants need not wait for what is over
        self.peers.renew(reason)
        if self._home is not None:
            self._home = replace(self._home, site=docks.site)
        self.sink.rebuilt(self._home)  # first: what lands in the old slots from here on is nobody's
        self._mover.switch(docks)

    def _refuse(self, connection: LocalConnection, what: str, error: KVBridgeError, about: str = "") -> None:
        log.warning("refused %s: pid=%d code=%s %s", what, connection.pid, error.code, error)
        self._metrics.refused(error.code)
        reasons = tuple(reason[:1024] for reason in error.reasons[:64])
        connection.send(Refused(code=error.code, reasons=reasons, about=about))

    def _open(self, attach: Attach, fds: list[int]) -> Attachment:
        """Map what the engine sent. Raises KVBridgeError; nothing stays mapped then."""
        with ExitStack() as opened:
            memory = AttachedPool.open(attach.pool, attach.handles, fds, self._mover.device)
            opened.callback(memory.close)
            failpoint("agent.attaching")
            fence = None if attach.fence_fd is None else FencePage(_fd(fds, attach.fence_fd))
            if fence is not None:
                opened.callback(fence.close)
            shared = SharedHandles.keep(attach.handles, fds) if self._mover.site.machine else None
            opened.pop_all()
        return Attachment(self._epoch + 1, memory, fence, Word(self._clock()), shared)

    def _has_no_fence(self) -> bool:
        return self._attached is None or self._attached.fence is None

    def _check_attach(self, attach: Attach) -> int:
        if self.is_closing:
            raise KVBridgeError("draining", "this agent is stopping")
        if self._leaving is not None:
            raise KVBridgeError("engine_present", "engine: the one before is still being detached; try again")
        if self._home is not None and self._connection is not None:
            holder = self._home.pool.engine
            reason = f"engine: {holder.kind} {holder.id} (pid {self._connection.pid}) is attached to this agent"
            raise KVBridgeError("engine_present", reason)
        version = negotiate(OURS, attach.versions)
        if version is None:
            theirs = attach.versions
            reason = f"versions: ours {OURS.oldest}-{OURS.newest}, theirs {theirs.oldest}-{theirs.newest}"
            raise KVBridgeError("version_mismatch", reason)
        return version

    def _directory(self, home: Home, ranks: tuple[Rank, ...]) -> None:
        self._home = replace(home, ranks=ranks)

    def _pool_status(self, home: Home | None) -> PoolStatus | Refused:
        if home is None:
            return Refused(code="no_engine", reasons=("no engine is attached to this agent",))
        return PoolStatus(pool=home.pool, slot_bytes=self._mover.site.fabric.slot_bytes)

    def engine_status(self) -> EngineStatus | None:
        home = self._home
        if home is None or self._connection is None:
            return None
        pool = home.pool
        return EngineStatus(
            engine=f"{pool.engine.kind} {pool.engine.version} {pool.engine.id}"[:256],
            epoch=home.epoch,
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


def _checked(message: Rescale, home: Home) -> Pool:
    """The pool under its new scales. Raises EngineError."""
    if message.revision <= home.revision:
        raise EngineError("stale_revision", f"revision: {message.revision}, the last was {home.revision}")
    planes = {(plane.layer, plane.part) for plane in home.pool.planes}
    for each in message.scales:
        if (each.layer, each.part) not in planes:
            raise EngineError("scales_unknown_plane", f"scales: layer {each.layer} {each.part}, the pool has none")
    pool = rescaled(home.pool, message.scales)
    if reasons := check_pool(pool):
        raise EngineError("bad_pool", *reasons)
    return pool


def _name(attach: Attach) -> str:
    pool = attach.pool
    return (
        f"{pool.engine.kind} {pool.engine.version} model={pool.model.name} tp={pool.shard.tp_rank}/{pool.shard.tp_size}"
    )
