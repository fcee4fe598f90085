"""Our sessions with other agents: those we dialled to fetch from (by address), those that dialled us (by boot)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvbridge_proto.peer import (
    Body,
    Cancel,
    Claim,
    Drained,
    Failing,
    Goodbye,
    Grant,
    Hello,
    Ready,
    Refuse,
    Settled,
    Welcome,
)
from kvbridge_proto.status import PeerStatus

from ..errors import FabricError, PeerError
from ..exchange.lease import Deadlines
from ..exchange.route import Site
from ..exchange.session import Home, Session, SessionEvent, SessionState, accept, answer, hello, welcome
from ..failpoints import failpoint
from ..transport.control import Control
from ..transport.events import Arrived, Lost, Rejected
from ..transport.link import Link
from .metrics import Metrics
from .mover import Mover
from .relations import Accepted, Dialled, Lanes, SinkSide, SourceSide
from .routes import Connected, Landing
from .status import peer_statuses
from .words import described, warn_of_route

log = logging.getLogger("kvbridge.peers")

WARN_S = 60.0
MOST_GREETINGS = 64  # Hellos that wait for their route to be proved, one after the other


class Peers:
    """Sessions come and go here; what they are for is the sink's and the source's business."""

    def __init__(
        self,
        control: Control,
        mover: Mover,
        home: Callable[[], Home | None],
        metrics: Metrics,
        connect_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink: SinkSide
        self.source: SourceSide
        self.is_closing = False
        self._control = control
        self._mover = mover
        self._home = home
        self._metrics = metrics
        self._connect_s = connect_s
        self._clock = clock
        self._dialled: dict[str, Dialled] = {}
        self._accepted: dict[str, Accepted] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._warned: dict[str, float] = {}
        self._greeting = asyncio.Lock()
        self._greeted_by: dict[Link, bool] = {}  # whose Hello is being answered; whether it still wants to know
        self._lanes = Lanes()
        self._without_lane: deque[str] = deque()

    async def serve(self) -> None:
        """Hear what comes in until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for event in self._control.events():
                match event:
                    case Arrived(link=link, envelope=envelope):
                        self._take(tasks, link, envelope.sender, envelope.body)
                    case Lost(link=link, code=code, reason=reason):
                        self._lose(link, f"{code}: {reason}")
                    case Rejected(code=code, text=text):
                        self._rejected(code, text)

    def _take(self, tasks: asyncio.TaskGroup, link: Link, sender: str, body: Body) -> None:
        """One message; what goes wrong with it costs its link and nothing else."""
        try:
            if isinstance(body, Hello):  # waits for the mover; nobody else shall
                self._knocked(tasks, link, sender, body)
            elif isinstance(body, Welcome) and link.is_dialled:
                tasks.create_task(self._welcome(link, body))
            else:
                self._hear(link, sender, body)
        except Exception:
            self._fault(link, f"{type(body).__name__} of {sender}")

    async def _welcome(self, link: Link, greeting: Welcome) -> None:
        try:
            await self._welcomed(link.address, greeting)
        except Exception:
            self._fault(link, f"Welcome of {link.address}")

    def _knocked(self, tasks: asyncio.TaskGroup, link: Link, sender: str, greeting: Hello) -> None:
        """Each Hello may cost a connection to be made: so many wait at once, and one of a link."""
        if link in self._greeted_by or len(self._greeted_by) >= MOST_GREETINGS:
            self._metrics.refused("busy")
            reason = f"greetings: {len(self._greeted_by)} wait, limit {MOST_GREETINGS}, and one of a link"
            link.send(Refuse(code="busy", reasons=(reason,)))
            return
        self._greeted_by[link] = True
        tasks.create_task(self._greet(link, sender, greeting))

    async def _greet(self, link: Link, sender: str, greeting: Hello) -> None:
        """One Hello at a time: two of one agent must not undo each other's connection."""
        async with self._greeting:
            try:
                if greeting.agent.boot != sender:
                    reason = f"agent.boot: {greeting.agent.boot} in the message, {sender} on the envelope"
                    link.send(Refuse(code="bad_hello", reasons=(reason,)))
                elif self._is_waiting(link):
                    await self._greeted(link, greeting)
            except Exception:
                self._fault(link, f"Hello of {sender}")
            finally:
                del self._greeted_by[link]

    def _fault(self, link: Link, what: str) -> None:
        """Our own fault: it costs the link, the log has the cause."""
        log.exception("a message could not be handled: %s", what)
        self._metrics.rejected("internal_error")
        link.close()
        self._lose(link, "internal_error: see the log")

    def _rejected(self, code: str, text: str) -> None:
        self._metrics.rejected(code)
        now = self._clock()
        if now - self._warned.get(code, -WARN_S) >= WARN_S:  # counted each time, said once a minute
            self._warned[code] = now
            log.warning("rejected a message: code=%s %s", code, text)

    # As sink:

    def reach(self, address: str) -> None:
        """See to it that `opened` or `unreachable` is heard for this address."""
        dialled = self._dialled.get(address)
        if dialled is not None and dialled.state is SessionState.OPEN and dialled.session is not None:
            self.sink.opened(address, dialled.session)
        elif dialled is None:
            try:
                self._dial(address)
            except PeerError as error:
                self.sink.unreachable(address, error.code, str(error))

    def _dial(self, address: str) -> None:
        """Raises PeerError."""
        if self._home() is None:  # nobody could say Hello then
            raise PeerError("not_attached", "no engine is attached to this agent")
        self._dialled[address] = Dialled(address, self._control.dial(address))
        self.ask(address)

    def ask(self, address: str) -> None:
        """Say Hello, the first time or again."""
        home, dialled = self._home(), self._dialled.get(address)
        if home is None or dialled is None or dialled.state is SessionState.GREETING:
            return
        self._deadlines.set(address, self._clock() + self._connect_s)
        if dialled.session is None and not self._lanes.lend(dialled):
            self._without_lane.append(address)
            return
        dialled.step(SessionEvent.HELLO)
        dialled.link.send(hello(home, dialled.lane))

    def _give_up_lane(self, dialled: Dialled) -> None:
        """Its turn is over; who waits for a lane comes next."""
        self._lanes.take_back(dialled)
        while self._without_lane and len(self._lanes):
            waiting = self._dialled.get(self._without_lane.popleft())
            if waiting is not None and waiting.state is SessionState.NEW:
                self.ask(waiting.address)

    def send_to_source(self, address: str, body: Body) -> None:
        if (dialled := self._dialled.get(address)) is not None:
            dialled.link.send(body)

    def tick(self, now: float) -> None:
        for address in self._deadlines.due(now):
            if (dialled := self._dialled.get(address)) is not None:
                dialled.link.close()  # the other end may have given it up without our noticing: dial anew next time
            self._end(address, "peer_unreachable", f"connect_s: no Welcome from {address} in {self._connect_s}")

    def _end(self, address: str, code: str, reason: str) -> None:
        """A dialled session is over. The source may have another view of it, or a Hello of ours on its way to it."""
        dialled = self._dialled.pop(address, None)
        if dialled is None:
            return
        self._deadlines.clear(address)
        self._give_up_lane(dialled)
        dialled.step(SessionEvent.LOSE)
        dialled.link.send(Goodbye(reason=code))
        log.info("session over: peer=%s code=%s %s", address, code, reason)
        self.sink.unreachable(address, code, reason)

    async def _welcomed(self, address: str, greeting: Welcome) -> None:
        """The source agrees. Its route counts once we have seen what it wrote by it."""
        failpoint("sink.welcome_received")
        home, dialled = self._home(), self._dialled.get(address)
        if home is None or dialled is None or dialled.state is not SessionState.GREETING:
            return
        if greeting.probe is not None and greeting.probe.lane != dialled.lane:
            return  # the answer to a Hello that we gave up
        session: Session | Refuse = accept(greeting, home)
        if dialled.session is None and isinstance(session, Session):
            if dialled.is_checked:
                return self._metrics.rejected("unexpected_message")
            dialled.is_checked = True
            if not await self._is_proved(session, dialled):
                session = Refuse(code="probe_mismatch", reasons=(f"route: {greeting.route}: the probe did not land",))
        current = self._home()  # looking took a while; the engine may have named more ranks, or left
        if current is None or current.epoch != home.epoch or self._dialled.get(address) is not dialled:
            return
        if dialled.state is not SessionState.GREETING:
            return
        if greeting.agent.boot != dialled.link.peer_boot:
            session = Refuse(code="bad_welcome", reasons=("agent.boot: not the one on the envelope",))
        if isinstance(session, Refuse):
            self._end(address, session.code, "; ".join(session.reasons))
            return
        self._deadlines.clear(address)
        dialled.step(SessionEvent.WELCOME)
        if dialled.session is None:
            self._give_up_lane(dialled)
            log.info("session open: peer=%s boot=%s %s", address, session.peer.boot, described(session))
            warn_of_route(address, session)
            self.sink.met(session)
        dialled.session = session
        dialled.link.version = session.version
        self.sink.opened(address, session)

    async def _is_proved(self, session: Session, dialled: Dialled) -> bool:
        probe = session.routed.probe
        return probe is not None and await self._mover.is_proved(session.routed.route, dialled.lane, probe)

    # As source:

    def send_to_sink(self, boot: str, body: Body) -> None:
        if (accepted := self._accepted.get(boot)) is not None:
            accepted.link.send(body)

    async def _greeted(self, link: Link, greeting: Hello) -> None:
        """Somebody wants to fetch from us."""
        failpoint("source.hello_received")
        home = self._home()
        if self.is_closing:
            link.send(Refuse(code="draining", reasons=("this agent is stopping",)))
            return
        session = answer(greeting, home)
        if isinstance(session, Refuse) or home is None:
            assert isinstance(session, Refuse)
            log.warning("refused a peer: peer=%s code=%s %s", greeting.agent.name, session.code, session.reasons)
            self._metrics.refused(session.code)
            link.send(session)
            return
        known = self._accepted.get(boot := session.peer.boot)
        if known is not None and known.link.key != link.key:  # a boot is of who proved to have it first
            log.warning("refused a peer: boot=%s is of another key than %s", boot, link.key)
            self._metrics.refused("boot_of_another_key")
            link.send(Refuse(code="boot_of_another_key", reasons=(f"agent.boot: {boot} came with another key",)))
            return
        if known is not None and known.link is link and known.lane == greeting.probe_lane:
            connected: Connected | None = known.connected
        else:  # it has forgotten what was proved before, or never knew
            connected = await self._connect(link, greeting, home)
        if connected is None:
            return
        session = replace(session, routed=connected.routed)
        if known is None:
            key = f" key={link.key}" if link.key else ""
            log.info("session open: sink=%s boot=%s%s %s", session.peer.name, boot, key, described(session))
            warn_of_route(session.peer.name, session)
        elif known.session.peer_epoch != session.peer_epoch or known.link is not link:
            self.source.lost(boot)
        self._accepted[boot] = Accepted(link, session, connected, greeting.probe_lane)
        if known is None:
            self.source.met(session)
        link.version = session.version
        link.send(welcome(session, home))
        failpoint("source.welcome_sent")

    def _is_waiting(self, link: Link) -> bool:
        """Whether the sink that said Hello is still there and has not said Goodbye since."""
        return not link.is_lost and self._greeted_by[link]

    async def _connect(self, link: Link, greeting: Hello, home: Home) -> Connected | None:
        """Prove a route to the sink's slots; None if there is none or it has become pointless meanwhile."""
        boot = greeting.agent.boot
        try:
            connected = await self._mover.connect(Landing(boot, Site.of(greeting), greeting.probe_lane))
        except FabricError as error:
            link.send(Refuse(code=error.code, reasons=tuple(reason[:1024] for reason in error.reasons[:64])))
            return None
        current = self._home()
        is_same = current is not None and current.epoch == home.epoch and current.site is home.site
        if not self._is_waiting(link) or not is_same:
            self._mover.disconnect(boot, connected.serial)
            if not self._greeted_by[link]:
                return None
            code, what = ("no_engine", "left") if current is None else ("stale_epoch", "or its agent changed")
            link.send(Refuse(code=code, reasons=(f"the engine {what} during the handshake",)))
            return None
        return connected

    def _lose_sink(self, boot: str, reason: str) -> None:
        if (accepted := self._accepted.pop(boot, None)) is None:
            return
        log.info("session over: sink=%s boot=%s %s", accepted.session.peer.name, boot, reason)
        self.source.lost(boot)
        self._mover.disconnect(boot, accepted.connected.serial)

    # Both:

    def _hear(self, link: Link, sender: str, body: Body) -> None:
        address = link.address if link.is_dialled else None
        accepted = self._accepted.get(sender)
        if accepted is not None and accepted.link is not link:  # who else says this boot's name is not its agent
            accepted = None
        match body:
            case Goodbye() if address is not None:
                self._end(address, "peer_left", body.reason)
            case Goodbye():
                if link in self._greeted_by:
                    self._greeted_by[link] = False
                if accepted is not None:
                    self._lose_sink(sender, body.reason)
            case Refuse(about="") if address is not None:
                self.sink.refused(address, sender)  # while there is a way to ask it
                self._end(address, body.code, "; ".join(body.reasons))
            case Ready() | Failing() | Drained() | Refuse() if address is not None:
                self.sink.from_source(address, body)
                dialled = self._dialled.get(address)
                is_open = dialled is not None and dialled.session is not None  # or that claim was of the one before
                if is_open and isinstance(body, Refuse) and body.code in ("no_session", "no_engine", "stale_epoch"):
                    self._end(address, body.code, "; ".join(body.reasons))  # what we think is open is not
            case Claim() | Grant() | Cancel() | Settled() if accepted is not None:
                self.source.from_sink(accepted.session, body)
            case Claim():
                link.send(Refuse(code="no_session", reasons=("claim without a session",), about=body.transfer))
            case Cancel() if self.source.has_drained(body.transfer):
                link.send(Drained(transfer=body.transfer))
            case Cancel():  # its session is over, its writes are not: it will ask again
                pass
            case _:
                self._metrics.rejected("unexpected_message")

    def _lose(self, link: Link, reason: str) -> None:
        if link.is_dialled:
            dialled = self._dialled.get(link.address)
            if dialled is not None and dialled.link is link:
                code = "peer_lost" if dialled.session else "peer_unreachable"
                self._end(link.address, code, f"{link.address}: {reason}")
            return
        for boot in [boot for boot, accepted in self._accepted.items() if accepted.link is link]:
            self._lose_sink(boot, reason)

    def end_all(self, reason: str) -> None:
        """Our engine left or we are stopping: every session names an epoch that is over."""
        addresses = list(self._dialled)
        self.renew(reason)
        for address in addresses:
            self.sink.unreachable(address, "engine_left", reason)

    def renew(self, reason: str) -> None:
        """Another epoch of the same engine: sessions end, the sink knows and asks anew for whom it needs."""
        self._without_lane.clear()
        while self._dialled:
            address, dialled = self._dialled.popitem()
            self._deadlines.clear(address)
            self._lanes.take_back(dialled)
            dialled.step(SessionEvent.LOSE)
            dialled.link.send(Goodbye(reason=reason))
        for boot, accepted in list(self._accepted.items()):
            accepted.link.send(Goodbye(reason=reason))
            self._lose_sink(boot, reason)

    def statuses(self) -> list[PeerStatus]:
        return peer_statuses(self._dialled.values(), self._accepted.values(), self._control.trust.name_of)
