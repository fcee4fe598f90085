"""The peers of one agent, all played by the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from kvbridge_proto.peer import Cancel, Hello, Probe, Refuse, Welcome

from kvbridge.agent.doors import NoDoors
from kvbridge.agent.incoming_peers import IncomingPeers
from kvbridge.agent.metrics import Metrics
from kvbridge.agent.outgoing_peers import OutgoingPeers
from kvbridge.agent.peers import Peers
from kvbridge.dataplane.routes.choice import Connected
from kvbridge.dataplane.routes.staged import Landing
from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import AttachedEngine, Session, answer, hello, welcome
from kvbridge.transport.trust import Trust
from tests.integration.agent.wire import Wire
from tests.unit.exchange.world import NOTHING, World


def outgoing_of(
    receiver: Any, player: Any, data_plane: Any, engine: Callable[[], AttachedEngine | None], connect_s: float
) -> OutgoingPeers:
    """Sessions that the receiver opens by the control of `player`."""
    return OutgoingPeers(receiver, player, data_plane, engine, Metrics(), connect_s, time.monotonic, NoDoors().enter)


def incoming_of(sender: Any, data_plane: Any, engine: Callable[[], AttachedEngine | None]) -> IncomingPeers:
    return IncomingPeers(sender, data_plane, engine, Metrics(), NoDoors())


def joined(player: Any, data_plane: Any, engine: Callable[[], AttachedEngine | None], connect_s: float) -> Peers:
    """Peers whose control, receiver and sender are all `player`."""
    outgoing = outgoing_of(player, player, data_plane, engine, connect_s)
    return Peers(player, outgoing, incoming_of(player, data_plane, engine), data_plane, Metrics())


class EngineTold:
    """A CurrentEngine that keeps what it is told."""

    def __init__(self, tell: Callable[[Any], None], engine: Callable[[], AttachedEngine | None]) -> None:
        self.memory = NOTHING
        self.tell = tell
        self._engine = engine

    @property
    def engine(self) -> AttachedEngine | None:
        return self._engine()

    def listen(self) -> None: ...


class Player:
    """Control, data plane, receiver and sender: the test's. A proof takes until `may_prove` is set."""

    trust = Trust()

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
        self.peers = joined(self, self, lambda: self.engine, 0.2)

    def keep_awake(self) -> None: ...

    def is_wanted(self, address: str) -> bool:
        return False

    def refused(self, address: str, incarnation: str, key: str) -> None: ...

    def dial(self, address: str) -> Wire:
        return self.wires.setdefault(address, Wire(address, is_dialled=True))

    async def stage(self) -> None: ...

    async def connect(self, landing: Landing) -> Connected:
        self.proving.append(landing)
        serial = len(self.proving)
        await self.may_prove.wait()
        probe = Probe(lane=landing.lane, seed=1, size_bytes=64, bytes_per_s=1e9)
        return Connected(Routed("nixl", "", probe), serial)

    def disconnect(self, incarnation: str, serial: int) -> None:
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

    def from_receiver(self, session: Session, body: Any) -> None:
        self.heard.append((session.peer.incarnation, body))

    def renounce(self, incarnation: str, cancel: Cancel) -> bool:
        return self.drained

    def lost(self, incarnation: str) -> None:
        self.heard.append((incarnation, "lost"))


def run(story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(World()), 30))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def replace_struct(value: Any, **changes: Any) -> Any:
    return type(value)(**{name: getattr(value, name) for name in value.__struct_fields__} | changes)


def greeting(world: World, incarnation: str) -> Hello:
    engine = world.receivers[0].engine
    return hello(replace(engine, agent=replace_struct(engine.agent, incarnation=incarnation)), 0)


async def met(world: World, key: str = "") -> tuple[Player, Wire]:
    player, wire = Player(world.senders[0].engine), Wire("D0", key, "D")
    player.may_prove.set()
    async with asyncio.TaskGroup() as tasks:
        player.peers._take(tasks, wire, "D", greeting(world, "D"))
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
    player.peers._hear(wire, incarnation, Refuse(code="already_open", reasons=()))
