"""One agent's peers, greeted by tests that play all the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from kvbridge_proto.peer import Cancel, Hello, Probe, Refuse, Welcome

from kvbridge.agent.doors import NoDoors
from kvbridge.agent.metrics import Metrics
from kvbridge.agent.peers import Peers
from kvbridge.dataplane.routes.choice import Connected
from kvbridge.dataplane.routes.staged import Landing
from kvbridge.exchange.route import Routed
from kvbridge.exchange.session import Home, Session, answer, hello, welcome
from kvbridge.transport.trust import Trust
from tests.integration.agent.wire import Wire
from tests.unit.exchange.world import World


class Player:
    """Control, mover, sink and source: the test's. A proof takes until `may_prove` is set."""

    trust = Trust()

    def __init__(self, home: Home) -> None:
        self.home: Home | None = home
        self.wires: dict[str, Wire] = {}
        self.may_prove = asyncio.Event()
        self.proving: list[Landing] = []
        self.disconnected: list[tuple[str, int]] = []
        self.checked: list[int] = []
        self.heard: list[tuple[str, Any]] = []
        self.drained = False
        self.opened_at: list[str] = []
        self.over: list[tuple[str, str]] = []
        self.peers = Peers(self, self, lambda: self.home, Metrics(), 0.2, NoDoors())
        self.peers.dialling.sink = self.peers.accepting.source = self

    def stir(self) -> None: ...

    def is_wanted(self, address: str) -> bool:
        return False

    def refused(self, address: str, boot: str, key: str) -> None: ...

    def dial(self, address: str) -> Wire:
        return self.wires.setdefault(address, Wire(address, is_dialled=True))

    async def stage(self) -> None: ...

    async def connect(self, landing: Landing) -> Connected:
        self.proving.append(landing)
        serial = len(self.proving)
        await self.may_prove.wait()
        probe = Probe(lane=landing.lane, seed=1, size_bytes=64, bytes_per_s=1e9)
        return Connected(Routed("nixl", "", probe), serial)

    def disconnect(self, boot: str, serial: int) -> None:
        self.disconnected.append((boot, serial))

    async def is_proved(self, route: str, lane: int, probe: Probe) -> bool:
        self.checked.append(lane)
        await self.may_prove.wait()
        return True

    def met(self, session: Session) -> None: ...
    def opened(self, address: str, session: Session) -> None:
        self.opened_at.append(address)

    def unreachable(self, address: str, code: str, reason: str) -> None:
        self.over.append((address, code))

    def from_sink(self, session: Session, body: Any) -> None:
        self.heard.append((session.peer.boot, body))

    def renounce(self, boot: str, cancel: Cancel) -> bool:
        return self.drained

    def lost(self, boot: str) -> None:
        self.heard.append((boot, "lost"))


def run(story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(World()), 30))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def replace_struct(value: Any, **changes: Any) -> Any:
    return type(value)(**{name: getattr(value, name) for name in value.__struct_fields__} | changes)


def greeting(world: World, boot: str) -> Hello:
    home = world.sinks[0].home
    return hello(replace(home, agent=replace_struct(home.agent, boot=boot)), 0)


async def met(world: World, key: str = "") -> tuple[Player, Wire]:
    player, wire = Player(world.sources[0].home), Wire("D0", key, "D")
    player.may_prove.set()
    async with asyncio.TaskGroup() as tasks:
        player.peers._take(tasks, wire, "D", greeting(world, "D"))
    assert wire.said(Welcome)
    return player, wire


def welcomed(world: World, wire: Wire) -> Welcome:
    source = world.sources[0].home
    said = wire.said(Hello)[-1]
    session = answer(said, source)
    assert isinstance(session, Session)
    probe = Probe(lane=said.probe_lane, seed=1, size_bytes=64, bytes_per_s=1e9)
    wire.peer_boot = source.agent.boot
    return welcome(replace(session, routed=Routed("nixl", "", probe)), source)


async def reached(world: World) -> tuple[Player, str]:
    """A session with P0, and who that is."""
    player, boot = Player(world.sinks[0].home), world.sources[0].home.agent.boot
    player.may_prove.set()
    player.peers.dialling.reach("P0")
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    assert player.opened_at == ["P0"]
    return player, boot


def knows(player: Player, address: str, boot: str) -> None:
    """The agent there says that we have a session with it."""
    wire = player.wires[address]
    wire.peer_boot = boot
    player.peers._hear(wire, boot, Refuse(code="already_open", reasons=()))
