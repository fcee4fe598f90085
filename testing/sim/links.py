"""Messages between simulated agents: the promises of transport/control.py, over a network that keeps no others.

A link delivers everything in order, or is lost and says so once. Meanwhile the network delays, loses, repeats and
reorders messages. Connections are cut with what was under way, or go dead in one direction or both. Processes freeze
and restart. Arrived messages are numbered as `Link` numbers them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbridge_proto.peer import Body, Envelope, Ping, Pong

from kvbridge.transport.link import Arrived, Event, Lost, Numbered, Reached, Rejected, Retried
from kvbridge.transport.trust import Trust

if TYPE_CHECKING:
    from .process import Process
    from .world import World

PING_S = 1.0
LATE_S = 0.2  # at most so late comes a message that is overtaken, or the copy of one


class SimLink(Numbered):
    """One end of a connection, with the part of `Link` that agents use."""

    def __init__(self, links: AgentLinks, address: str, is_dialled: bool) -> None:
        super().__init__()
        self.address = address
        self.key = ""
        self.is_dialled = is_dialled
        self.is_up = not is_dialled
        self.is_lost = False
        self.is_refused = False  # a try found nobody
        self.is_heard = False  # the agent knows of it: it was dialled, or a message came over it
        self.peer: SimLink | None = None
        self.links = links
        self._is_tail = False  # what is left of a link that this end gave up, or whose beginning was lost
        self._after: SimLink | None = None  # our tail
        self._outbox: deque[Body] = deque()
        self._free_at = 0.0
        self._stuck: list[Callable[[], None]] = []
        self._silent_since = -1.0
        self._pinged_at = links.world.clock.now

    def send(self, body: Body) -> bool:
        if self.is_lost or self.links.process.is_dead:
            return False
        if self.is_up:
            self._pass_on(body)
        else:
            self._outbox.append(body)
        return True

    def close(self) -> None:
        """End the link from our side, without a Lost. What was sent still leaves."""
        if not self.is_lost:
            self._end()
            self._hang_up()

    # The network:

    def up(self, peer: SimLink) -> None:
        self.is_up, self.peer = True, peer
        self.links.tell(Reached(self))  # type: ignore[arg-type]
        while self._outbox and not self.is_lost:
            self._pass_on(self._outbox.popleft())

    def _pass_on(self, body: Body) -> None:
        peer = self.peer
        if peer is None:  # cut, but not noticed yet: the message is lost
            return
        self.links.world.on_message(self.links.process, peer.links.process, body)
        event = partial(peer.arrive, self.number(self.links.process.incarnation, body))
        disorder = self.links.world.disorder(self.links.process.name, peer.links.process.name)
        if disorder and self.links.world.chance(0.3):
            self._mistreat(self.links.world.pick(disorder), event)
        else:
            self._carry(event)

    def _mistreat(self, how: str, event: Callable[[], None]) -> None:
        """Lose, repeat or delay a message. As far as we know, no connection does that."""
        world = self.links.world
        world.say("network", f"{how}: a message of {self.links.process.name}")
        if how == "duplicate":
            self._carry(event)
        if how != "drop":
            world.clock.after(world.uniform(0.0, LATE_S), lambda: self._deliver(event))

    def _carry(self, event: Callable[[], None]) -> None:
        """Bring it to the other end, behind everything sent before."""
        world = self.links.world
        self._free_at = max(self._free_at, world.clock.now + world.quick())
        world.clock.at(self._free_at, lambda: self._deliver(event))

    def _deliver(self, event: Callable[[], None]) -> None:
        if self.peer is None:  # cut meanwhile
            return
        if self._stuck or self.links.world.is_blocked(self.links.process.name, self.peer.links.process.name):
            if not self._stuck:
                self.links.world.held_up.append(self)
            self._stuck.append(event)
        else:
            self.peer.links.process.loop.post(0.0, event)

    def go_on(self) -> None:
        """A fault is over: what was held up arrives, in order."""
        stuck, self._stuck = self._stuck, []
        for event in stuck:
            self._deliver(event)

    def arrive(self, envelope: Envelope) -> None:
        """Take a message as `Control` does: one that is out of turn ends the link."""
        if self.is_lost:
            if self._after is not None:
                self._after.arrive(envelope)
            return
        fault = self.check(envelope)
        if fault is None:
            self.is_heard, self._is_tail = True, False
            self._hear(envelope)
        elif not self.is_heard:
            self._is_tail = True
            self.links.tell(Rejected(None, *fault))
            if self.peer is not None:
                self._carry(partial(self.peer.lose, "link_over"))
        elif self.is_dialled:
            self.lose(fault[0])
        else:
            self._give_up(fault[0])
            self.arrive(envelope)

    def _hear(self, envelope: Envelope) -> None:
        match envelope.body:
            case Ping(number=number):
                self.send(Pong(number=number))
            case Pong():
                pass
            case _:
                self.links.arrived(self, envelope)

    def lose(self, code: str) -> None:
        """Tell the agent that the link is lost, if it knew of it."""
        if self.links.process.is_dead:
            return
        if self.is_lost:
            if self._after is not None:
                self._after.lose(code)
            return
        self._end()
        self._hang_up()
        if self.is_heard:
            self.links.tell(Lost(self, code, f"{self.address}"))  # type: ignore[arg-type]

    def _give_up(self, code: str) -> None:
        """Lose an accepted link but keep its connection: a first message over it would begin another link."""
        self._end()
        self.links.tell(Lost(self, code, f"{self.address}"))  # type: ignore[arg-type]
        after = self._after = SimLink(self.links, self.address, False)
        after._is_tail, after.peer, after._free_at = True, self.peer, self._free_at
        if self.peer is not None:
            self.peer.peer = after
        self.links.open.append(after)

    def _end(self) -> None:
        self.is_lost = True
        self._outbox.clear()
        self.links.drop(self)

    def _hang_up(self) -> None:
        peer = self.peer
        if peer is not None:  # our socket is closed, which the other end sees after what we sent
            self._carry(lambda: peer.lose("peer_disconnected"))

    def cut(self) -> None:
        """Break the connection with all that is under way in both directions. Each end notices at its own time."""
        peer, world = self.peer, self.links.world
        for end in (self, peer):
            if end is not None:
                end.peer = None
                end.links.process.loop.post(world.uniform(0.0, 0.6), partial(end.lose, "peer_disconnected"))

    def look(self, silence_s: float) -> None:
        """Lose the link if it was silent for too long. Called now and then while something is wrong."""
        if self.is_lost or self.peer is None or self._is_tail or self.links.process.loop.is_frozen:
            self._silent_since = -1.0
            return
        world, other = self.links.world, self.peer.links.process
        may_be_dead = other.loop.is_frozen or self.peer._is_tail
        if not (may_be_dead or world.is_blocked(other.name, self.links.process.name)):
            self._silent_since = -1.0
        elif self._silent_since < 0:
            self._silent_since = world.clock.now
        elif world.clock.now - self._silent_since > silence_s:
            self.lose("peer_silent")

    def ping(self) -> None:
        """Send a message so that the loss of the one before is noticed. Called now and then where messages get lost."""
        now = self.links.world.clock.now
        if self.is_dialled and self.is_up and not self.links.process.loop.is_frozen and now - self._pinged_at >= PING_S:
            self._pinged_at = now
            self.send(Ping(number=0))


class AgentLinks:
    """One agent's `Control`."""

    def __init__(self, process: Process, address: str, connect_s: float) -> None:
        self.process = process
        self.world: World = process.world
        self.address = address
        self.open: list[SimLink] = []
        self.trust = Trust()
        self._dialled: dict[str, SimLink] = {}
        self._connect_s = connect_s
        self._events: deque[Event] = deque()
        self._arrived: Callable[[SimLink, str, Body], None] | None = None
        self._woken = asyncio.Event()

    def dial(self, address: str) -> Any:
        if (known := self._dialled.get(address)) is not None:
            return known
        link = SimLink(self, address, True)
        link.is_heard = True
        self._dialled[address] = link
        self.open.append(link)
        self._connect(link, self.world.clock.now + self._connect_s)
        return link

    def _connect(self, link: SimLink, deadline: float) -> None:
        """Try until somebody answers, or until the deadline."""

        def attempt() -> None:
            if link.is_lost:
                return
            other = self.world.at_address(link.address)
            if other is not None and not self.world.is_cut_off(self.process.name, other.name):
                accepted = SimLink(other.links, self.process.name, False)
                accepted.peer = link
                other.links.open.append(accepted)
                link.up(accepted)
            elif self.world.clock.now >= deadline:
                link.lose("peer_unreachable")
            else:
                link.is_refused = True
                self.tell(Retried(link))  # type: ignore[arg-type]
                self.process.loop.post(0.1, attempt)

        self.process.loop.post(self.world.quick(), attempt)

    def look_if_refused(self, link: SimLink, refused: Callable[[], None]) -> None:
        """The host of a process that has ended answers so, if the path lets it."""
        other = self.world.process_at(link.address)
        if other is None or not other.is_dead or link.is_up:
            return
        if not self.world.is_cut_off(self.process.name, other.name):
            self.process.loop.post(self.world.quick(), refused)

    def drop(self, link: SimLink) -> None:
        self.open.remove(link)
        if link.is_dialled:
            del self._dialled[link.address]

    def tell(self, event: Event) -> None:
        self._events.append(event)
        self._woken.set()

    def arrived(self, link: SimLink, envelope: Envelope) -> None:
        """Give a message to the agent: at once, as `Control` does with what comes by a pipe, or as an event."""
        scenario = self.world.scenario
        is_by_pipe = scenario.is_pulled and scenario.seed & 32
        if is_by_pipe and self._arrived is not None and not self._events:
            self.process.loop.run_now(partial(self._arrived, link, envelope.sender, envelope.body))
        else:
            self.tell(Arrived(link, envelope))  # type: ignore[arg-type]

    async def events(self, arrived: Callable[[SimLink, str, Body], None] | None = None) -> AsyncIterator[Event]:
        self._arrived = arrived
        while True:
            while self._events:
                yield self._events.popleft()
            self._woken.clear()
            await self._woken.wait()

    def die(self) -> None:
        """The process is gone. Its sockets close; what they had not sent yet is lost."""
        for link in list(self.open):
            peer, link.is_lost = link.peer, True
            if peer is not None:
                link._carry(partial(peer.lose, "peer_disconnected"))
        self.open.clear()
