"""Slots are made only when a session needs them, on either side. Sessions that need none go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from kvbridge_proto.engine import Done
from kvbridge_proto.peer import Hello, Refuse, Route
from kvbridge_proto.status import SlotCounts
from msgspec.structs import replace as replace_struct

from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.dataplane.resources import ROOM_ON_GPU, _copier, open_resources
from kvbridge.dataplane.threads import TIMER_SLACK_NS
from kvbridge.device import copier_gpu
from kvbridge.errors import FabricError, OperatorError
from kvbridge.exchange.route import Routed, Site
from kvbridge.exchange.session import Session, accept, answer, hello, welcome
from kvbridge.options import AgentConfig
from kvbridge.routes.choice import may_be_written, to_be_read
from testing.agents import AgentProcess, OracleEngine, agent, attached
from testing.oracle import Shape
from testing.pairs import Benches, carry
from testing.proc import resident_bytes
from testing.waiting import wait_for
from tests.integration.agent.player import Player, Wire, settle, welcomed
from tests.unit.exchange.world import World

NONE = SlotCounts(free=0, lent=0, landed=0, quarantined=0)
TABLE = list(range(64))


def slots_of(running: AgentProcess) -> tuple[SlotCounts, SlotCounts]:
    status = running.status
    return status.receive_slots, status.send_slots


def slacks_of(running: AgentProcess) -> list[int]:
    """By how many ns each thread's sleep may be late."""
    threads = sorted(Path(f"/proc/{running.process.pid}/task").iterdir())
    return [int(Path(f"/proc/{thread.name}/timerslack_ns").read_text()) for thread in threads]


@pytest.fixture
def three(bench_of: Benches, tmp_path: Path, stack: ExitStack) -> dict[str, OracleEngine]:
    """A sender that is read, one that shares no memory, and a receiver."""
    shape = Shape("nhd", blocks=64)
    bench = bench_of(shape, shape, slot_bytes=4 << 20)
    running = stack.enter_context(agent(tmp_path, "private", slot_bytes=4 << 20, no_share_memory=True))
    private = stack.enter_context(attached(running, shape))
    return {"read": bench.sender, "receiver": bench.receiver, "private": private}


def is_carried(three: dict[str, OracleEngine], request: str, sender: str) -> bool:
    return isinstance(carry(three[sender], three["receiver"], request, TABLE, TABLE, 1024), Done)


def test_an_agent_that_is_read_or_reads_has_no_slots(three: dict[str, OracleEngine]) -> None:
    assert is_carried(three, "a", "read")
    assert slots_of(three["read"].agent) == slots_of(three["receiver"].agent) == (NONE, NONE)
    for name in ("read", "receiver"):
        assert "made slots" not in three[name].agent.text()
    assert (
        resident_bytes(three["private"].agent.process.pid) - resident_bytes(three["receiver"].agent.process.pid)
        > 40 << 20
    )  # of (8 + 4 + 2) * 4 MiB


def test_a_receiver_that_can_only_be_written_to_makes_slots_and_its_other_sessions_stay(
    three: dict[str, OracleEngine],
) -> None:
    assert is_carried(three, "a", "read")
    assert is_carried(three, "b", "private")
    receive_slots, send_slots = slots_of(three["receiver"].agent)
    assert (receive_slots.free, send_slots.free) == (8, 4)
    assert three["receiver"].agent.text().count("made slots") == 1
    routes = {peer.name: peer.route.split()[0] for peer in three["receiver"].agent.status.peers}
    assert routes == {"p0": "pull", "private": "nixl"}
    assert is_carried(three, "c", "read") and is_carried(three, "d", "private")
    assert (
        three["receiver"].agent.text().count("session open") == 2
        and "session closed" not in three["receiver"].agent.text()
    )
    assert slots_of(three["read"].agent) == (NONE, NONE)
    for name in ("read", "receiver", "private"):  # the data thread, and none of those that its fabric has started
        assert [slack for slack in slacks_of(three[name].agent) if slack < 50_000] == [TIMER_SLACK_NS]


