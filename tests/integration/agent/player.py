"""The peers of one agent, all played by the test: their links, and the agent's control and data plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from kvbridge_proto.peer import Cancel, Hello, Probe, Refuse, Welcome
from msgspec.structs import replace as replace_struct

from kvbridge.agent.doors import Doors
from kvbridge.agent.journal import Journal
from kvbridge.agent.kept import KeptAnswers
from kvbridge.agent.metrics import Metrics
from kvbridge.agent.outgoing_peers import OutgoingPeers
from kvbridge.agent.peers import IncomingPeers, Peers
from kvbridge.agent.record import Record
from kvbridge.agent.runners import ReceiverRunner, SenderRunner
from kvbridge.dataplane.orders import ReceiveOrders, SendOrders
from kvbridge.dataplane.threads import Linger
from kvbridge.exchange.orders import ReceivingOrder, SendingOrder
from kvbridge.exchange.route import Routed
from kvbridge.exchange.sender import Sender
from kvbridge.exchange.session import AttachedEngine, Session, answer, hello, welcome
from kvbridge.routes.choice import Connected
from kvbridge.routes.registry import sending_routes
from kvbridge.routes.slots.slot_routes import Landing
from kvbridge.transport.processes import Pidfds
from kvbridge.transport.trust import Trust
from testing.halves import make_receiver
from tests.unit.exchange.network import NOTHING, take_up
from tests.unit.exchange.world import World


class Wire:
    """One end of a link to another agent. It keeps what was sent."""

    version, is_lost, is_up, is_refused, sends_by_pipe = 1, False, True, False, False

    def __init__(self, address: str, key: str = "", peer_incarnation: str = "", *, is_dialled: bool = False) -> None:
        self.address, self.key, self.peer_incarnation, self.is_dialled = address, key, peer_incarnation, is_dialled
        self.sent: list[Any] = []

    def send(self, body: Any) -> bool:
        self.sent.append(body)
        return True

    def close(self) -> None:
        self.is_lost = True

    def said(self, kind: type) -> list[Any]:
        return [body for body in self.sent if isinstance(body, kind)]

    def last(self, kind: type) -> Any:
        return next(reversed(self.said(kind)), None)


def outgoing_of(receiver: Any, player: Any, data_plane: Any, connect_s: float) -> OutgoingPeers:
    """Sessions that the receiver opens by the control of `player`, for its engine."""
    engine = lambda: player.engine  # noqa: E731
    return OutgoingPeers(receiver, player, data_plane, engine, Metrics(), connect_s, time.monotonic, player.doors.enter)


def incoming_of(sender: Any, player: Any, data_plane: Any) -> IncomingPeers:
    return IncomingPeers(sender, data_plane, lambda: player.engine, Metrics(), player.doors)


def joined(player: Any, data_plane: Any, connect_s: float) -> Peers:
    """Peers whose control, engine, receiver and sender are all of `player`."""
    outgoing = outgoing_of(player, player, data_plane, connect_s)
    return Peers(player, outgoing, incoming_of(player, player, data_plane), data_plane, Metrics())


class Player:
    """Control, data plane, receiver and sender: the test's. A proof takes until `may_prove` is set."""

    trust, doors = Trust(), Doors()

    def __init__(self, engine: AttachedEngine) -> None:
        self.engine: AttachedEngine | None = engine
        self.wires: dict[str, Wire] = {}
        self.may_prove = asyncio.Event()
        self.proving: list[Landing] = []
        self.disconnected: list[tuple[str, int]] = []
        self.checked: list[int] = []
        self.heard: list[tuple[str, Any]] = []
        self.drained = False
        self.opened_at: list[str] = []
        self.over: list[tuple[str, str]] = []
        self.gone: list[tuple[str, float]] = []
        self.looks: list[Callable[[], None]] = []
        self.reasons: list[str] = []  # of those in `over`
        self.peers = joined(self, self, 0.2)

    async def takes(self, wire: Wire, said: Hello) -> None:
        """Hear a Hello, and return when it is dealt with."""
        async with asyncio.TaskGroup() as tasks:
            self.peers._take(tasks, wire, said.agent.incarnation, said)

    def reach(self, *addresses: str) -> Wire:
        """Sessions are wanted with these; the link to the last of them."""
        for address in addresses:
            self.peers.outgoing.reach(address)
        return self.wires[addresses[-1]]

    @property
    def linger(self) -> Linger:
        return Linger(0.0)

    def is_wanted(self, address: str) -> bool:
        return False

    def refused(self, address: str, incarnation: str, key: str) -> None: ...

    def dial(self, address: str) -> Wire:
        return self.wires.setdefault(address, Wire(address, is_dialled=True))

    def look_if_refused(self, link: Wire, refused: Callable[[], None]) -> None:
        self.looks.append(refused)

    async def stage(self) -> None: ...

    async def connect(self, landing: Landing) -> Connected:
        self.proving.append(landing)
        serial = len(self.proving)
        await self.may_prove.wait()
        probe = Probe(lane=landing.lane, seed=1, size_bytes=64, bytes_per_s=1e9)
        return Connected(Routed("nixl", "", probe), serial)

    def disconnect(self, incarnation: str, serial: int, is_lost: bool = False) -> None:
        self.disconnected.append((incarnation, serial))

    async def is_proved(self, route: str, lane: int, probe: Probe) -> bool:
        self.checked.append(lane)
        await self.may_prove.wait()
        return True

    def met(self, session: Session) -> None: ...
    def opened(self, address: str, session: Session) -> None:
        self.opened_at.append(address)

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self.over.append((address, code))
        self.reasons.append(reason)

    def absent(self, address: str, since: float) -> None:
        self.gone.append((address, since))

    def from_receiver(self, session: Session, body: Any) -> None:
        self.heard.append((session.peer.incarnation, body))

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        return self.drained

    def lost(self, incarnation: str) -> None:
        self.heard.append((incarnation, "lost"))


