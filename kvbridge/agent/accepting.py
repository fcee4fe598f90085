"""Sessions that others opened, to fetch from us. By boot, for that is who they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from weakref import WeakValueDictionary

from kvbridge_proto.peer import (
    PROBE_LANES,
    Body,
    Cancel,
    Check,
    Claim,
    Drained,
    Goodbye,
    Grant,
    Hello,
    Hold,
    Refuse,
    Renew,
    Settled,
)

from ..dataplane.mover import Mover
from ..dataplane.routes.choice import NOT_CONNECTED, Connected, may_be_written, options, to_be_read
from ..dataplane.routes.staged import Landing
from ..errors import FabricError
from ..exchange.route import Site
from ..exchange.session import Home, answer, welcome
from ..failpoints import failpoint
from ..transport.link import Link
from .doors import Doors
from .metrics import Metrics
from .relations import Accepted, SourceSide
from .words import described, warn_of_route

log = logging.getLogger("kvbridge.peers")

LEVELS = {"already_open": logging.INFO, "busy": logging.DEBUG}  # what an honest agent may do often
MOST_GREETINGS = PROBE_LANES  # Hellos at once, each with a proof of its own
# A proof alone takes a few milliseconds, and proofs side by side slow each other down: so the next one begins when the
# one before has ended, or after this time. Who never answers keeps nobody longer.
TURN_S = 0.02


class Accepting:
    """The source's half of `Peers`. `fault` is told of what we do wrong: link, what it was."""

    def __init__(
        self,
        mover: Mover,
        home: Callable[[], Home | None],
        metrics: Metrics,
        fault: Callable[[Link, str], None],
        doors: Doors,
    ) -> None:
        self.source: SourceSide
        self.is_closing = False
        self.sessions: dict[str, Accepted] = {}
        self._mover = mover
        self._home = home
        self._metrics = metrics
        self._fault = fault
        self._doors = doors
        self._turn = asyncio.Lock()
        self._of_boot: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._greeted_by: dict[Link, Hello | None] = {}  # what is being answered; None: it has taken it back

    def knocked(self, tasks: asyncio.TaskGroup, link: Link, sender: str, greeting: Hello) -> None:
        """Each Hello may cost a connection to be made: so many wait at once, and one of a link."""
        is_known = link in self._greeted_by
        if self._greeted_by.get(link) is not None or (not is_known and len(self._greeted_by) >= MOST_GREETINGS):
            reason = f"greetings: {len(self._greeted_by)} wait, limit {MOST_GREETINGS}, and one of a link"
            self._refuse(link, "busy", reason)
            return
        self._greeted_by[link] = greeting
        if not is_known:
            tasks.create_task(self._greet(link, sender))

    def send(self, boot: str, body: Body) -> None:
        if (accepted := self.sessions.get(boot)) is not None:
            accepted.link.send(body)

    def name_of(self, boot: str) -> str:
        """What the agent of this boot calls itself, while it has a session; else the boot."""
        accepted = self.sessions.get(boot)
        return boot if accepted is None else accepted.session.peer.name

    def hear(
        self, link: Link, sender: str, body: Claim | Grant | Renew | Check | Cancel | Hold | Settled | Goodbye
    ) -> None:
        """A sink says something else than Hello."""
        accepted = self.sessions.get(sender)
        if accepted is not None and accepted.link is not link:  # who else says this boot's name is not its agent
            accepted = None
        match body:
            case Goodbye():
                if link in self._greeted_by:
                    self._greeted_by[link] = None
                if accepted is not None:
                    self._end(sender, body.reason)
            case Claim() if accepted is not None and self.is_closing and self.source.is_hopeless(body):
                link.send(Refuse(code="draining", reasons=("this agent is stopping",), about=body.transfer))
            case Claim() | Grant() | Renew() | Check() | Cancel() | Hold() | Settled() if accepted is not None:
                self.source.from_sink(accepted.session, body)
            case Claim():
                link.send(Refuse(code="no_session", reasons=("claim without a session",), about=body.transfer))
            case Cancel() if self._is_over(sender, body):
                link.send(Drained(transfer=body.transfer))
            case Cancel():  # it will ask again
                pass
            case _:
                self._metrics.rejected("unexpected_message")

    def _is_over(self, sender: str, cancel: Cancel) -> bool:
        """Whether nothing of a transfer is or will be written, as far as who has no session by this link may ask.

        It may have one by another link, and the claim may be on its way to us there.
        """
        return (bool(cancel.boot) or sender not in self.sessions) and self.source.renounce(sender, cancel)

    def lose(self, link: Link, reason: str) -> None:
        for boot in [boot for boot, accepted in self.sessions.items() if accepted.link is link]:
            self._end(boot, reason)

    def renew(self, reason: str) -> None:
        """All sessions end, and the sinks hear it."""
        for boot in list(self.sessions):
            self._dismiss(boot, reason)

    async def _greet(self, link: Link, sender: str) -> None:
        """One Hello of an agent at a time: two must not undo each other's connection."""
        async with self._of_boot.setdefault(sender, asyncio.Lock()):
            try:
                while (greeting := self._greeted_by[link]) is not None:
                    if greeting.agent.boot != sender:
                        reason = f"agent.boot: {greeting.agent.boot} in the message, {sender} on the envelope"
                        self._say_no(link, Refuse(code="bad_hello", reasons=(reason,)))
                    elif self._is_waiting(link, greeting):
                        await self._greeted(link, greeting)
                    if self._greeted_by[link] is greeting:  # else it has taken it back, and may have said another
                        break
            except Exception:
                self._fault(link, f"Hello of {sender}")
            finally:
                del self._greeted_by[link]

    async def _greeted(self, link: Link, greeting: Hello) -> None:
        """Somebody wants to fetch from us."""
        failpoint("source.hello_received")
        home = self._home()
        if self.is_closing:
            self._say_no(link, Refuse(code="draining", reasons=("this agent is stopping",)))
            return
        session = answer(greeting, home)
        if isinstance(session, Refuse) or home is None:
            assert isinstance(session, Refuse)
            log.warning("refused a peer: peer=%s code=%s %s", greeting.agent.name, session.code, session.reasons)
            self._metrics.refused(session.code)
            self._say_no(link, session)
            return
        known = self.sessions.get(boot := session.peer.boot)
        if known is not None and known.link is not link and not self._may_replace(known, link, greeting):
            return
        if known is not None and known.link is link and known.is_like(greeting):
            connected: Connected | None = known.connected
        else:  # it has forgotten what was proved before, or never knew
            if known is not None and known.link is not link:  # what it lent may be other slots in those proved now
                self.source.lost(boot)
            connected = await self._connect(link, greeting, home)
            if connected is None and known is not None and self.sessions.get(boot) is known:
                self._dismiss(boot, "its route was given up for another that could not be had")
        if connected is None:
            return
        session = replace(session, routed=connected.routed)
        if known is None:
            self._metrics.greeted("source", "open")
            key = f" key={link.key}" if link.key else ""
            log.info("session open: sink=%s boot=%s%s %s", session.peer.name, boot, key, described(session))
            warn_of_route(session.peer.name, session)
        elif known.session.peer_epoch != session.peer_epoch or known.link is not link:
            self.source.lost(boot)
        if known is not None and connected.serial == NOT_CONNECTED:  # another that is connected takes its place itself
            self._mover.disconnect(boot, known.connected.serial)
        self.sessions[boot] = Accepted(link, session, connected, greeting)
        if known is None or known.session.routed.route != session.routed.route:
            self.source.met(session)
        link.version = session.version
        door = self._doors.let_in(session, link) if session.routed.is_pulled else None
        link.send(welcome(session, home, door))
        failpoint("source.welcome_sent")

    def _may_replace(self, known: Accepted, link: Link, greeting: Hello) -> bool:
        """Whether a Hello by another link takes the session over; if not, its sender is told why.

        Links do not keep each other's order: what was said by one that its agent has given up may come last.
        """
        boot = greeting.agent.boot
        is_given_up = known.link.is_lost or known.serial < greeting.oldest
        if known.link.key != link.key:  # a boot is of who proved to have it first
            self._refuse(link, "boot_of_another_key", f"agent.boot: {boot} came with another key")
        elif greeting.address == known.address and greeting.serial < known.serial:
            self._refuse(link, "stale_hello", f"serial: got {greeting.serial}, a later one was {known.serial}")
        elif greeting.address != known.address and not is_given_up:
            self._refuse(link, "already_open", f"address: {known.address} is this agent as well")
        else:
            return True
        return False

    def _refuse(self, link: Link, code: str, reason: str) -> None:
        log.log(LEVELS.get(code, logging.WARNING), "refused %r: %s: %s", link, code, reason)
        self._metrics.refused(code)
        self._say_no(link, Refuse(code=code, reasons=(reason,)))

    def _say_no(self, link: Link, refuse: Refuse) -> None:
        """The answer to a Hello."""
        self._metrics.greeted("source", refuse.code)
        link.send(refuse)

    def _is_waiting(self, link: Link, greeting: Hello) -> bool:
        """Whether the sink that said this Hello is still there and has not said Goodbye since."""
        return not link.is_lost and self._greeted_by[link] is greeting

    async def _connect(self, link: Link, greeting: Hello, home: Home) -> Connected | None:
        """Prove a route to the sink's slots; None if there is none or it has become pointless meanwhile."""
        boot = greeting.agent.boot
        try:
            home = await self._staged(greeting, home)
            connected = await self._proved(link, greeting, home)
        except FabricError as error:
            reasons = tuple(reason[:1024] for reason in error.reasons[:64])
            self._say_no(link, Refuse(code=error.code, reasons=reasons))
            return None
        if connected is None:
            return None
        current = self._home()
        is_same = current is not None and current.epoch == home.epoch and current.site is home.site
        if not self._is_waiting(link, greeting) or not is_same:
            self._mover.disconnect(boot, connected.serial)
            if self._greeted_by[link] is not greeting:
                return None
            code, what = ("no_engine", "left") if current is None else ("stale_epoch", "or its agent changed")
            self._say_no(link, Refuse(code=code, reasons=(f"the engine {what} during the handshake",)))
            return None
        return connected

    async def _staged(self, greeting: Hello, home: Home) -> Home:
        """We have slots, and so does the sink, if it can only be written to. Raises FabricError."""
        site = Site.of(greeting)
        if to_be_read(home.site, site) is not None or not may_be_written(home.site, site):
            return home
        if not site.has_slots:
            against = (reason for _, reason in options(home.site, site) if reason)
            raise FabricError("no_slots", "fabric.slots: 0, and they are what this agent would write to", *against)
        await self._mover.stage()
        current = self._home()
        return home if current is None or current.epoch != home.epoch else current

    async def _proved(self, link: Link, greeting: Hello, home: Home) -> Connected | None:
        """When its turn comes; None if nobody waits for it any more. Raises FabricError."""
        await self._turn.acquire()
        with ExitStack() as turn:
            turn.callback(self._turn.release)
            if not self._is_waiting(link, greeting):
                return None
            asyncio.get_running_loop().call_later(TURN_S, turn.close)
            site = Site.of(greeting)
            if (routed := to_be_read(home.site, site)) is not None:
                return Connected(routed, NOT_CONNECTED)
            return await self._mover.connect(Landing(greeting.agent.boot, site, greeting.probe_lane))

    def _dismiss(self, boot: str, reason: str) -> None:
        self.sessions[boot].link.send(Goodbye(reason=reason))
        self._end(boot, reason)

    def _end(self, boot: str, reason: str) -> None:
        if (accepted := self.sessions.pop(boot, None)) is None:
            return
        log.info("session over: sink=%s boot=%s %s", accepted.session.peer.name, boot, reason)
        self.source.lost(boot)
        self._mover.disconnect(boot, accepted.connected.serial)
        self._doors.see_off(accepted.session)
