"""Greeting and proving several agents at once, with a real data plane over a fabric whose writes may never end."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from kvbridge_proto.peer import PROBE_LANES, Hello, Refuse, Welcome

from kvbridge.agent.incoming_peers import MOST_GREETINGS, PROOF_TURN_S
from kvbridge.dataplane.attached import Job, WaitWrite
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.dataplane.receive_orders import ReceiveOrders
from kvbridge.exchange.route import Routed
from kvbridge.routes.choice import Connected
from kvbridge.routes.rate import PROBE_S
from kvbridge.routes.slots.jobs import Jobs
from kvbridge.routes.slots.send_orders import SendOrders
from kvbridge.routes.slots.slot_route import Landing
from tests.integration.agent.player import Player, Wire, greeting, joined, replace_struct, settle
from tests.integration.routes.test_routes import Agents
from tests.unit.exchange.world import World


@pytest.fixture
def network(stack: ExitStack) -> Agents:
    """The sender `a` and any number of receivers."""
    return Agents(stack)


@asynccontextmanager
async def proving(network: Agents, world: World) -> Any:
    player = Player(replace(world.senders[0].engine, site=network.sender.site))
    data_plane = DataPlane(lambda: network.sender, "a", player, 1.0)
    await data_plane.start()
    player.peers = joined(player, data_plane, 5.0)
    try:
        yield player
    finally:
        await data_plane.stop()


def hello_of(network: Agents, world: World, incarnation: str) -> Hello:
    site = network.resources(incarnation).site
    return replace_struct(greeting(world, incarnation), fabric=site.fabric, host=site.host, device=site.device)


@pytest.mark.proves("T22")
async def test_receivers_that_cannot_be_written_to_keep_no_newcomer_out(network: Agents, world: World) -> None:
    async with proving(network, world) as player, asyncio.TaskGroup() as tasks:
        dead = [Wire(f"dead{number}") for number in range(5)]
        for wire in dead:
            network.network.stall(wire.address)
            player.peers._take(tasks, wire, wire.address, hello_of(network, world, wire.address))
        await settle()
        began, newcomer = time.monotonic(), Wire("newcomer")
        player.peers._take(tasks, newcomer, "newcomer", hello_of(network, world, "newcomer"))
        while not newcomer.sent:  # noqa: ASYNC110 - the data plane's thread answers
            await asyncio.sleep(0.005)
        assert newcomer.said(Welcome)
        assert not any(wire.sent for wire in dead), "it came in while they were being tried"
        while not all(wire.sent for wire in dead):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < 2 * PROBE_S, "each of them has its own bound, from its own beginning"
        assert [refusal.code for wire in dead for refusal in wire.said(Refuse)] == ["no_route"] * 5


def resumed(network: Agents, job: Job) -> WaitWrite | None:
    """A proof up to its next write; None at its end. The event of the one before is its due."""
    try:
        wait = next(job)
    except StopIteration:
        return None
    assert isinstance(wait, WaitWrite)
    return wait


def test_a_proof_that_takes_long_shares_its_lane_with_none_of_those_that_come_meanwhile(network: Agents) -> None:
    heard: list[Any] = []
    jobs = Jobs(network.sender, "a", SendOrders(0), ReceiveOrders(), 1.0)
    slow = network.resources("slow")
    network.network.stall("slow")
    first = jobs.connect(Landing("slow", slow.site, 3), lambda found, error: heard.append(found or error))
    held = resumed(network, first)
    assert held is not None
    quick = network.resources("quick")
    for _ in range(PROBE_LANES):
        job = jobs.connect(Landing("quick", quick.site, 5), lambda found, error: heard.append(found or error))
        wait = resumed(network, job)
        while wait is not None:
            (ended,) = [event for event in wait.fabric.poll(0.0) if event.id == wait.id]
            try:
                wait = job.send(ended)
            except StopIteration:
                wait = None
    assert len(heard) == PROBE_LANES and all(isinstance(each, Connected) for each in heard)
    network.network.resume("slow")
    wait = held
    try:
        while True:
            (ended,) = wait.fabric.poll(0.0)
            wait = first.send(ended)
    except StopIteration:
        pass
    routed: Routed = heard[-1].routed
    assert Jobs(slow, "slow", SendOrders(0), ReceiveOrders(), 1.0).is_proved(routed.route, 3, routed.probe)
    assert len(network.sender.endpoint.source.lanes) == PROBE_LANES, "all were given back"


async def test_two_hellos_of_one_agent_are_answered_one_after_the_other(world: World, sender: Player) -> None:
    wires = [Wire("D0", peer_incarnation="D"), Wire("D0", peer_incarnation="D"), Wire("E0", peer_incarnation="E")]
    async with asyncio.TaskGroup() as tasks:
        for number, wire in enumerate(wires):
            said = replace_struct(greeting(world, wire.peer_incarnation), serial=number)
            sender.peers._take(tasks, wire, wire.peer_incarnation, said)
        await asyncio.sleep(3 * PROOF_TURN_S)
        assert [landing.incarnation for landing in sender.proving] == ["D", "E"]
        sender.may_prove.set()
    assert [landing.incarnation for landing in sender.proving] == ["D", "E", "D"]
    assert all(wire.said(Welcome) for wire in wires)
    assert {incarnation for incarnation, _ in sender.disconnected} <= {"D"} and len(sender.peers.statuses()) == 2


def test_proofs_of_all_who_are_greeted_have_a_lane_each() -> None:
    assert MOST_GREETINGS <= PROBE_LANES