class Whole(Player):
    """With a real receiver and a real sender. It keeps what its engine is told. Its data plane only takes orders.

    `report` lets receiver and sender hear what the data plane has to say.
    """

    def __init__(self, engine: AttachedEngine, slots: int = 4, peers: type[Peers] = Peers) -> None:
        super().__init__(engine)
        self.now, self.told, numbers = 0.0, list[Any](), count(1)
        self.memory = NOTHING
        self.send_orders, self.receive_orders = SendOrders(2), ReceiveOrders()
        self.metrics, self.journal, clock = Metrics(), Journal(), lambda: self.now
        token = lambda: next(numbers).to_bytes(16, "big")  # noqa: E731
        self.receiving = make_receiver(slots, lambda: f"id{next(numbers)}", token)
        self.sending = Sender(sending_routes)
        views = [self.metrics]
        records = [Record(role, self.journal, time.monotonic, views) for role in ("receiver", "sender")]
        outgoing, incoming = lambda of: outgoing_of(of, self, self, 5.0), lambda of: incoming_of(of, self, self)
        told: Any = self  # as CurrentEngine
        self.receiver = ReceiverRunner(self.receiving, outgoing, self, records[0], told, clock, Pidfds(clock))
        kept = KeptAnswers(self.receiver.peers.tell_all, self.tell)
        self.sender = SenderRunner(self.sending, incoming, self, records[1], told, clock, kept)
        self.peers = peers(self, self.receiver.peers, self.sender.peers, self, self.metrics)
        self.may_prove.set()

    def tell(self, message: Any) -> None:
        self.told.append(message)

    def note_if_silent(self) -> None: ...

    def give(self, order: SendingOrder | ReceivingOrder, attached: Any) -> None:
        take_up(order, self.send_orders, self.receive_orders)

    def report(self) -> None:
        while received := self.receive_orders.take_reports():
            self.receiver.on_reports(received)
        while sent := self.send_orders.take_reports():
            self.sender.on_reports(sent)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def hello_from(world: World, incarnation: str) -> Hello:
    engine = world.receivers[0].engine
    return hello(replace(engine, agent=replace_struct(engine.agent, incarnation=incarnation)), 0)


async def met(world: World, key: str = "") -> tuple[Player, Wire]:
    player, wire = Player(world.senders[0].engine), Wire("D0", key, "D")
    player.may_prove.set()
    await player.takes(wire, hello_from(world, "D"))
    assert wire.said(Welcome)
    return player, wire


def welcomed(world: World, wire: Wire) -> Welcome:
    sender = world.senders[0].engine
    said = wire.said(Hello)[-1]
    session = answer(said, sender)
    assert isinstance(session, Session)
    probe = Probe(lane=said.probe_lane, seed=1, size_bytes=64, bytes_per_s=1e9)
    wire.peer_incarnation = sender.agent.incarnation
    return welcome(replace(session, routed=Routed("nixl", "", probe)), sender)


async def reached(world: World) -> tuple[Player, str]:
    """A session with P0, and who that is."""
    player, incarnation = Player(world.receivers[0].engine), world.senders[0].engine.agent.incarnation
    player.may_prove.set()
    player.peers.outgoing.reach("P0")
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    assert player.opened_at == ["P0"]
    return player, incarnation


def knows(player: Player, address: str, incarnation: str) -> None:
    """The agent there says that we have a session with it."""
    wire = player.wires[address]
    wire.peer_incarnation = incarnation
    player.peers._on_message(wire, incarnation, Refuse(code="already_open", reasons=()))
