"""The agent's life: start, serve, drain with a deadline, stop.

Everything that decides lives in exchange/; this file puts the parts together and takes them apart again, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
import uvloop
from kvbridge_proto.status import SlotCounts, Status
from kvbridge_proto.words import Agent as AgentCard
from msgspec import structs
from prometheus_client import disable_created_metrics

from ..dataplane.equipment import equip
from ..dataplane.mover import Mover
from ..dataplane.watchdog import STUCK_S
from ..errors import OperatorError
from ..exchange.inbound import Inbound
from ..exchange.orders import ReceivingReport, SendingReport
from ..exchange.outbound import Outbound
from ..exchange.reading import CHECK_EVERY
from ..exchange.route import Site
from ..exchange.session import SessionState
from ..exchange.slots import SlotPool
from ..failpoints import VARIABLE, arm_from_environment
from ..options import AgentConfig, Supervision
from ..transport.control import Control
from ..transport.descriptors import links, raised
from ..transport.door import Door
from ..transport.endpoint import check_metrics, with_key
from ..transport.events import Settings
from ..transport.keys import load_keys
from ..transport.local import LocalConnection, LocalServer
from ..transport.lock import Lock
from ..transport.trust import Trust
from .doors import Doors, LocalDoors, NoDoors
from .engines import Engines
from .journal import Journal
from .last_errors import LastErrors
from .lives import Life, Lives
from .logs import set_up
from .metrics import Gauges, Metrics
from .peers import Peers
from .rebuild import Rebuilder
from .sink import Sink
from .source import Source
from .status import DAY_S, offers, readers, transfers
from .supervisor import Supervisor

if TYPE_CHECKING:
    from .spans import Spans

log = logging.getLogger("kvbridge.agent")

TICK_S = 0.02
IDLE_TICK_S = 0.25
STATES = (SessionState.NEW, SessionState.GREETING, SessionState.OPEN)  # of sessions that we have dialled
# The loop and the mover share the interpreter; at Python's 5 ms each waits that long for the other.
SWITCH_S = 0.0002


def run(config: AgentConfig, stuck_s: float = STUCK_S, supervision: Supervision | None = None) -> None:
    """Run one agent until SIGTERM or SIGINT. Raises OperatorError or FabricError when it cannot start.

    Does not return if the mover is stuck (stuck.py): the process ends with its STATUS.
    """
    set_up(config.log_level, config.log_format, errors := LastErrors())
    faulthandler.enable()  # systemd's watchdog ends us by SIGABRT: the log says where each thread stood
    disable_created_metrics()  # type: ignore[no-untyped-call] # a series more for each counter, and nobody looks at it
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(Agent(config, stuck_s=stuck_s, errors=errors, supervisor=Supervisor(supervision)).run())


def trust_of(config: AgentConfig) -> Trust:
    """Whom we let in and whom we dial, as the operator said. Raises OperatorError."""
    keys = load_keys(config.key, config.peers) if config.key else None
    trust = Trust(keys, config.dial, config.allow_unauthenticated)
    trust.check_places()
    return trust


class Agent:
    """One start of one agent. Its clock and its `entropy(size)` are the process's, or a simulator's."""

    def __init__(
        self,
        config: AgentConfig,
        clock: Callable[[], float] = time.monotonic,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        metrics: Metrics | None = None,
        stuck_s: float = STUCK_S,
        errors: LastErrors | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.config = config
        self._errors = errors or LastErrors()
        self._stuck_s = stuck_s
        self._clock = clock
        self._entropy = entropy
        self.boot = entropy(8).hex()
        self.before: frozenset[str] = frozenset()  # starts of this agent that are dead
        self.metrics = metrics or Metrics()
        self.journal = Journal(clock)
        self._supervisor = supervisor or Supervisor(None)
        self.state = "starting"
        self._started = clock()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.doors: Doors = NoDoors()
        self._spans: Spans | None = None

    def stop(self) -> None:
        """Begin to drain; `run` returns when that is over."""
        self._stop.set()

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(self.doors.serve()),
                    tasks.create_task(self.peers.serve()),
                    tasks.create_task(self._tick()),
                    tasks.create_task(self.rebuilder.watch()),
                    tasks.create_task(self._serve_local(tasks)),
                ]
                if self._supervisor.look_s:
                    serving.append(tasks.create_task(self._supervisor.feed(lambda: self.mover.turns)))
                self.state = "serving"
                self.control.trusts(self.trust)  # should the list have changed meanwhile
                gc.collect()
                gc.freeze()  # torch's hundred thousand objects stay: no collection has to look at them again
                log.info(
                    "serving: name=%s boot=%s address=%s socket=%s device=%s links: %s",
                    self.card.name,
                    self.boot,
                    self.card.address,
                    self.config.socket,
                    self.mover.description,
                    self.trust.description,
                )
                self._supervisor.ready()
                await self._stop.wait()
                if self._failure is not None:
                    raise self._failure
                await self._drain()
                for task in [*serving, *self._connections]:
                    task.cancel()
        self.state = "stopped"
        log.info("stopped")

    # Start:

    async def _start(self, stack: AsyncExitStack) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        self._arm()
        if config.otlp_endpoint:
            from .spans import Spans  # of an extra that few have

            self._spans = Spans(config.otlp_endpoint, config.name, self.metrics.spans)
            stack.callback(self._spans.close)
        descriptors = raised()
        self.trust = trust_of(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if config.allow_unauthenticated and self.trust.keys is None:
            log.warning("allow_unauthenticated: anybody who reaches %s may fetch KV and name its bytes", config.listen)
        self.lock = Lock(config.socket, self.boot)  # first, and given back last: who takes it takes us for dead
        stack.callback(self.lock.close)
        self.before = self.lock.before
        devices = self.trust.data_devices(config.listen, config.advertise, config.net_devices)
        config = structs.replace(config, net_devices=devices)
        timeout_s, linger_s = config.write_timeout_s, config.linger_s
        self.mover = Mover(lambda: equip(config, self.boot), self.boot, self, timeout_s, self._stuck_s, linger_s)
        stack.push_async_callback(self.mover.stop)
        await self.mover.start()
        self.slots = SlotPool(self.mover.site.fabric.slots)
        self.control = await stack.enter_async_context(self._control(descriptors))
        self.local = await stack.enter_async_context(LocalServer(self.lock, allowed_uids=config.allowed_uids or None))
        if self.mover.site.machine:
            uids = config.share_memory_uids
            door = await stack.enter_async_context(Door(self.lock, allowed_uids=uids, clock=self._clock))
            self.doors = LocalDoors(door, self.mover, config.name, uids)
        self.card = AgentCard(
            name=config.name,
            boot=self.boot,
            address=with_key(
                config.advertise or self.control.address, self.trust.keys.public if self.trust.keys else ""
            ),
            version=version("kvbridge"),
        )
        self._assemble()
        # However we end: no socket closes before the mover is through with its engine's memory.
        stack.push_async_callback(self.engines.leave, "the agent is ending")
        stack.callback(self.rebuilder.close)
        if config.metrics:
            check_metrics(config.metrics, allow_wildcard=config.allow_wildcard)
            stack.callback(self.metrics.serve(config.metrics))

    def _arm(self) -> None:
        """Say it as loudly as we can if we were started to fail."""
        if said := arm_from_environment():
            log.warning("FAILPOINTS ARE ON, this agent will fail on purpose: %s=%s", VARIABLE, ",".join(said))
            self.metrics.warn_of_failpoints(said)

    def _control(self, descriptors: int) -> Control:
        config, most = self.config, links(descriptors, Settings().max_links)
        settings = Settings(
            connect_s=config.connect_s, silence_s=config.silence_s, max_links=most, max_unreached=max(1, most // 4)
        )
        wildcard = config.allow_wildcard
        return Control(self.boot, config.listen, settings=settings, allow_wildcard=wildcard, trust=self.trust)

    def _reload(self) -> None:
        """The list of peers has changed. One that cannot be read changes nothing; our own key stays as it is."""
        try:
            trust = trust_of(self.config)
        except OperatorError as error:
            return log.error("peers not read again, the old list stays: %s: %s", error.code, error)
        ours, read = self.trust.keys, trust.keys
        if ours is not None and read is not None and ours.public != read.public:
            names = read.names if self.config.peers else ours.names  # without a list they go with the pair in use
            trust = replace(trust, keys=replace(ours, names=names))
            log.warning("key: the file has another one, %s; it counts after a restart", read.public)
        self.trust = trust
        if self.state != "starting":
            self.control.trusts(trust)
        log.info("peers read again: %s", trust.description)

    def _assemble(self) -> None:
        clock, entropy, config = self._clock, self._entropy, self.config
        check_every = CHECK_EVERY[config.verify]
        self.inbound = Inbound(self.slots, lambda: entropy(8).hex(), lambda: entropy(16), check_every)
        self.outbound = Outbound(before=self.before)
        self.engines = self._assemble_engines()
        self.engines.doors = self.doors
        home = lambda: self.engines.home  # noqa: E731
        self.peers = Peers(self.control, self.mover, home, self.metrics, config.connect_s, self.doors, clock)
        sinks, sources = Lives("sink", self.journal, self._look_back), Lives("source", self.journal, self._look_back)
        self.sink = Sink(self.inbound, self.peers.dialling, self.mover, self.metrics, sinks, self.engines.tell, clock)
        self.source = Source(
            self.outbound,
            self.peers.accepting,
            self.mover,
            self.metrics,
            sources,
            self.engines.tell,
            home,
            self.engines.listen,
            clock,
        )
        self.peers.dialling.sink = self.engines.sink = self.sink
        self.peers.accepting.source = self.engines.source = self.source
        self.engines.peers = self.peers
        self.rebuilder = Rebuilder(
            self.slots, self.mover.sending.slots, self.engines, self.mover, self.metrics, config.rebuild_s, self._clock
        )
        self.metrics.watch(
            Gauges(
                inbound=self._inbound_slots,
                outbound=self.mover.sending.slots.counts,
                wants=lambda: len(self.inbound.wants),
                offers=lambda: len(self.outbound.offers),
                unclaimed=lambda: len(self.outbound.unclaimed(self._clock())),
                waiting={
                    ("sink", "session"): lambda: self.inbound.without_session,
                    ("sink", "slot"): lambda: self.inbound.without_slot,
                    ("source", "offer"): lambda: self.outbound.without_offer,
                    ("source", "credit"): lambda: self.mover.sending.without_credit,
                    ("source", "slot"): lambda: self.mover.sending.without_slot,
                },
                moving={"sink": lambda: self.inbound.moving, "source": lambda: len(self.outbound.outlets)},
                sessions={
                    **{("sink", state.name.lower()): partial(self.peers.count_dialled, state) for state in STATES},
                    ("source", "open"): self.peers.count_accepted,
                },
                open_sessions={"sink": self.peers.open_dialled, "source": self.peers.open_accepted},
                is_attached=lambda: self.engines.home is not None,
                is_rebuild_refused=lambda: bool(self.rebuilder.refused),
                readers=self.doors.holders,
            )
        )

    def _look_back(self, life: Life) -> None:
        """A request is over."""
        self.metrics.lived(life)
        if self._spans is not None:
            self._spans.ended(life)

    def _inbound_slots(self) -> SlotCounts:
        """What was written and is being read is the data plane's to know."""
        counts = self.slots.counts()
        landed = min(counts.lent, self.mover.receiving.scattering)
        return structs.replace(counts, lent=counts.lent - landed, landed=landed)

    def _assemble_engines(self) -> Engines:
        return Engines(lambda: self.card, self.mover, self.metrics, self.status, self.journal, self._clock)

    # Serve:

    async def _serve_local(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            connection = await self.local.accept()
            task = tasks.create_task(self._serve_connection(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve_connection(self, connection: LocalConnection) -> None:
        try:
            await self.engines.serve_connection(connection)
        except Exception:
            log.exception("a client's connection failed: pid=%d", connection.pid)
        finally:
            connection.close()

    async def _tick(self) -> None:
        while True:
            is_busy = self.inbound.wants or self.inbound.awaited or self.outbound.outlets or self.outbound.offers
            at = self._clock() + (TICK_S if is_busy else IDLE_TICK_S)
            await asyncio.sleep(at - self._clock())
            self.tick(self._clock() - at)

    def tick(self, late_s: float) -> None:
        """Time has passed. For so long we stood still: what others said meanwhile is not heard yet."""
        self.engines.listen()
        self.peers.dialling.tick(self._clock(), late_s)
        self.sink.tick()
        self.source.tick()
        self.engines.prompts.tick(self._clock())

    def on_sending(self, reports: Sequence[SendingReport]) -> None:
        self.source.hear(reports)

    def on_receiving(self, reports: Sequence[ReceivingReport]) -> None:
        self.sink.hear(reports)

    def on_staged(self, site: Site) -> None:
        self.slots.make(site.fabric.slots)
        self.engines.staged(site)

    def on_mover_died(self, error: BaseException) -> None:
        self._failure = error
        self.stop()

    # Drain:

    async def _drain(self) -> None:
        """Take nothing new, let what flows finish, then say goodbye."""
        self.state = "draining"
        self._supervisor.stopping()
        self.engines.is_closing = self.peers.accepting.is_closing = True
        log.info("draining: wants=%d transfers=%d", len(self.inbound.wants), len(self.outbound.outlets))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while self.inbound.wants or self.outbound.outlets:  # noqa: ASYNC110 - two machines, no one event
                    await asyncio.sleep(TICK_S)
        await self.engines.leave("the agent is stopping")
        self.peers.end_all("the agent is stopping")

    # Status:

    def status(self) -> Status:
        now = self._clock()
        return Status(
            agent=self.card,
            state=self.state,
            uptime_s=now - self._started,
            fabric=self.mover.site.fabric.kind,
            device=self.mover.description,
            security=self.trust.description,
            slot_bytes=self.mover.site.fabric.slot_bytes,
            inbound=self._inbound_slots(),
            outbound=self.mover.sending.slots.counts(),
            engine=self.engines.engine_status(),
            peers=tuple(self.peers.statuses()),
            transfers=transfers(self.inbound, self.outbound, now),
            offers=offers(self.outbound, self.peers.accepting.name_of, now),
            counters=self.metrics.values(),
            rebuild_refused=self.rebuilder.refused,
            readers=readers(self.doors.holders(), now),
            errors=self._errors.statuses(),
            still_s=min(DAY_S, self.mover.still_s),
        )
