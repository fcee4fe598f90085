"""Our sessions with other agents, the dispatch of what comes in, and those that receivers opened with us.

The latter are kept by the receiver's incarnation; those that we dialled are in outgoing_peers.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

from kvbridge_proto.peer import (
    PROBE_LANES,
    Body,
    Cancel,
    Claim,
    Drained,
    Goodbye,
    Hello,
    OfReceiver,
    OfSender,
    Refuse,
    Welcome,
)
from kvbridge_proto.status import PeerStatus

from ..dataplane.data_plane import DataPlane
from ..errors import FabricError
from ..exchange.route import Site
from ..exchange.session import AttachedEngine, Session, answer, welcome
from ..failpoints import failpoint
from ..routes.choice import NOT_CONNECTED, Connected, candidates, may_be_written, to_be_read
from ..routes.slots.slot_routes import Landing
from ..state_machines import SessionState
from ..transport.control import Control
from ..transport.link import Arrived, Link, Lost, Reached, Rejected, Retried
from .doors import Doors
from .metrics import Metrics
from .outgoing_peers import OutgoingPeer, OutgoingPeers, described, route_of, verdict_of, warn_of_route

log = logging.getLogger("kvbridge.peers")

WARN_REJECTED_S = 60.0
# Limits of the status message (status.py of the protocol). Differences may not fit.
MOST_VERDICT, MOST_ROUTE = 4096, 2048
# An honest agent may cause these often.
LEVELS = {"already_open": logging.INFO, "busy": logging.DEBUG, "no_engine": logging.DEBUG}
MOST_HELLOS = PROBE_LANES  # Hellos answered at once, each with its own proof
# A proof takes a few milliseconds, and simultaneous proofs slow each other down. So the next one begins when the one
# before has ended, or after this time: a peer that never answers delays nobody longer.
PROOF_TURN_S = 0.02


@dataclass(eq=False, repr=False)
class Peers:
    """Opens and ends sessions. What they are used for is up to the receiver and the sender."""

    _control: Control
    outgoing: OutgoingPeers
    incoming: IncomingPeers
    _data_plane: DataPlane
    _metrics: Metrics
    _clock: Callable[[], float] = time.monotonic
    _warned: dict[str, float] = field(default_factory=dict, init=False)

    async def serve(self) -> None:
        """Handle what comes in until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for event in self._control.events(partial(self._take, tasks)):
                match event:
                    case Reached(link=link):
                        self.outgoing.reached(link)
                    case Retried(link=link):
                        self.outgoing.retried(link)
                    case Arrived(link=link, envelope=envelope):
                        self._take(tasks, link, envelope.sender, envelope.body)
                    case Lost(link=link, code=code, reason=reason):
                        self._lose(link, f"{code}: {reason}")
                    case Rejected(code=code, text=text):
                        self._rejected(code, text)

    def end_all(self, reason: str) -> None:
        """End all sessions, because our engine left or we are stopping: the epoch they name is over."""
        self.outgoing.give_up(self.renew(reason), "engine_left", reason)

    def renew(self, reason: str) -> list[str]:
        """End all sessions, because our engine has a new epoch or new slots. Returns the addresses of senders.

        The receiver is told by the caller, and reaches again for those it needs.
        """
        addresses = self.outgoing.renew(reason)
        self.incoming.renew(reason)
        return addresses

    def statuses(self) -> list[PeerStatus]:
        """One per agent that we fetch from and per agent that fetches from us."""
        name_of = self._control.trust.name_of
        return [
            *(
                peer_status(each.session, each.address, f"sender {each.state.name.lower()}", each.link, name_of)
                for each in self.outgoing.sessions.values()
            ),
            *(
                peer_status(each.session, each.session.peer.address, "receiver open", each.link, name_of)
                for each in self.incoming.sessions.values()
            ),
        ]

    # Callable from any thread: `list` copies atomically.

    def count_dialled(self, state: SessionState) -> int:
        """How many sessions that we dialled are in this state."""
        return sum(each.state is state for each in list(self.outgoing.sessions.values()))

    def count_accepted(self) -> int:
        return len(self.incoming.sessions)

    def open_dialled(self) -> list[Session]:
        """Open sessions with senders."""
        return [each.session for each in list(self.outgoing.sessions.values()) if each.session is not None]

    def open_accepted(self) -> list[Session]:
        """Open sessions with receivers."""
        return [each.session for each in list(self.incoming.sessions.values())]

    def _take(self, tasks: asyncio.TaskGroup, link: Link, sender: str, body: Body) -> None:
        """Handle one message. A failure costs its link and nothing else."""
        try:
            if isinstance(body, Hello):  # its answer waits for the data plane; nothing else may
                if (answered := self.incoming.hello_received(link, sender, body)) is not None:
                    tasks.create_task(self._answer(link, f"Hello of {sender}", answered))
            elif isinstance(body, Welcome) and link.is_dialled:
                tasks.create_task(self._welcome(link, body))
            elif isinstance(body, Refuse) and (dialled := self._to_ask_again(link, body)) is not None:
                tasks.create_task(
                    self._answer(link, f"Refuse of {link.address}", self.outgoing.hello_with_slots(dialled))
                )
            else:
                if link.is_dialled or sender in self.incoming.sessions:
                    self._data_plane.linger.keep_awake()
                self._on_message(link, sender, body)
        except Exception:
            self._fault(link, f"{type(body).__name__} of {sender}")

    def _to_ask_again(self, link: Link, refuse: Refuse) -> OutgoingPeer | None:
        """The peer to say hello to again: it refused because it has to write, and our Hello named no slots."""
        is_of_hello = refuse.code == "no_slots" and not refuse.about
        return self.outgoing.lacks_slots(link) if is_of_hello and link.is_dialled else None

    def _welcome(self, link: Link, welcome: Welcome) -> Coroutine[Any, Any, None]:
        """Answer a Welcome for the session that this link carries now: once the task runs it may carry another."""
        return self._answer(link, f"Welcome of {link.address}", self.outgoing.welcomed(link, welcome))

    async def _answer(self, link: Link, what: str, answered: Coroutine[Any, Any, None]) -> None:
        try:
            await answered
        except Exception:
            self._fault(link, what)

    def _on_message(self, link: Link, sender: str, body: Body) -> None:
        if link.is_dialled and isinstance(body, OfSender | Goodbye):
            self.outgoing.on_message(link, sender, body)
        elif isinstance(body, OfReceiver | Goodbye):
            self.incoming.on_message(link, sender, body)
        else:
            self._metrics.rejected("unexpected_message")

    def _lose(self, link: Link, reason: str) -> None:
        (self.outgoing if link.is_dialled else self.incoming).lose(link, reason)

    def _fault(self, link: Link, what: str) -> None:
        """We failed to handle a message: log the cause, and end the link."""
        log.exception("a message could not be handled: %s", what)
        self._metrics.rejected("internal_error")
        link.close()
        self._lose(link, "internal_error: see the log")

    def _rejected(self, code: str, text: str) -> None:
        self._metrics.rejected(code)
        now = self._clock()
        if (
            now - self._warned.get(code, -WARN_REJECTED_S) >= WARN_REJECTED_S
        ):  # counted every time, logged once a minute
            self._warned[code] = now
            log.warning("rejected a message: code=%s %s", code, text)


