"""The receiver's sessions: we opened them with senders. Kept by address, because a want names an address."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from kvbridge_proto.common import DAY_S
from kvbridge_proto.door import Ticket
from kvbridge_proto.peer import PROBE_LANES, Body, Goodbye, Keeps, OfSender, ProcessCard, Refuse, Welcome
from kvbridge_proto.status import RefusalStatus
from msgspec import structs

from ..dataplane.data_plane import DataPlane
from ..errors import FabricError, KVBridgeError, PeerError
from ..exchange.containers import Deadlines
from ..exchange.route import Rate
from ..exchange.session import AttachedEngine, EngineMemoryId, Session, accept, hello
from ..failpoints import failpoint
from ..geometry.compat import Convertible
from ..routes.rate import is_slow
from ..state_machines import SESSION_TABLE, SessionEvent, SessionState
from ..transport.control import Control
from ..transport.endpoint import canonical
from ..transport.link import Link
from .doors import Ended
from .metrics import Metrics

log = logging.getLogger("kvbridge.peers")

NOT_OPEN = ("no_session", "no_engine", "stale_epoch")
LATE_TICK_S = 0.1  # a tick that is less late does not matter
UNUSED_LINK_S = 60.0  # unconfirmed transfers are asked about much more often, which keeps their link
MOST_REFUSALS, REFUSED_S = 64, 600.0  # remembered, for `kvbridge status`
UNTOLD = ("same_agent", "bad_address", "not_attached")  # ourselves; what is no address may be any text of a client
MOST_NAMES = 16  # addresses of one session: requests bring them, and a host may have any number


class ReceiverEvents(Protocol):
    """What the receiver hears of sessions and senders."""

    def met(self, session: Session) -> None: ...
    def opened(self, address: str, session: Session) -> None: ...
    def is_wanted(self, address: str) -> bool: ...
    def refused(self, address: str, incarnation: str, key: str) -> None: ...
    def unreachable(self, address: str, code: str, reason: str) -> None: ...
    def absent(self, address: str, since: float) -> None: ...
    def from_sender(self, incarnation: str, key: str, body: OfSender) -> None: ...


@dataclass(slots=True)
class OutgoingPeer:
    """An agent we fetch from."""

    address: str
    link: Link
    serial: int = 0  # among all that we dialled
    state: SessionState = SessionState.NEW
    session: Session | None = None
    lane: int = 0  # of our probe slot, where the sender proves its route
    has_lane: bool = False  # it is lent to this peer now
    names_slots: bool = False  # our last Hello named slots
    is_checked: bool = False  # a Welcome is being checked, or was
    known_incarnation: str = ""  # the agent there says it is this one, and has another session with us
    has_insisted: bool = False  # we have answered that there is no other
    opened: EngineMemoryId | None = None  # names its engine's memory while we have it mapped
    against_pull: str = ""  # why we cannot read its engine's memory ourselves
    asked_at: float | None = None  # when the receiver last reached for it, until it is told that nobody is there

    def step(self, event: SessionEvent) -> None:
        self.state = SESSION_TABLE[self.state, event]


class ProbeLanes:
    """The lanes of our probe slot. Simultaneous proofs never share one. The one unused for longest is lent first."""

    def __init__(self) -> None:
        self._free = deque(range(PROBE_LANES))

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def lend(self, dialled: OutgoingPeer) -> bool:
        """Lend a lane if one is free. Returns whether this peer has one now."""
        if not dialled.has_lane and self._free:
            dialled.lane, dialled.has_lane = self._free.popleft(), True
        return dialled.has_lane

    def take_back(self, dialled: OutgoingPeer) -> None:
        """Take its lane back: its proof was checked, or no longer matters."""
        if dialled.has_lane:
            dialled.has_lane = False
            self._free.append(dialled.lane)


@dataclass(eq=False, repr=False)
class OutgoingPeers:
    """The receiver's half of `Peers`.

    An agent may have several addresses, for instance a name and a number, but it has one session. The session is kept
    under the address that was dialled first. The others are its other names for as long as it lasts.
    """

    _receiver: ReceiverEvents
    _control: Control
    _data_plane: DataPlane
    _engine: Callable[[], AttachedEngine | None]
    _metrics: Metrics
    _connect_s: float
    _clock: Callable[[], float]
    _open_door: Callable[[Session, Ticket, Link, Ended], Awaitable[Rate | None]]
    on_end: Callable[[str, str, str], None] = lambda *_: None  # hears of addresses as `receiver.unreachable` does
    on_engine: Callable[[str], None] = lambda _: None  # hears that an agent that refused us for lack of one has it now
    kept: Callable[[], Iterable[Keeps]] = tuple  # what our engine keeps, which every new sender is told
    cannot_fetch: Callable[[str, str], None] = lambda *_: None  # hears addresses without a session, with their codes
    sessions: dict[str, OutgoingPeer] = field(default_factory=dict, init=False)
    _refusals: dict[str, tuple[float, str, str]] = field(default_factory=dict, init=False)  # when, code, reason
    _aliases: dict[str, str] = field(default_factory=dict, init=False)  # other names -> the address of the session
    _serial: int = field(default=0, init=False)
    _deadlines: Deadlines[str] = field(default_factory=Deadlines, init=False)
    # Links without a session, kept for late messages.
    _resting: Deadlines[Link] = field(default_factory=Deadlines, init=False)
    _lanes: ProbeLanes = field(default_factory=ProbeLanes, init=False)
    _without_lane: deque[str] = field(default_factory=deque, init=False)

    def reach(self, address: str) -> None:
        """Make sure that the receiver hears `opened` or `unreachable` for this address; before, perhaps `absent`."""
        dialled = self._at(address)
        if dialled is not None and dialled.state is SessionState.OPEN and dialled.session is not None:
            return self._receiver.opened(address, dialled.session)
        if dialled is None:
            try:
                dialled = self._dial(address)
            except PeerError as error:
                self._note_refusal(address, error.code, str(error))
                return self._unreachable(address, error.code, str(error))
        dialled.asked_at = self._clock()
        if dialled.link.is_refused:
            self.retried(dialled.link)

    def session_at(self, address: str) -> Session | None:
        """The session that is open with the agent at this address."""
        dialled = self._at(address)
        return dialled.session if dialled is not None and dialled.state is SessionState.OPEN else None

    def ask(self, address: str) -> None:
        """Say Hello, for the first time or again. A lane is lent only once the link is up."""
        engine, dialled = self._engine(), self._at(address)
        if engine is None or dialled is None or not dialled.link.is_up or dialled.state is SessionState.HANDSHAKE:
            return
        self._deadlines.set(dialled.address, self._clock() + self._connect_s)
        if dialled.session is None and not self._lanes.lend(dialled):
            self._without_lane.append(dialled.address)
            return
        dialled.step(SessionEvent.HELLO)
        self._say_hello(engine, dialled, min(each.serial for each in self.sessions.values()))

    def _say_hello(self, engine: AttachedEngine, dialled: OutgoingPeer, oldest: int) -> None:
        """Say Hello. It also says that we gave up all sessions dialled before serial `oldest`, except this one."""
        can_pull = not dialled.against_pull
        dialled.names_slots = engine.site.has_slots
        dialled.link.send(hello(engine, dialled.lane, dialled.address, dialled.serial, oldest, can_pull))

    def reached(self, link: Link) -> None:
        """This link is up."""
        if (dialled := self._of(link)) is not None and dialled.state is SessionState.NEW:
            self.ask(link.address)

    def retried(self, link: Link) -> None:
        """This link found nobody, and is tried again: see whether its host refuses connections."""
        if (dialled := self._of(link)) is not None and dialled.asked_at is not None:
            self._control.look_if_refused(link, partial(self._absent, dialled, self._clock()))

    def _absent(self, dialled: OutgoingPeer, since: float) -> None:
        """Nobody listens where this link is to go; it was looked at `since`."""
        if self._of(dialled.link) is dialled and not dialled.link.is_up:
            if dialled.asked_at is not None and dialled.asked_at <= since:
                dialled.asked_at = None
            self._receiver.absent(dialled.address, since)

    def send(self, address: str, body: Body) -> None:
        if (dialled := self._at(address)) is not None:
            dialled.link.send(body)

    def tell_all(self, kept: Keeps) -> None:
        """Tell every sender whose engine wants to hear it."""
        for dialled in self.sessions.values():
            if dialled.session is not None and dialled.session.takes_kept:
                dialled.link.send(kept)

    def tick(self, now: float, late_s: float = 0.0) -> None:
        """Act on deadlines. The loop stood still for `late_s`, which does not count as silence of peers."""
        if late_s > LATE_TICK_S:
            self._deadlines.put_off(late_s)
        for address in self._deadlines.due(now):
            dialled = self.sessions.get(address)
            missing = "no proof of the route to" if dialled is not None and dialled.is_checked else "no Welcome from"
            reason = f"connect_s: {missing} {address} in {self._connect_s:g} s"
            self._end(address, "peer_unreachable", reason, may_be_dead=True)
        for link in self._resting.due(now):
            if self._of(link) is None and not link.is_lost:
                link.close()

    def welcomed(self, link: Link, welcome: Welcome) -> Coroutine[Any, Any, None]:
        """Take the Welcome for the handshake under way by this link. It opens once its route has proved to work."""
        return self._welcomed(link, self._of(link), welcome)

    async def _welcomed(self, link: Link, dialled: OutgoingPeer | None, welcome: Welcome) -> None:
        failpoint("receiver.welcome_received")
        engine = self._engine()
        if engine is None or dialled is None or self._of(link) is not dialled:
            return
        if dialled.state is not SessionState.HANDSHAKE:
            return
        if welcome.probe is not None and welcome.probe.lane != dialled.lane:
            return  # the answer to a Hello that we gave up
        session: Session | Refuse | None = _accepted(link, welcome, engine)
        if dialled.session is None and isinstance(session, Session):
            if dialled.is_checked:
                return self._metrics.rejected("unexpected_message")
            dialled.is_checked = True
            session = await self._proved(session, welcome.door, dialled)
        current = self._engine()  # the check took a while; the engine may have named more ranks, or left
        if current is None or current.epoch != engine.epoch or self._of(link) is not dialled:
            return
        if dialled.state is not SessionState.HANDSHAKE:
            return
        if isinstance(session, Refuse):
            self._end(dialled.address, session.code, "; ".join(session.reasons))
            return
        if session is None:
            dialled.is_checked = False
            return await self.hello_with_slots(dialled)
        if dialled.against_pull:
            why = "; ".join(filter(None, (dialled.against_pull, session.routed.why)))
            session = replace(session, routed=replace(session.routed, why=why[:1024]))
        self._open(dialled, session)

    def lacks_slots(self, link: Link) -> OutgoingPeer | None:
        """The peer whose handshake by this link names no slots, if any: they may be all that is missing."""
        dialled = self._of(link)
        is_new = dialled is not None and dialled.state is SessionState.HANDSHAKE and dialled.session is None
        return dialled if dialled is not None and is_new and not dialled.names_slots else None

    async def hello_with_slots(self, dialled: OutgoingPeer) -> None:
        """Say hello again, and name slots: we cannot read the sender's blocks, so it has to write."""
        if (engine := self._engine()) is not None and engine.site.routes_to(can_pull=False):
            try:
                await self._data_plane.stage()
            except FabricError as error:
                if self._of(dialled.link) is dialled:
                    self._end(dialled.address, error.code, str(error))
                return
        engine = self._engine()
        if engine is None or self._of(dialled.link) is not dialled or dialled.state is not SessionState.HANDSHAKE:
            return
        self._deadlines.set(dialled.address, self._clock() + self._connect_s)
        self._say_hello(engine, dialled, min(each.serial for each in self.sessions.values()))

    def _open(self, dialled: OutgoingPeer, session: Session) -> None:
        address = dialled.address
        self._deadlines.clear(address)
        dialled.step(SessionEvent.WELCOME)
        if dialled.session is None:
            self._give_up_lane(dialled)
            self._metrics.handshake("receiver", "open")
            log.info("session open: peer=%s incarnation=%s %s", address, session.peer.incarnation, described(session))
            warn_of_route(address, session)
            self._receiver.met(session)
        is_new, dialled.session = dialled.session is None, session
        dialled.link.version = session.version
        if is_new and session.takes_kept:
            for kept in self.kept():
                dialled.link.send(kept)
        for name in self._names(address):
            self._refusals.pop(name, None)
            self._receiver.opened(name, session)
        self._sort_out()

    def on_message(self, link: Link, sender: str, body: OfSender | Goodbye) -> None:
        """Handle a sender's message other than Welcome."""
        address = link.address
        if not isinstance(body, Goodbye) and not (isinstance(body, Refuse) and not body.about):
            self._receiver.from_sender(sender, link.key, body)  # Drained is of use after the session, too
        if (dialled := self._of(link)) is None:
            return self.on_engine(address) if isinstance(body, Goodbye) else None
        match body:
            case Goodbye():
                self._end(address, "peer_left", body.reason)
            case Refuse(about="", code="already_open") if not dialled.has_insisted:
                dialled.known_incarnation = sender
                self._sort_out()
            case Refuse(about=""):
                self._receiver.refused(address, sender, link.key)  # before the end: it can still be asked
                self._end(address, body.code, "; ".join(filter(None, (dialled.against_pull, *body.reasons))))
            case Refuse() if body.code in NOT_OPEN and dialled.session is not None:  # not of an earlier session
                self._end(address, body.code, "; ".join(body.reasons))  # the sender has no such session

    def lose(self, link: Link, reason: str) -> None:
        if (dialled := self._of(link)) is not None:
            code = "peer_lost" if dialled.session else "peer_unreachable"
            self._end(link.address, code, f"{link.address}: {reason}")

    def lose_process(self, process: ProcessCard) -> None:
        """This process has ended: so have its sessions, whatever their links have heard."""
        for dialled in list(self.sessions.values()):
            if dialled.session is not None and dialled.session.process == process:
                reason = f"{dialled.address}: its process {process.pid} has ended"
                self._end(dialled.address, "peer_lost", reason, may_be_dead=True)

    def renew(self, reason: str) -> list[str]:
        """End all sessions and tell the senders, but not the receiver. Returns all addresses that had one."""
        addresses = [*self.sessions, *self._aliases]
        self._aliases.clear()
        self._without_lane.clear()
        while self.sessions:
            address, dialled = self.sessions.popitem()
            self._deadlines.clear(address)
            self._lanes.take_back(dialled)
            self._close_memory(dialled)
            dialled.step(SessionEvent.LOSE)
            self._say_goodbye(dialled.link, reason)
        return addresses

    def give_up(self, addresses: Sequence[str], code: str, reason: str) -> None:
        """Tell the receiver that these addresses are unreachable."""
        for address in addresses:
            self._receiver.unreachable(address, code, reason)

    def _at(self, address: str) -> OutgoingPeer | None:
        return self.sessions.get(self._aliases.get(address, address))

    def _of(self, link: Link) -> OutgoingPeer | None:
        """The session that this link carries now."""
        dialled = self.sessions.get(link.address)
        return dialled if dialled is not None and dialled.link is link else None

    def _sort_out(self) -> None:
        """Settle sessions refused with `already_open`: the agent has a session with us by another address.

        The refused address becomes another name of that session. If its Welcome may still be on its way, wait for it.
        If we have no such session (any more), insist.
        """
        refused = [each for each in self.sessions.values() if each.known_incarnation]
        for dialled in refused:
            if self.sessions.get(dialled.address) is not dialled:  # merged meanwhile, or over
                continue
            others = [
                own for own in self.sessions.values() if not own.known_incarnation and own.link.key == dialled.link.key
            ]
            same = [own for own in others if own.link.peer_incarnation == dialled.known_incarnation]
            if same:
                self._merge(dialled, same[0])
            elif not any(own.state is SessionState.HANDSHAKE and not own.link.peer_incarnation for own in others):
                self._insist(dialled)

    def _insist(self, dialled: OutgoingPeer) -> None:
        """Say hello again, and say that we gave up the session which that agent believes open."""
        dialled.known_incarnation, dialled.has_insisted = "", True
        if (engine := self._engine()) is not None:
            self._say_hello(engine, dialled, self._serial + 1)

    def _names(self, address: str) -> list[str]:
        return [address, *(name for name, own in self._aliases.items() if own == address)]

    def _dial(self, address: str) -> OutgoingPeer:
        """Raises PeerError."""
        if self._engine() is None:  # without one we cannot say Hello
            raise PeerError("not_attached", "no engine is attached to this agent")
        link = self._control.dial(address)
        self._serial += 1
        dialled = self.sessions[address] = OutgoingPeer(address, link, self._serial)
        self._deadlines.set(address, self._clock() + self._connect_s)
        self.ask(address)
        return dialled

    def _merge(self, dialled: OutgoingPeer, own: OutgoingPeer) -> None:
        """Make a dialled address, with all its names, another name of a session that we have."""
        names = self._names(dialled.address)
        self._drop(dialled)
        dialled.link.close()
        self._aliases |= dict.fromkeys(names, own.address)
        for name in names:
            if name in self._aliases:
                self._named(name, own)

    def _named(self, name: str, own: OutgoingPeer) -> None:
        """A session has a new name. If it has too many now, an idle one is given up."""
        if (count := len(self._names(own.address))) > MOST_NAMES and not self._give_up_name(name, own):
            # Unconfirmed transfers under this name are asked about all the same.
            self._receiver.refused(name, own.link.peer_incarnation, own.link.key)
            del self._aliases[name]
            reason = f"{name} is {own.address}, by a name too many: got {count}, limit {MOST_NAMES}"
            return self._receiver.unreachable(name, "too_many_names", reason)
        log.info("one agent: %s is %s as well", name, own.address)
        self._refusals.pop(name, None)
        if own.state is SessionState.OPEN and own.session is not None:
            self._receiver.opened(name, own.session)

    def _give_up_name(self, new: str, own: OutgoingPeer) -> bool:
        """Give up the oldest other name that no want and no engine's rank uses, if there is one. It may come again."""
        ranks = {rank.address for each in self.sessions.values() if each.session for rank in each.session.ranks}
        others = [name for name in self._names(own.address)[1:] if name != new and name not in ranks]
        if (idle := next((name for name in others if not self._receiver.is_wanted(name)), None)) is None:
            return False
        del self._aliases[idle]
        self._receiver.unreachable(idle, "too_many_names", f"{idle}: {new} is another name of this agent")
        return True

    def _give_up_lane(self, dialled: OutgoingPeer) -> None:
        """Take its lane back, and say hello to the next peer that waits for one."""
        self._lanes.take_back(dialled)
        while self._without_lane and len(self._lanes):
            waiting = self.sessions.get(self._without_lane.popleft())
            if waiting is not None and waiting.state is SessionState.NEW:
                self.ask(waiting.address)

    def _end(self, address: str, code: str, reason: str, may_be_dead: bool = False) -> None:
        """End a session under all its names, and tell the sender: it may not know, or our Hello may be on its way.

        `may_be_dead`: the peer may have given up this link long ago. Close it; a new one is dialled.
        """
        if (dialled := self.sessions.get(address)) is None:
            return
        self._drop(dialled)
        self._say_goodbye(dialled.link, code)
        if may_be_dead:
            dialled.link.close()
        if dialled.session is None:
            self._metrics.handshake("receiver", code)
            self._note_refusal(address, code, reason)
        log.info("session closed: peer=%s code=%s %s", address, code, reason)
        names = self._names(address)
        for name in names:
            self._aliases.pop(name, None)
        for name in names:
            self._unreachable(name, code, reason)
        self._sort_out()

    def _unreachable(self, address: str, code: str, reason: str) -> None:
        self.on_end(address, code, reason)
        self.cannot_fetch(address, code)
        self._receiver.unreachable(address, code, reason)

    def _note_refusal(self, address: str, code: str, reason: str) -> None:
        """Remember why there is no session with this address; the oldest goes first."""
        if code not in UNTOLD:
            self._refusals.pop(address, None)
            self._refusals[address] = self._clock(), code, reason
            if len(self._refusals) > MOST_REFUSALS:
                del self._refusals[next(iter(self._refusals))]

    def refusals(self, to_meet: Container[str]) -> tuple[RefusalStatus, ...]:
        """Whom we dialled lately and have no session with, the oldest attempt first. `to_meet` has addresses."""
        now = self._clock()
        self._refusals = {address: each for address, each in self._refusals.items() if now - each[0] < REFUSED_S}
        return tuple(
            RefusalStatus(
                address=address[:256],
                code=code[:256],
                reason=reason[:2048],
                age_s=min(DAY_S, now - at),
                to_meet=address in to_meet,
            )
            for address, (at, code, reason) in self._refusals.items()
        )

    def _say_goodbye(self, link: Link, reason: str) -> None:
        """Say Goodbye on a link whose session is over. The link stays for a while, for late messages."""
        link.send(Goodbye(reason=reason))
        self._resting.set(link, self._clock() + UNUSED_LINK_S)

    def _drop(self, dialled: OutgoingPeer) -> None:
        del self.sessions[dialled.address]
        self._close_memory(dialled)
        self._deadlines.clear(dialled.address)
        self._give_up_lane(dialled)
        dialled.step(SessionEvent.LOSE)

    async def _proved(self, session: Session, door: Ticket | None, dialled: OutgoingPeer) -> Session | Refuse | None:
        """The session if its route proves to work, else a Refuse. None if it is `pull` and we cannot read."""
        if session.routed.is_read and dialled.against_pull:
            return Refuse(code="route_mismatch", reasons=(f"route: pull, though {dialled.against_pull}"[:1024],))
        if session.routed.is_read:
            return await self._open_memory(session, door, dialled)
        if not await self._has_probe(session, dialled):
            reason = f"route: {session.routed.route}: the probe did not land"
            return Refuse(code="probe_mismatch", reasons=(reason,))
        return session

    async def _open_memory(self, session: Session, door: Ticket | None, dialled: OutgoingPeer) -> Session | None:
        """Map the memory of the sender's engine. Returns the session with the read rate, or None if we cannot read."""
        try:
            if door is None:
                raise PeerError("bad_welcome", "door: none, and the route is pull")
            rate = await self._open_door(session, door, dialled.link, partial(self._memory_ended, dialled))
        except (KVBridgeError, OSError) as error:
            level = logging.DEBUG if getattr(error, "code", "") == "door_elsewhere" else logging.INFO
            log.log(level, "route does not work: incarnation=%s route=pull %s", session.peer.incarnation, error)
            dialled.against_pull = f"pull: {error}"[:1024]
            return None
        if self._of(dialled.link) is dialled:
            dialled.opened = session.memory_id
        else:  # the session ended meanwhile
            self._data_plane.close_peer(session.memory_id)
        return replace(session, routed=replace(session.routed, read=rate))

    def _memory_ended(self, dialled: OutgoingPeer, code: str, reason: str) -> None:
        """The owner wants its memory closed, or is gone: end the session, whatever its link has heard."""
        if self._of(dialled.link) is dialled:
            self._end(dialled.address, code, f"{dialled.address}: {reason}")

    def _close_memory(self, dialled: OutgoingPeer) -> None:
        if dialled.opened is not None:
            self._data_plane.close_peer(dialled.opened)
            dialled.opened = None

    async def _has_probe(self, session: Session, dialled: OutgoingPeer) -> bool:
        """Whether our lane holds what the sender says it wrote."""
        probe = session.routed.probe
        return probe is not None and await self._data_plane.is_proved(session.routed.route, dialled.lane, probe)


