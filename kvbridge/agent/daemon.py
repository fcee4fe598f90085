"""The agent's life: start, serve, drain with a deadline, stop.

Decisions are made in exchange/. This file assembles the parts, and takes them apart in order.
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
from kvbridge_proto.common import DAY_S, AgentCard
from kvbridge_proto.status import STILL_S, SlotCounts, Status
from msgspec import json, structs
from prometheus_client import disable_created_metrics

from ..dataplane.attached import CurrentEngine
from ..dataplane.data_plane import DataPlane
from ..dataplane.resources import open_resources
from ..dataplane.threads import STUCK_S
from ..descriptors import links, raised
from ..errors import OperatorError
from ..exchange.orders import ReceivingReport, SendingReport
from ..exchange.receiver import Receiver
from ..exchange.route import Site
from ..exchange.sender import Sender
from ..exchange.session import AttachedEngine
from ..failpoints import VARIABLE, arm_from_environment
from ..options import AgentConfig, Supervision
from ..routes.pull.halves import CHECK_EVERY
from ..routes.registry import receiving_routes, sending_routes
from ..routes.slots.receive_slots import ReceiveSlots
from ..state_machines import SessionState
from ..transport.control import Control
from ..transport.door import MemoryDoor
from ..transport.endpoint import canonical, check_metrics, with_key
from ..transport.keys import load_keys
from ..transport.link import Settings
from ..transport.listed import read_entry
from ..transport.local import LocalServer
from ..transport.lock import Lock
from ..transport.processes import Pidfds
from ..transport.trust import Trust
from .clients import Clients
from .doors import Doors, LocalDoors
from .engines import Engines
from .journal import Journal
from .kept import KeptAnswers, kept_page
from .logs import LastErrors, set_up
from .meeting import Meetings
from .metrics import Gauges, Metrics, Prompts
from .outgoing_peers import OutgoingPeers, ReceiverEvents
from .peers import IncomingPeers, Peers, SenderEvents
from .rates import Rates
from .rebuild import Rebuilder
from .record import Record, View
from .runners import ReceiverRunner, SenderRunner
from .status import held, offered_tokens, offers, page, peers, readers, transfers
from .supervisor import Supervisor

if TYPE_CHECKING:
    from .spans import Spans

log = logging.getLogger("kvbridge.agent")

TICK_S = 0.02
IDLE_TICK_S = 0.25
STATES = (SessionState.NEW, SessionState.HANDSHAKE, SessionState.OPEN)  # of sessions that we have dialled
PAGE_MADE_S = 1.0
LOOP_STILL_S = 10.0  # after so long without a tick the event loop is taken for hung
# The loop and the data plane share the interpreter. With Python's default each waits up to 5 ms for the other.
SWITCH_S = 0.0002


def run(config: AgentConfig, stuck_s: float = STUCK_S, supervision: Supervision | None = None) -> None:
    """Run one agent until SIGTERM or SIGINT. Raises OperatorError or FabricError when it cannot start.

    Does not return if the data plane is stuck: the process ends with the EXIT_CODE of dataplane/threads.py.
    """
    set_up(config.log_level, config.log_format, errors := LastErrors())
    faulthandler.enable()  # systemd's watchdog ends us with SIGABRT: the log then has every thread's stack
    disable_created_metrics()  # one more series per counter, which nobody reads
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(Agent(config, stuck_s=stuck_s, errors=errors, supervisor=Supervisor(supervision)).run())


def trust_of(config: AgentConfig) -> Trust:
    """Which peers may dial us and which we may dial, from the configuration. Raises OperatorError."""
    keys = load_keys(config.key, config.peers) if config.key else None
    trust = Trust(keys, config.dial, config.allow_unauthenticated)
    trust.check_places()
    return trust


class Agent:
    """One incarnation of one agent. A simulator brings its own `clock` and `entropy(size)`."""

    on_receive_orders: Callable[[Sequence[ReceivingReport]], None]
    on_send_orders: Callable[[Sequence[SendingReport]], None]

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
        self.incarnation = entropy(8).hex()
        self.before: frozenset[str] = frozenset()  # dead incarnations of this agent
        self.metrics = metrics or Metrics()
        self.rates = Rates(self.metrics.carry_took)
        self.journal = Journal(clock)
        self._supervisor = supervisor or Supervisor(None)
        self._processes = Pidfds(clock)
        self.state = "starting"
        self._started = self._ticked_at = clock()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._armed: tuple[str, ...] = ()
        self._connections: set[asyncio.Task[None]] = set()
        self.doors = Doors()
        self._spans: Spans | None = None

    def stop(self) -> None:
        """Begin to drain. `run` returns once that is over."""
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
                    tasks.create_task(self.meetings.serve()),
                    tasks.create_task(self._serve_local(tasks)),
                ]
                if self._supervisor.check_s:
                    serving.append(tasks.create_task(self._supervisor.feed(lambda: self.data_plane.watchdog.beats)))
                self.state = "serving"
                self.control.set_trust(self.trust)  # the list may have been read again while we started
                gc.collect()
                gc.freeze()  # torch's hundred thousand objects stay: no collection needs to scan them again
                log.info(
                    "serving: name=%s incarnation=%s address=%s socket=%s device=%s links: %s",
                    self.card.name,
                    self.incarnation,
                    self.card.address,
                    self.config.socket,
                    self.data_plane.description,
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
            from .spans import Spans  # needs an extra that few have

            self._spans = Spans(config.otlp_endpoint, config.name, self.metrics.spans)
            stack.callback(self._spans.close)
        descriptors = raised()
        self.trust = trust_of(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if config.allow_unauthenticated and self.trust.keys is None:
            log.warning("allow_unauthenticated: anybody who reaches %s may fetch KV and name its bytes", config.listen)
        # Taken first and released last: its next owner takes us for dead.
        self.lock = Lock(config.socket, self.incarnation)
        stack.callback(self.lock.close)
        self.before = self.lock.before
        devices = self.trust.data_devices(config.listen, config.advertise, config.net_devices)
        config = structs.replace(config, net_devices=devices)
        timeout_s, linger_s = config.write_timeout_s, config.linger_s
        self.data_plane = DataPlane(
            lambda: open_resources(config, self.incarnation), self.incarnation, self, timeout_s, self._stuck_s, linger_s
        )
        stack.callback(self._processes.close)
        stack.push_async_callback(self.data_plane.stop)
        await self.data_plane.start()
        self.slots = ReceiveSlots(self.data_plane.site.fabric.slots)
        self.control = await stack.enter_async_context(self._control(descriptors))
        self.local = await stack.enter_async_context(LocalServer(self.lock, allowed_uids=config.allowed_uids or None))
        if self.data_plane.site.shares_memory:
            uids = config.share_memory_uids
            door = await stack.enter_async_context(MemoryDoor(self.lock, allowed_uids=uids, clock=self._clock))
            self.doors = LocalDoors(door, self.data_plane, config.name, uids)
        self.card = AgentCard(
            name=config.name,
            incarnation=self.incarnation,
            address=with_key(
                config.advertise or self.control.address, self.trust.keys.public if self.trust.keys else ""
            ),
            version=version("kvbridge"),
        )
        self._assemble()
        # However we end, no socket closes before the data plane has finished with the engine's memory.
        stack.push_async_callback(self.engines.leave, "the agent is ending")
        stack.callback(self.rebuilder.close)
        if config.metrics:
            check_metrics(config.metrics, allow_wildcard=config.allow_wildcard)
            pages = {"/status": partial(self._status_page, loop)} if config.status_page else {}
            lookups = {"/kept": partial(kept_page, self.sender.kept)} if config.kept_page else {}
            stack.callback(self.metrics.serve(config.metrics, self._why_ill, pages, lookups))

    def _arm(self) -> None:
        """Arm failpoints from the environment, and warn of them in the log and the metrics."""
        if armed := arm_from_environment():
            self._armed = armed
            log.warning("FAILPOINTS ARE ON, this agent will fail on purpose: %s=%s", VARIABLE, ",".join(armed))
            self.metrics.warn_of_failpoints(armed)

    def _control(self, descriptors: int) -> Control:
        config, most = self.config, links(descriptors, Settings().max_links)
        settings = Settings(
            connect_s=config.connect_s, silence_s=config.silence_s, max_links=most, max_unreached=max(1, most // 4)
        )
        wildcard = config.allow_wildcard
        return Control(self.incarnation, config.listen, settings=settings, allow_wildcard=wildcard, trust=self.trust)

    def _reload(self) -> None:
        """Read the list of peers again. If it cannot be read the old one stays. Our own key does not change."""
        try:
            trust = trust_of(self.config)
        except OperatorError as error:
            return log.error("peers not read again, the old list stays: %s: %s", error.code, error)
        ours, read = self.trust.keys, trust.keys
        if ours is not None and read is not None and ours.public != read.public:
            names = read.names if self.config.peers else ours.names  # without a list, peers are those with our pair
            trust = replace(trust, keys=replace(ours, names=names))
            log.warning("key: the file has another one, %s; it counts after a restart", read.public)
        self.trust = trust
        if self.state != "starting":
            self.control.set_trust(trust)
        log.info("peers read again: %s", trust.description)

    def _assemble(self) -> None:
        clock, entropy, config = self._clock, self._entropy, self.config
        routes = partial(receiving_routes, slots=self.slots, check_every=CHECK_EVERY[config.verify])
        self.receiving = Receiver(routes, lambda: entropy(8).hex(), lambda: entropy(16))
        self.sending = Sender(sending_routes, before=self.before)
        prompts, current = Prompts(self.metrics.prompt_computed), CurrentEngine(clock)
        self.current, self.prompts = current, prompts
        self.receiver = self._receiver_runner(current)
        self.sender = self._sender_runner(current)
        self.on_receive_orders, self.on_send_orders = self.receiver.on_reports, self.sender.on_reports
        outgoing, incoming = self.receiver.peers, self.sender.peers
        self.peers = Peers(self.control, outgoing, incoming, self.data_plane, self.metrics, clock)
        receiver, sender, data, metrics = self.receiver, self.sender, self.data_plane, self.metrics
        self.engines = Engines(self.card, current, receiver, sender, self.peers, data, self.doors, metrics, clock)
        self.clients = Clients(
            current, self.engines, receiver, sender, prompts, data, metrics, self.journal, self.status, clock
        )
        far, sent = lambda: self.receiving.quarantined("far"), data.send_orders.slots
        entries = [read_entry(entry, "meet") for entry in config.meet]
        self.meetings = Meetings(entries, self.receiver, canonical(self.card.address), self._met_for, clock)
        self.rebuilder = Rebuilder(self.slots, far, sent, self.engines, data, metrics, config.rebuild_s, clock)
        self.metrics.watch(self.gauges(), {"receiver": self.peers.open_dialled, "sender": self.peers.open_accepted})

    def _receiver_runner(self, current: CurrentEngine) -> ReceiverRunner:
        def open_peers(receiver: ReceiverEvents) -> OutgoingPeers:
            connect_s, enter = self.config.connect_s, self.doors.enter
            engine = lambda: current.engine  # noqa: E731
            return OutgoingPeers(
                receiver, self.control, self.data_plane, engine, self.metrics, connect_s, self._clock, enter
            )

        record = Record("receiver", self.journal, self._clock, self._views)
        return ReceiverRunner(
            self.receiving, open_peers, self.data_plane, record, current, self._clock, self._processes
        )

    def _sender_runner(self, current: CurrentEngine) -> SenderRunner:
        def open_peers(sender: SenderEvents) -> IncomingPeers:
            return IncomingPeers(sender, self.data_plane, lambda: current.engine, self.metrics, self.doors)

        record = Record("sender", self.journal, self._clock, self._views)
        outgoing = self.receiver.peers
        kept = KeptAnswers(outgoing.tell_all, current.tell)
        outgoing.kept, outgoing.cannot_fetch = kept.ours.values, kept.unreachable
        return SenderRunner(self.sending, open_peers, self.data_plane, record, current, self._clock, kept)

    def _met_for(self) -> AttachedEngine | None:
        """The engine that sessions are opened for before it wants anything."""
        return None if self.engines.is_closing or self.engines.leaving is not None else self.current.engine

    @property
    def _views(self) -> list[View]:
        return [self.metrics, self.rates, self.prompts, *([self._spans] if self._spans is not None else [])]

    def gauges(self) -> Gauges:
        """All gauges. What they look at may come later."""

        def count(slots: Callable[[], SlotCounts]) -> dict[tuple[str], Callable[[], float]]:
            read = lambda state: float(getattr(slots(), state))  # noqa: E731
            return {(state,): partial(read, state) for state in SlotCounts.__struct_fields__}

        def readers(is_overdue: bool) -> float:
            return sum((importer.over_at is not None) is is_overdue for importer in self.doors.importers())

        received, sent = self.receive_slots, lambda: self.data_plane.send_orders.slots.counts()
        unclaimed = lambda: len(self.sending.unclaimed(self._clock()))  # noqa: E731
        yield "kvbridge_receive_slots", "Slots of the staging that others write to", ("state",), count(received)
        yield "kvbridge_send_slots", "Slots of the staging that we send from", ("state",), count(sent)
        text = "Agents that have our engine's memory mapped; overdue: their session or its epoch is over"
        states = {("open",): partial(readers, False), ("overdue",): partial(readers, True)}
        yield "kvbridge_memory_readers", text, ("state",), states
        for name, text, value in (
            ("kvbridge_wants_open", "Wants under way", lambda: len(self.receiving.wants)),
            ("kvbridge_offers_open", "Offers not yet released", lambda: len(self.sending.engines_offers)),
            ("kvbridge_offers_unclaimed", "Complete offers that nobody has asked for", unclaimed),
            ("kvbridge_offers_tokens", "Tokens of all open offers", lambda: offered_tokens(self.sending)),
            ("kvbridge_engine_attached", "1 while an engine is attached", lambda: self.current.engine is not None),
            ("kvbridge_data_plane_still_seconds", "Since the data thread last made a turn", self.still_s),
            (
                "kvbridge_kernels_compiling",
                "Kernels being compiled or waiting for it",
                lambda: self.data_plane.compiling,
            ),
            ("kvbridge_rebuild_refused", "1 while slots cannot be replaced", lambda: bool(self.rebuilder.refused)),
        ):
            yield name, text, (), {(): value}
        yield from self._gauges_by_role()

    def _gauges_by_role(self) -> Gauges:
        count = lambda state: self.peers.count_dialled(state)  # noqa: E731
        sessions: dict[tuple[str, str], Callable[[], float]] = {("sender", "open"): lambda: self.peers.count_accepted()}
        for state in STATES:
            sessions["receiver", state.name.lower()] = partial(count, state)
        met = {("met",): lambda: self.meetings.count(True), ("waiting",): lambda: self.meetings.count(False)}
        yield "kvbridge_meet_agents", "Addresses of the option meet, by whether all sessions are open", ("state",), met
        yield "kvbridge_sessions", "Sessions with other agents", ("role", "state"), sessions
        text = "Wants that wait for a session, transfers that wait for a slot, an offer or credit of slots"
        waiting = {
            ("receiver", "session"): lambda: self.receiving.without_session,
            ("receiver", "slot"): lambda: self.receiving.without_slot,
            ("sender", "offer"): lambda: self.sending.without_offer,
            ("sender", "credit"): lambda: self.data_plane.send_orders.without_credit,
            ("sender", "slot"): lambda: self.data_plane.send_orders.without_slot,
        }
        yield "kvbridge_queue_length", text, ("role", "awaits"), waiting
        transfers = {
            ("receiver",): lambda: self.receiving.moving,
            ("sender",): lambda: len(self.sending.outgoing_transfers),
        }
        yield "kvbridge_transfers_open", "Transfers under way", ("role",), transfers

    def still_s(self) -> float:
        return min(DAY_S, self.data_plane.watchdog.still_s)

    def _why_ill(self) -> str:
        """Why a restart would help: the data thread or the loop hangs; or "". Called on other threads."""
        for what, still_s, most_s in (
            ("data thread", self.still_s(), STILL_S),
            ("event loop", self._clock() - self._ticked_at, LOOP_STILL_S),
        ):
            if still_s > most_s:
                return f"the {what} has not come round for {still_s:.0f} s"
        return "" if self.state != "starting" else "the agent does not serve yet"

    def receive_slots(self) -> SlotCounts:
        """Counts of our receive slots. The data plane knows which lent slots were written and are being read."""
        counts = self.slots.counts()
        landed = min(counts.lent, self.data_plane.receive_orders.scattering)
        return structs.replace(counts, lent=counts.lent - landed, landed=landed)

    # Serve:

    async def _serve_local(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            connection = await self.local.accept()
            task = tasks.create_task(self.clients.serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _tick(self) -> None:
        while True:
            is_busy = (
                self.receiving.wants
                or self.receiving.expected
                or self.sending.outgoing_transfers
                or self.sending.offers
            )
            at = self._clock() + (TICK_S if is_busy else IDLE_TICK_S)
            await asyncio.sleep(at - self._clock())
            self._ticked_at = self._clock()
            self.tick(self._ticked_at - at)

    def tick(self, late_s: float) -> None:
        """Act on deadlines. The loop stood still for `late_s`: what peers sent meanwhile has not been read yet."""
        self.current.note_if_silent()
        self.peers.outgoing.tick(self._clock(), late_s)
        self.receiver.tick()
        self.sender.tick()
        self.prompts.tick(self._clock())

    def on_staged(self, site: Site) -> None:
        self.slots.make(site.fabric.slots)
        self.engines.staged(site)

    def on_data_plane_died(self, error: BaseException) -> None:
        self._failure = error
        self.stop()

    # Drain:

    async def _drain(self) -> None:
        """Accept nothing new, let what is under way finish, then say goodbye."""
        self.state = "draining"
        self._supervisor.stopping()
        self.engines.is_closing = self.peers.incoming.is_closing = True
        log.info("draining: wants=%d transfers=%d", len(self.receiving.wants), len(self.sending.outgoing_transfers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while self.receiving.wants or self.sending.outgoing_transfers:  # noqa: ASYNC110 - no event covers both
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
            fabric=self.data_plane.site.fabric.kind,
            device=self.data_plane.description,
            security=self.trust.description,
            slot_bytes=self.data_plane.site.fabric.slot_bytes,
            receive_slots=self.receive_slots(),
            send_slots=self.data_plane.send_orders.slots.counts(),
            engine=self.engines.engine_status(),
            peers=peers(self.peers.statuses(), self.rates),
            transfers=transfers(self.receiving, self.sending, now),
            offers=offers(self.sending, self.peers.incoming.name_of, now),
            counters=self.metrics.values(),
            rebuild_refused=self.rebuilder.refused,
            readers=readers(self.doors.importers(), now),
            errors=self._errors.statuses(),
            still_s=self.still_s(),
            metrics=self.config.metrics,
            prompts=self.metrics.prompts(),
            failpoints=self._armed,
            refusals=self.receiver.peers.refusals(self.meetings.known),
            held=held(self.sending, now),
        )

    def _status_page(self, loop: asyncio.AbstractEventLoop) -> bytes:
        """The page /status, made on the loop. Called on other threads. Raises TimeoutError if the loop hangs."""

        async def made() -> bytes:
            return json.encode(page(self.status()))

        return asyncio.run_coroutine_threadsafe(made(), loop).result(PAGE_MADE_S)