class SenderEvents(Protocol):
    """What the sender hears of sessions and receivers."""

    def met(self, session: Session) -> None: ...
    def from_receiver(self, session: Session, body: OfReceiver) -> None: ...
    def renounce(self, incarnation: str, cancel: Cancel) -> bool: ...
    def lost(self, incarnation: str) -> None: ...
    def will_never_be_offered(self, claim: Claim) -> bool: ...


@dataclass(slots=True)
class IncomingPeer:
    """An agent that fetches from us."""

    link: Link
    session: Session
    connected: Connected
    hello: Hello

    @property
    def address(self) -> str:
        """The address by which it reached us."""
        return self.hello.address

    @property
    def serial(self) -> int:
        return self.hello.serial

    def is_like(self, hello: Hello) -> bool:
        """Whether the proved route serves this Hello as well."""
        return (hello.probe_lane, hello.routes) == (self.hello.probe_lane, self.hello.routes)


@dataclass(eq=False, repr=False)
class IncomingPeers:
    """The sender's half of `Peers`."""

    _sender: SenderEvents
    _data_plane: DataPlane
    _engine: Callable[[], AttachedEngine | None]
    _metrics: Metrics
    _doors: Doors
    is_closing: bool = field(default=False, init=False)
    sessions: dict[str, IncomingPeer] = field(default_factory=dict, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _of_incarnation: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)
    _without_engine: dict[Link, None] = field(default_factory=dict, init=False)  # refused for lack of one
    # The Hello being answered; None after its Goodbye.
    _hellos_by: dict[Link, Hello | None] = field(default_factory=dict, init=False)

    def hello_received(self, link: Link, sender: str, hello: Hello) -> Coroutine[Any, Any, None] | None:
        """The coroutine that answers this Hello. None if it was refused, or the link's running one will answer it.

        An answer may need a new connection: at most MOST_HELLOS wait at once, and one per link.
        """
        is_known = link in self._hellos_by
        if self._hellos_by.get(link) is not None or (not is_known and len(self._hellos_by) >= MOST_HELLOS):
            reason = f"handshakes: {len(self._hellos_by)} wait, limit {MOST_HELLOS}, and one of a link"
            self._refuse(link, "busy", reason)
            return None
        self._hellos_by[link] = hello
        return None if is_known else self._answer_hellos(link, sender)

    def send(self, incarnation: str, body: Body) -> None:
        if (accepted := self.sessions.get(incarnation)) is not None:
            accepted.link.send(body)

    def name_of(self, incarnation: str) -> str:
        """The agent's name while this incarnation has a session, otherwise the incarnation."""
        accepted = self.sessions.get(incarnation)
        return incarnation if accepted is None else accepted.session.peer.name

    def on_message(self, link: Link, sender: str, body: OfReceiver | Goodbye) -> None:
        """Handle a receiver's message other than Hello."""
        accepted = self.sessions.get(sender)
        if accepted is not None and accepted.link is not link:  # only its own link speaks for an incarnation
            accepted = None
        match body:
            case Goodbye():
                if link in self._hellos_by:
                    self._hellos_by[link] = None
                if accepted is not None:
                    self._end(sender, body.reason)
            case Claim() if accepted is not None and self.is_closing and self._sender.will_never_be_offered(body):
                link.send(Refuse(code="draining", reasons=("this agent is stopping",), about=body.transfer))
            case _ if accepted is not None:
                self._sender.from_receiver(accepted.session, body)
            case Claim():
                link.send(Refuse(code="no_session", reasons=("claim without a session",), about=body.transfer))
            case Cancel() if self._is_over(sender, body):
                link.send(Drained(transfer=body.transfer))
            case Cancel():  # it will ask again
                pass
            case _:
                self._metrics.rejected("unexpected_message")

    def _is_over(self, sender: str, cancel: Cancel) -> bool:
        """Whether to confirm to a receiver that nothing will be written. It has no session by this link.

        If it has one by another link, its own transfers are not confirmed: a claim may still be on its way there.
        """
        return (bool(cancel.incarnation) or sender not in self.sessions) and self._sender.renounce(sender, cancel)

    def engine_came(self) -> None:
        """Tell those that were refused for lack of an engine. They need not find out by trying."""
        while self._without_engine:
            self._without_engine.popitem()[0].send(Goodbye(reason="an engine is attached now: say Hello again"))

    def lose(self, link: Link, reason: str) -> None:
        self._without_engine.pop(link, None)
        for incarnation in [incarnation for incarnation, accepted in self.sessions.items() if accepted.link is link]:
            self._end(incarnation, reason, is_lost=True)

    def renew(self, reason: str) -> None:
        """End all sessions, and tell the receivers."""
        for incarnation in list(self.sessions):
            self._dismiss(incarnation, reason)

    async def _answer_hellos(self, link: Link, sender: str) -> None:
        """Answer one Hello of an incarnation at a time: two at once would each replace the other's connection."""
        async with self._of_incarnation.setdefault(sender, asyncio.Lock()):
            try:
                while (hello := self._hellos_by[link]) is not None:
                    if hello.agent.incarnation != sender:
                        reason = (
                            f"agent.incarnation: {hello.agent.incarnation} in the message, {sender} on the envelope"
                        )
                        self._say_no(link, Refuse(code="bad_hello", reasons=(reason,)))
                    elif self._is_waiting(link, hello):
                        await self._answer_hello(link, hello)
                    if self._hellos_by[link] is hello:  # otherwise Goodbye came, and perhaps another Hello
                        break
            finally:
                del self._hellos_by[link]

    async def _answer_hello(self, link: Link, hello: Hello) -> None:
        """Open a session with a receiver, or refuse it."""
        failpoint("sender.hello_received")
        engine = self._engine()
        if self.is_closing:
            self._say_no(link, Refuse(code="draining", reasons=("this agent is stopping",)))
            return
        session = answer(hello, engine)
        if isinstance(session, Refuse) or engine is None:
            assert isinstance(session, Refuse)
            level = LEVELS.get(session.code, logging.WARNING)
            log.log(level, "refused a peer: peer=%s code=%s %s", hello.agent.name, session.code, session.reasons)
            self._metrics.refused(session.code)
            if session.code == "no_engine":
                self._without_engine[link] = None
            self._say_no(link, session)
            return
        known = self.sessions.get(incarnation := session.peer.incarnation)
        if known is not None and known.link is not link and not self._may_replace(known, link, hello):
            return
        if known is not None and known.link is link and known.is_like(hello):
            connected: Connected | None = known.connected
        else:  # nothing proved so far serves this Hello
            if known is not None and known.link is not link:
                self._sender.lost(incarnation)  # its leases may mean other slots by the new route
                self._data_plane.disconnect(incarnation, known.connected.serial, is_lost=True)
            connected = await self._connect(link, hello, engine)
            if connected is None and known is not None and self.sessions.get(incarnation) is known:
                self._dismiss(incarnation, "its route was given up, and the new one could not be proved")
        if connected is None:
            return
        session = replace(session, routed=connected.routed)
        if known is None:
            self._metrics.handshake("sender", "open")
            key = f" key={link.key}" if link.key else ""
            log.info(
                "session open: receiver=%s incarnation=%s%s %s", session.peer.name, incarnation, key, described(session)
            )
            warn_of_route(session.peer.name, session)
        elif known.session.peer_epoch != session.peer_epoch or known.link is not link:
            self._sender.lost(incarnation)
        if known is not None and connected.serial == NOT_CONNECTED:  # a new connection replaces it by itself
            self._data_plane.disconnect(incarnation, known.connected.serial)
        self.sessions[incarnation] = IncomingPeer(link, session, connected, hello)
        if known is None or known.session.routed.route != session.routed.route:
            self._sender.met(session)
        link.version = session.version
        door = self._doors.admit(session, link) if session.routed.is_read else None
        link.send(welcome(session, engine, door))
        failpoint("sender.welcome_sent")

    def _may_replace(self, known: IncomingPeer, link: Link, hello: Hello) -> bool:
        """Whether a Hello by another link takes the session over. If not, refuses it.

        Links are not ordered among each other: a Hello by a link that its agent has given up may come last.
        """
        incarnation = hello.agent.incarnation
        is_given_up = known.link.is_lost or known.serial < hello.oldest
        if known.link.key != link.key:  # an incarnation belongs to the first key it came with
            self._refuse(link, "incarnation_of_another_key", f"agent.incarnation: {incarnation} came with another key")
        elif hello.address == known.address and hello.serial < known.serial:
            self._refuse(link, "stale_hello", f"serial: got {hello.serial}, a later one was {known.serial}")
        elif hello.address != known.address and not is_given_up:
            self._refuse(link, "already_open", f"address: {known.address} is this agent as well")
        else:
            return True
        return False

    def _refuse(self, link: Link, code: str, reason: str) -> None:
        log.log(LEVELS.get(code, logging.WARNING), "refused %r: %s: %s", link, code, reason)
        self._metrics.refused(code)
        self._say_no(link, Refuse(code=code, reasons=(reason,)))

    def _say_no(self, link: Link, refuse: Refuse) -> None:
        """Refuse a Hello."""
        self._metrics.handshake("sender", refuse.code)
        link.send(refuse)

    def _is_waiting(self, link: Link, hello: Hello) -> bool:
        """Whether the receiver is still connected, and has said no Goodbye since this Hello."""
        return not link.is_lost and self._hellos_by[link] is hello

    async def _connect(self, link: Link, hello: Hello, engine: AttachedEngine) -> Connected | None:
        """Choose and prove a route to the receiver. None, with a Refuse if it still waits, if there is none."""
        incarnation = hello.agent.incarnation
        try:
            engine = await self._staged(hello, engine)
            connected = await self._proved(link, hello, engine)
        except FabricError as error:
            reasons = tuple(reason[:1024] for reason in error.reasons[:64])
            self._say_no(link, Refuse(code=error.code, reasons=reasons))
            return None
        if connected is None:
            return None
        current = self._engine()
        is_same = current is not None and current.epoch == engine.epoch and current.site is engine.site
        if not self._is_waiting(link, hello) or not is_same:
            self._data_plane.disconnect(incarnation, connected.serial)
            if self._hellos_by[link] is not hello:
                return None
            code, what = ("no_engine", "left") if current is None else ("stale_epoch", "or its agent changed")
            self._say_no(link, Refuse(code=code, reasons=(f"the engine {what} during the handshake",)))
            return None
        return connected

    async def _staged(self, hello: Hello, engine: AttachedEngine) -> AttachedEngine:
        """Make our slots if the receiver can only be written to. Raises FabricError if it or we can have none."""
        site = Site.of(hello)
        if to_be_read(engine.site, site) is not None or not may_be_written(engine.site, site):
            return engine
        if not site.has_slots:
            against = (reason for _, reason in candidates(engine.site, site) if reason)
            raise FabricError("no_slots", "fabric.slots: 0, and they are what this agent would write to", *against)
        await self._data_plane.stage()
        current = self._engine()
        return engine if current is None or current.epoch != engine.epoch else current

    async def _proved(self, link: Link, hello: Hello, engine: AttachedEngine) -> Connected | None:
        """Prove a route when its turn comes. None if nobody waits for it any more. Raises FabricError."""
        await self._turn.acquire()
        with ExitStack() as turn:
            turn.callback(self._turn.release)
            if not self._is_waiting(link, hello):
                return None
            asyncio.get_running_loop().call_later(PROOF_TURN_S, turn.close)
            site = Site.of(hello)
            if (routed := to_be_read(engine.site, site)) is not None:
                return Connected(routed, NOT_CONNECTED)
            return await self._data_plane.connect(Landing(hello.agent.incarnation, site, hello.probe_lane))

    def _dismiss(self, incarnation: str, reason: str) -> None:
        self.sessions[incarnation].link.send(Goodbye(reason=reason))
        self._end(incarnation, reason)

    def _end(self, incarnation: str, reason: str, is_lost: bool = False) -> None:
        if (accepted := self.sessions.pop(incarnation, None)) is None:
            return
        log.info("session closed: receiver=%s incarnation=%s %s", accepted.session.peer.name, incarnation, reason)
        self._sender.lost(incarnation)
        self._data_plane.disconnect(incarnation, accepted.connected.serial, is_lost)
        self._doors.revoke(accepted.session)


def peer_status(
    session: Session | None, address: str, state: str, link: Link, name_of: Callable[[str], str | None]
) -> PeerStatus:
    key = name_of(link.key) or ""
    if session is None:
        return PeerStatus(name="", address=address, incarnation="", state=state, verdict="", key=key)
    rate = session.routed.rate
    return PeerStatus(
        name=session.peer.name,
        address=address,
        incarnation=session.peer.incarnation,
        state=state,
        verdict=verdict_of(session)[:MOST_VERDICT],
        route=route_of(session)[:MOST_ROUTE],
        route_name=session.routed.route,
        bytes_per_s=rate.bytes_per_s if rate else None,
        key=key,
        has_pipe=link.sends_by_pipe,
        protocol=session.version,
    )