def _accepted(link: Link, welcome: Welcome, engine: AttachedEngine) -> Session | Refuse:
    """What this Welcome agrees on, or why it cannot."""
    ranks = tuple(structs.replace(rank, address=canonical(rank.address)) for rank in welcome.ranks)
    session = accept(structs.replace(welcome, ranks=ranks), engine, link.key)
    if welcome.agent.incarnation != link.peer_incarnation:
        return Refuse(code="bad_welcome", reasons=("agent.incarnation: not the one on the envelope",))
    return session


def described(session: Session) -> str:
    return f"{route_of(session)}, {verdict_of(session)}"


def route_of(session: Session) -> str:
    """The route, its measured rate, and why better routes were rejected."""
    route, why, rate = session.routed.route, session.routed.why, session.routed.rate
    measured = f" {rate.bytes_per_s / 1e9:.3g} GB/s in {rate.size_bytes >> 10} KiB" if rate else ""
    return f"{route}{measured}" + (f" ({why})" if why else "")


def warn_of_route(name: str, session: Session) -> None:
    rate = session.routed.rate
    if rate is not None and is_slow(rate):
        log.warning("slow route: peer=%s %s", name, route_of(session))


def verdict_of(session: Session) -> str:
    found = session.verdict
    return "converting " + "; ".join(found.changes) if isinstance(found, Convertible) else "same on both sides"