@pytest.mark.parametrize(("side", "name"), [("p", "sender"), ("d", "receiver")])
def test_both_agents_name_the_side_and_the_option_for_which_nothing_is_read(
    bench_of: Benches, side: str, name: str
) -> None:
    bench = bench_of(**{side: {"no_share_memory": True}})
    bench.works("a")
    for engine in bench.engines:
        (peer,) = engine.agent.status.peers
        assert peer.route_name == "nixl" and f"pull: share_memory: off at the {name}" in peer.route, peer.route


def test_a_sender_makes_slots_for_a_receiver_that_does_not_read(bench_of: Benches) -> None:
    bench = bench_of(d={"routes": "nixl"})
    assert slots_of(bench.sender.agent) == (NONE, NONE)
    bench.works("a")
    wait_for(lambda: [each.free for each in slots_of(bench.sender.agent)] == [8, 4])  # its write may end after the want


def test_slots_that_no_staging_can_have_are_refused_at_the_start() -> None:
    with pytest.raises(OperatorError, match="slot_bytes"):
        open_resources(AgentConfig(socket=Path("/run/none"), device="cpu", slot_bytes=65537), "incarnation")


@pytest.mark.parametrize("routes", [("pull", "nixl"), ("nixl",)])
def test_a_gpu_has_room_for_fills_whatever_its_routes(
    routes: tuple[Route, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fill reads zeros as a pull reads rows, and waits for room."""
    for name in ("torch", "driver", "Compiler"):
        monkeypatch.setattr(copier_gpu, name, MagicMock())
    bundles = lambda copier, count: copier._bundles.extend(MagicMock() for _ in range(count))  # noqa: E731
    monkeypatch.setattr(copier_gpu.GpuBlockCopier, "_make_bundles", bundles)
    config = AgentConfig(socket=Path("/run/none"), device="cuda", routes=routes)
    copier = _copier(MagicMock(), ROOM_ON_GPU, config)
    assert isinstance(copier, copier_gpu.GpuBlockCopier) and copier.has_room
    copier.make_room(ROOM_ON_GPU.receive_slots + ROOM_ON_GPU.send_slots)
    assert copier.has_room
    assert copier._has_pulls is ("pull" in routes), "digests are compiled for nobody"


# Both sides of the choice, by their cards:


def site(routes: str, slots: int = 4, machine: str = "one") -> Site:
    card = World().senders[0].engine.site.fabric
    return Site(replace_struct(card, slots=slots), routes=tuple(routes.split(",")), machine=machine, shares_memory=True)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_read", "is_written"),
    [
        (site("pull,nixl", 0), site("pull,nixl", 0), True, True),
        (site("pull,nixl", 0), site("pull,nixl", 0, "another"), False, True),
        (site("pull,nixl", 0), site("nixl", 4), False, True),
        (site("pull", 0), site("pull", 0, "another"), False, False),
        (site("pull", 0), site("nixl", 4), False, False),
        (site("nixl,pull", 4), site("pull,nixl", 0), False, True),  # nobody can tell yet whether what we prefer works
        (site("host,pull", 4), site("pull,host", 0), False, True),
        (site("host,pull", 4), site("pull,host", 4), True, False),  # two CPUs: what host is for is nixl there
    ],
)
def test_who_is_read_or_written_to_by_two_cards(ours: Site, theirs: Site, is_read: bool, is_written: bool) -> None:
    assert (to_be_read(ours, theirs) is not None, may_be_written(ours, theirs)) == (is_read, is_written)


def test_a_welcome_that_would_write_where_no_slots_were_named_is_refused(world: World) -> None:
    sender, receiver = world.senders[0].engine, world.receivers[0].engine
    session = answer(hello(receiver), sender)
    assert isinstance(session, Session)
    bare = replace(receiver, site=site("pull,nixl", 0))
    refused = accept(welcome(replace(session, routed=Routed("nixl")), sender), bare)
    assert isinstance(refused, Refuse) and refused.code == "route_mismatch"
    assert isinstance(accept(welcome(replace(session, routed=Routed("pull")), sender), bare), Session)


class Bare(Player):
    """A receiver's side that has no slots until it is told to make some. Making them ends as `outcome` says."""

    def __init__(self, world: World) -> None:
        self.world, self.staged = world, world.receivers[0].engine
        super().__init__(replace(self.staged, site=site("pull,nixl", 0)))
        self.outcome: FabricError | None = None
        self.may_stage = asyncio.Event()
        self.may_stage.set()

    async def stage(self) -> None:
        await self.may_stage.wait()
        if self.outcome is not None:
            raise self.outcome
        self.engine = self.staged

    def say_hello(self) -> Wire:
        wire = self.reach("P0")
        (said,) = wire.said(Hello)
        assert said.fabric.slots == 0
        return wire

    def refuse(self, tasks: asyncio.TaskGroup, wire: Wire) -> None:
        self.peers._take(tasks, wire, "P", Refuse(code="no_slots", reasons=("fabric.slots: 0",)))


@pytest.fixture
def player() -> Bare:
    return Bare(World())


async def test_who_is_told_that_it_names_no_slots_makes_some_and_says_hello_again(player: Bare) -> None:
    player.may_prove.set()
    wire = player.say_hello()
    async with asyncio.TaskGroup() as tasks:
        player.refuse(tasks, wire)
    first, second = wire.said(Hello)
    assert second.fabric.slots > 0 and (second.probe_lane, second.serial) == (first.probe_lane, first.serial)
    await player.peers._welcome(wire, welcomed(player.world, wire))
    assert player.opened_at == ["P0"] and not player.over


async def test_who_is_told_so_although_it_named_slots_gives_up(player: Bare) -> None:
    wire = player.say_hello()
    async with asyncio.TaskGroup() as tasks:
        player.refuse(tasks, wire)
        await settle()
        player.refuse(tasks, wire)
    assert len(wire.said(Hello)) == 2 and player.over == [("P0", "no_slots")]


async def test_slots_that_cannot_be_made_end_the_session_and_no_other(player: Bare) -> None:
    player.outcome = FabricError("no_staging", "staging: no memory")
    wire = player.say_hello()
    async with asyncio.TaskGroup() as tasks:
        player.refuse(tasks, wire)
    assert len(wire.said(Hello)) == 1 and player.over == [("P0", "no_staging")]
    player.outcome = None
    player.peers.outgoing.reach("P0")
    assert len(wire.said(Hello)) == 2


async def test_a_session_that_ends_while_slots_are_made_gets_no_hello_again(player: Bare) -> None:
    player.may_stage.clear()
    wire = player.say_hello()
    async with asyncio.TaskGroup() as tasks:
        player.refuse(tasks, wire)
        await settle()
        player.peers.outgoing.lose(wire, "closed")
        player.may_stage.set()
    assert len(wire.said(Hello)) == 1 and player.over == [("P0", "peer_unreachable")]


class SlotMaking:
    """A data plane whose slots the test makes, and who hears of it."""

    def __init__(self, make: Callable[[], None]) -> None:
        self.made: list[Site] = []
        self.resources = open_resources(
            AgentConfig(socket=Path("/run/none"), device="cpu", slot_bytes=65536), "incarnation"
        )
        real = self.resources._make

        def endpoints(number: int) -> Any:
            make()
            return real(number)

        self.resources._make = endpoints
        self.data_plane = DataPlane(lambda: self.resources, "incarnation", self, 5.0)

    def on_staged(self, site: Site) -> None:
        self.made.append(site)


async def test_slots_are_made_once_and_what_could_not_be_made_is_tried_again() -> None:
    tries: list[int] = []

    def make() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError("no memory")

    equipped = SlotMaking(make)
    data_plane = equipped.data_plane
    await data_plane.start()
    try:
        with pytest.raises(FabricError, match="no memory") as error:
            await data_plane.stage()
        assert error.value.code == "no_staging" and not data_plane.site.has_slots and not equipped.made
        await asyncio.gather(*(data_plane.stage() for _ in range(4)))
        assert len(tries) == 2 and len(equipped.made) == 1 and data_plane.site is equipped.made[0]
        assert data_plane.site.fabric.slots == 32 and data_plane.send_orders.slots.free == 16
        assert data_plane.site.fabric.descriptor and data_plane.site.fabric.slot_bytes == 65536
    finally:
        await data_plane.stop()
