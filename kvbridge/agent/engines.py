"""The life of the engine that this agent serves: it attaches, changes its scales, leaves.

Its memory is unmapped as soon as nothing touches it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvbridge_proto.common import OURS, AgentCard, Rank, negotiate
from kvbridge_proto.engine import Attach, Attached, Detached, NewEpoch, Refused, Rescale, Rescaled, Weights
from kvbridge_proto.pool import Pool
from kvbridge_proto.status import EngineStatus, PoolStatus

from ..dataplane.attached import AttachedMemory, Attachment, CurrentEngine
from ..dataplane.data_plane import DataPlane
from ..dataplane.resources import StagingEndpoints
from ..errors import EngineError, KVBridgeError
from ..exchange.orders import Warm, WarmPull
from ..exchange.route import Site
from ..exchange.session import AttachedEngine
from ..failpoints import failpoint
from ..geometry.check import check_pool, rescaled, with_weights
from ..geometry.plan import Planner
from ..geometry.traits import model_key, prompt_size, traits
from ..transport.local import LocalConnection
from .doors import Doors
from .metrics import Metrics
from .peers import Peers
from .runners import ReceiverRunner, SenderRunner

log = logging.getLogger("kvbridge.engine")

# Servers of one host that each count their ranks from 0, such as replicas behind a load balancer, ask for one socket.
OTHER_SOCKET = (
    "an agent serves one rank of one engine: start another for this one, and name its socket in the engine's options "
    "(vLLM kvbridge_socket, SGLang KVBRIDGE_ENGINE_SOCKET)"
)


@dataclass(eq=False, repr=False)
class Engines:
    """Runs on the loop."""

    card: AgentCard
    _current: CurrentEngine
    _receiver: ReceiverRunner
    _sender: SenderRunner
    _peers: Peers
    _data_plane: DataPlane
    _doors: Doors
    _metrics: Metrics
    _clock: Callable[[], float] = time.monotonic
    is_closing: bool = field(default=False, init=False)
    leaving: asyncio.Task[None] | None = field(default=None, init=False)
    _epoch: int = field(default=0, init=False)

    async def leave(self, reason: str) -> None:
        """The engine leaves, or we do: forget its requests, end its sessions, unmap its memory, and confirm.

        Returns once nothing touches its memory, even if another call began this or the caller is cancelled.
        """
        if self.leaving is None:
            self.leaving = asyncio.create_task(self._leave(reason))
        leaving = self.leaving
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            if not leaving.done():
                await leaving
            raise
        finally:
            self.leaving = None

    async def _leave(self, reason: str) -> None:
        if (attachment := self._current.attachment) is None:
            return
        epoch, memory = attachment.engine.epoch, attachment.memory
        self._current.hang_up()
        self._sender.do(self._sender.sending.engine_left(self._clock()))
        self._receiver.do(self._receiver.receiving.engine_left(self._clock()))
        self._peers.end_all(reason)
        self._sender.kept.clear()
        self._current.change(None)
        self._metrics.left()
        self._doors.withdraw(memory, reason)
        failpoint("agent.leaving")
        is_let_go = await self._data_plane.let_go(memory)  # moves under way finish; none can begin
        memory.close()
        if attachment.connection is not None:
            await self._sender.unread()
        if attachment.connection is not None and is_let_go:
            attachment.connection.send(Detached(epoch=epoch))  # without it the engine waits for our process to end
            attachment.connection.is_engine = False
        log.info("engine left: epoch=%d %s", epoch, reason)

    def attach(self, connection: LocalConnection, attach: Attach, fds: list[int]) -> None:
        """Map the engine's memory and answer Attached or Refused."""
        try:
            version = self._check_attach(attach)
            memory = self._data_plane.open(attach, fds, self._epoch + 1, self._clock())
        except KVBridgeError as error:
            return self._refuse(connection, "an engine", error)
        self._epoch += 1
        pool, agent = attach.pool, self.card
        own = Rank(tp_rank=pool.shard.tp_rank, pp_rank=pool.shard.pp_rank, address=agent.address)
        site, digests = self._data_plane.site, self._data_plane.digests
        engine = AttachedEngine(
            agent, self._epoch, pool, site, digests, (own,), attach.policy, takes_kept=attach.takes_kept
        )
        self._current.change(Attachment(engine, memory, connection, version))
        connection.is_engine = True
        self._doors.share(memory)
        log.info(
            "attached: %s epoch=%d pid=%d planes=%d memory=%s",
            _name(attach),
            self._epoch,
            connection.pid,
            len(pool.planes),
            ",".join(sorted({handle.kind for handle in attach.handles})),
        )
        self._metrics.attached(model_key(pool), traits(pool), prompt_size(pool).tokens)
        connection.send(Attached(version=version, epoch=self._epoch, agent=agent, is_shared=site.shares_memory))
        self._peers.incoming.engine_came()
        failpoint("agent.attached")
        self._compile_for_equals(pool, memory)

    def _compile_for_equals(self, pool: Pool, memory: AttachedMemory) -> None:
        """Begin to compile for equal pools, as most peers will have. Kernels for others wait for their session."""
        twin, site = Planner(pool, pool), self._data_plane.site
        theirs, ours = (twin.samples(site.fabric.slot_bytes, is_sender) for is_sender in (True, False))
        if pairs := tuple(zip(theirs, ours, strict=False)):
            if site.shares_memory:
                self._data_plane.give(WarmPull(None, pairs, (True, False)), memory)
            for parts in (theirs, ours):
                self._data_plane.give(Warm(parts), memory)

    def rescale(self, connection: LocalConnection, message: Rescale, engine: AttachedEngine) -> None:
        """Give the same memory a new epoch under new scales. Offers, transfers and claimed wants end."""
        try:
            pool = _checked(message, engine)
        except EngineError as error:
            return self._refuse(connection, "new scales", error, about=f"rescale {message.revision}")
        reason = f"scales of the engine changed (revision {message.revision})"
        self._sender.do(self._sender.sending.rescaled(reason, self._clock()))
        renewed = self._renew(replace(engine, pool=pool, revision=message.revision), reason)
        self._receiver.do(self._receiver.receiving.rescaled(renewed, self._clock()))
        log.info("rescaled: revision=%d epoch=%d planes=%d", message.revision, self._epoch, len(message.scales))
        connection.send(Rescaled(revision=message.revision, epoch=self._epoch))

    def reweigh(self, connection: LocalConnection, message: Weights, engine: AttachedEngine) -> None:
        """Give the same memory a new epoch, for rows of other weights. Offers, transfers and wants end."""
        pool = with_weights(engine.pool, message.version)
        reason = f"the engine's weights: now {message.version or 'without a name'}, before {engine.pool.model.weights}"
        self._sender.do(self._sender.sending.reweighed(reason, self._clock()))
        renewed = self._renew(replace(engine, pool=pool), reason)
        self._receiver.do(self._receiver.receiving.reweighed(renewed, reason, self._clock()))
        log.info("weights: %s epoch=%d", message.version or "without a name", self._epoch)
        connection.send(NewEpoch(epoch=self._epoch))

    def _renew(self, engine: AttachedEngine, reason: str) -> AttachedEngine:
        """Give the engine's memory a new epoch: all sessions end."""
        attachment = self._current.attachment
        assert attachment is not None
        self._epoch += 1
        engine = replace(engine, epoch=self._epoch)
        self._doors.withdraw(attachment.memory, reason)
        memory = replace(attachment.memory, epoch=self._epoch)
        self._current.change(replace(attachment, engine=engine, memory=memory))
        self._doors.share(memory)
        self._peers.renew(reason)
        return engine

    def pause(self) -> bool:
        """Hold back our engine's requests until `rebuild` or `resume`. Returns whether nothing is under way.

        If the engine has several ranks, its sending half goes on (see `Sender.pause`).
        """
        engine = self._current.engine
        is_alone = engine is None or engine.rank_count == 1
        return all([self.pause_wants(), self._sender.pause(is_alone)])

    def pause_wants(self) -> bool:
        """The same for the receiving half only, until `renew_fabric` or `resume`."""
        return self._receiver.receiving.pause()

    def resume(self) -> None:
        """The rebuild is cancelled."""
        self._receiver.do(self._receiver.receiving.resume(self._clock()))
        self._sender.do(self._sender.sending.resume())

    def staged(self, site: Site) -> None:
        """Slots exist now: new sessions name them, earlier ones need none."""
        if (attachment := self._current.attachment) is not None:
            self._current.change(replace(attachment, engine=replace(attachment.engine, site=site)))

    def rebuild(self, endpoints: StagingEndpoints, reason: str) -> None:
        """Switch to new slots for the same engine and epoch: all sessions end, and new ones name these slots."""
        # While receivers can still hear it: their wants need not wait.
        self._sender.do(self._sender.sending.rebuilt(reason))
        self._peers.renew(reason)
        self.staged(endpoints.site)
        # First: what lands in the old slots is ignored from now on.
        self._receiver.do(self._receiver.receiving.rebuilt(self._current.engine, self._clock()))
        self._data_plane.switch(endpoints)

    def renew_fabric(self, site: Site, reason: str) -> None:
        """Peers reach our slots by another fabric: sessions with senders end, and new ones name it."""
        self._peers.outgoing.renew(reason)
        self.staged(site)
        self._receiver.do(self._receiver.receiving.unreachable_from_far(self._current.engine, self._clock()))

    def _refuse(self, connection: LocalConnection, what: str, error: KVBridgeError, about: str = "") -> None:
        log.warning("refused %s: pid=%d code=%s %s", what, connection.pid, error.code, error)
        self._metrics.refused(error.code)
        reasons = tuple(reason[:1024] for reason in error.reasons[:64])
        connection.send(Refused(code=error.code, reasons=reasons, about=about))

    def _check_attach(self, attach: Attach) -> int:
        if self.is_closing:
            raise KVBridgeError("draining", "this agent is stopping")
        if self.leaving is not None:
            raise KVBridgeError("engine_present", "engine: the one before is still being detached; try again")
        if (attachment := self._current.attachment) is not None and attachment.connection is not None:
            holder, pid = attachment.engine.pool.engine, attachment.connection.pid
            reason = f"engine: {holder.kind} {holder.id} (pid {pid}) is attached to this agent"
            raise KVBridgeError("engine_present", reason, OTHER_SOCKET)
        version = negotiate(OURS, attach.versions)
        if version is None:
            theirs = attach.versions
            reason = f"versions: agent {OURS.oldest}-{OURS.newest}, engine {theirs.oldest}-{theirs.newest}"
            raise KVBridgeError("version_mismatch", reason)
        return version

    def name_ranks(self, engine: AttachedEngine, ranks: tuple[Rank, ...]) -> None:
        """Record which agents serve the engine's ranks."""
        attachment = self._current.attachment
        assert attachment is not None
        self._current.change(replace(attachment, engine=replace(engine, ranks=ranks)))

    def pool_status(self) -> PoolStatus | Refused:
        if (engine := self._current.engine) is None:
            return Refused(code="no_engine", reasons=("no engine is attached to this agent",))
        return PoolStatus(pool=engine.pool, slot_bytes=self._data_plane.site.fabric.slot_bytes)

    def engine_status(self) -> EngineStatus | None:
        attachment = self._current.attachment
        if attachment is None or attachment.connection is None:
            return None
        engine, connection = attachment.engine, attachment.connection
        pool = engine.pool
        return EngineStatus(
            engine=f"{pool.engine.kind} {pool.engine.version} {pool.engine.id}"[:256],
            epoch=engine.epoch,
            pid=connection.pid,
            model=pool.model.name,
            shard=_rank(pool),
            pool_bytes=sum(region.size_bytes for region in pool.regions),
            planes=len(pool.planes),
            model_key=model_key(pool),
            traits=traits(pool),
            protocol=attachment.version,
            size=prompt_size(pool),
        )


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


def _rank(pool: Pool) -> str:
    """For people: which replica, and which of its ranks if it has several."""
    shard = pool.shard
    ranks = (
        ("tp", shard.tp_rank, shard.tp_size),
        ("pp", shard.pp_rank, shard.pp_size),
        ("cp", shard.cp_rank, shard.cp_size),
    )
    return " ".join([f"dp {pool.engine.replica}", *(f"{name} {rank}/{size}" for name, rank, size in ranks if size > 1)])


def _name(attach: Attach) -> str:
    pool = attach.pool
    return (
        f"{pool.engine.kind} {pool.engine.version} model={pool.model.name} tp={pool.shard.tp_rank}/{pool.shard.tp_size}"
    )
