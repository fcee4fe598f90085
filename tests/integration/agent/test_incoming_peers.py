"""The agents that fetch from ours: floods of Hellos, goodbyes during a proof, borrowed incarnations, proofs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from kvbridge_proto.common import Rank
from kvbridge_proto.peer import PROBE_LANES, Cancel, Drained, Goodbye, Grant, Hello, Refuse, Settled, SlotLease, Welcome

from kvbridge.agent.peers import MOST_HELLOS, PROOF_TURN_S
from kvbridge.dataplane.attached import Job, WaitWrite
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.dataplane.orders import ReceiveOrders, SendOrders
from kvbridge.errors import FabricError
from kvbridge.exchange.route import Routed
from kvbridge.routes import choice
from kvbridge.routes.choice import Connected
from kvbridge.routes.slots.jobs import Jobs
from kvbridge.routes.slots.slot_routes import Landing
from tests.integration.agent.player import Player, Wire, hello_from, joined, met, replace_struct, settle, welcomed
from tests.integration.fuzz.agents import CLAIM
from tests.integration.routes.test_routes import Agents
from tests.unit.exchange.world import World

# The receiver's lanes:


async def test_two_proofs_never_share_a_lane_and_the_others_wait_their_turn(world: World, receiver: Player) -> None:
    addresses = [f"P{number}" for number in range(PROBE_LANES + 6)]
    for address in addresses:
        receiver.peers.outgoing.reach(address)
    asked = [wire for wire in receiver.wires.values() if wire.said(Hello)]
    assert len(asked) == PROBE_LANES
    assert len({wire.sent[0].probe_lane for wire in asked}) == PROBE_LANES
    receiver.may_prove.set()
    await receiver.peers._welcome(asked[5], welcomed(world, asked[5]))  # proved: its lane is free
    receiver.peers._lose(asked[9], "gone")  # lost: its lane is free
    receiver.peers._on_message(asked[11], "incarnation", Goodbye(reason="x"))
    receiver.peers._on_message(asked[12], "incarnation", Refuse(code="no_engine", reasons=()))
    later = [receiver.wires[address] for address in addresses[PROBE_LANES:]]
    lanes = [wire.said(Hello)[0].probe_lane for wire in later if wire.said(Hello)]
    assert lanes == [asked[i].sent[0].probe_lane for i in (5, 9, 11, 12)]
    assert receiver.opened_at == ["P5"]


@pytest.mark.proves("T5")
async def test_who_is_not_reached_takes_no_lane_from_others(receiver: Player) -> None:
    made_up = [receiver.dial(f"M{number}") for number in range(PROBE_LANES + 1)]
    for wire in made_up:
        wire.is_up = False
        receiver.peers.outgoing.reach(wire.address)
    assert receiver.reach("P0").said(Hello) and not any(wire.sent for wire in made_up)
    made_up[0].is_up = True
    receiver.peers.outgoing.reached(made_up[0])
    assert made_up[0].said(Hello)
    await asyncio.sleep(0.3)
    receiver.peers.outgoing.tick(time.monotonic())
    assert len(receiver.over) == PROBE_LANES + 2, "nobody is waited for without end"


async def test_who_waits_for_a_lane_is_told_in_time(receiver: Player) -> None:
    for number in range(PROBE_LANES + 2):
        receiver.peers.outgoing.reach(f"P{number}")
    await asyncio.sleep(0.3)
    receiver.peers.outgoing.tick(asyncio.get_running_loop().time())
    assert {code for _, code in receiver.over} == {"peer_unreachable"}
    first = {address for address, _ in receiver.over}
    assert {f"P{number}" for number in range(PROBE_LANES)} <= first
    await asyncio.sleep(0.3)
    receiver.peers.outgoing.tick(asyncio.get_running_loop().time())
    assert len(receiver.over) == PROBE_LANES + 2  # once each, and all of them
    assert receiver.reach("again").said(Hello)


async def test_what_we_stood_still_for_is_not_counted_against_others(receiver: Player) -> None:
    outgoing = receiver.peers.outgoing
    outgoing._clock = lambda: 10.0
    outgoing.reach("P0")  # connect_s is 0.2
    outgoing.tick(10.15)
    outgoing.tick(18.0, late_s=7.82)
    assert not receiver.over
    outgoing.tick(18.1)
    assert receiver.over == [("P0", "peer_unreachable")]


async def test_whose_time_is_over_is_told_whether_the_sender_or_the_proof_was_late(
    world: World, receiver: Player
) -> None:
    receiver.peers.outgoing.reach("silent")
    receiver.peers.outgoing.reach("slow")
    proving = asyncio.create_task(
        receiver.peers._welcome(receiver.wires["slow"], welcomed(world, receiver.wires["slow"]))
    )
    await settle()
    receiver.peers.outgoing.tick(time.monotonic() + 1.0)
    assert receiver.over == [("silent", "peer_unreachable"), ("slow", "peer_unreachable")]
    assert receiver.reasons == [
        "connect_s: no Welcome from silent in 0.2 s",
        "connect_s: no proof of the route to slow in 0.2 s",
    ]
    receiver.may_prove.set()
    await proving
    assert not receiver.opened_at


async def test_an_engine_that_leaves_gives_all_lanes_back(receiver: Player) -> None:
    for turn in range(3):
        for number in range(PROBE_LANES + 3):
            receiver.peers.outgoing.reach(f"P{turn}-{number}")
        receiver.peers.end_all("the engine left")
        assert not receiver.peers.outgoing._without_lane
    assert receiver.reach("last").said(Hello)


async def test_a_sender_keeps_no_session_that_its_receiver_gave_up(world: World, receiver: Player) -> None:
    """It may answer a Hello that crossed its Goodbye, and a refused Welcome is an open session to it."""
    receiver.may_prove.set()
    receiver.reach("left", "refused")
    left, refused = receiver.wires["left"], receiver.wires["refused"]
    receiver.peers._on_message(left, "incarnation", Goodbye(reason="sent before it heard our Hello"))
    assert [type(body) for body in left.sent] == [Hello, Goodbye]
    said = welcomed(world, refused)
    refused.peer_incarnation = "another"
    await receiver.peers._welcome(refused, said)
    assert refused.said(Goodbye) and ("refused", "bad_welcome") in receiver.over


async def test_a_flood_of_welcomes_is_looked_at_once(world: World, receiver: Player) -> None:
    receiver.peers.outgoing.reach("P0")
    said = welcomed(world, receiver.wires["P0"])
    waiting = [asyncio.create_task(receiver.peers._welcome(receiver.wires["P0"], said)) for _ in range(1000)]
    await settle()
    assert len(receiver.checked) == 1
    receiver.may_prove.set()
    await asyncio.gather(*waiting)
    assert receiver.opened_at == ["P0"]


# The sender's hellos:


@pytest.mark.proves("T22")
async def test_a_flood_of_hellos_costs_one_proof_a_link_and_a_bounded_number_in_all(
    world: World, sender: Player
) -> None:
    async with asyncio.TaskGroup() as tasks:
        loud = Wire("loud")
        for _ in range(1000):
            sender.peers._take(tasks, loud, "D-loud", hello_from(world, "D-loud"))
        assert [refusal.code for refusal in loud.said(Refuse)] == ["busy"] * 999
        others = [Wire(f"other{number}") for number in range(MOST_HELLOS + 5)]
        for number, wire in enumerate(others):
            sender.peers._take(tasks, wire, f"D{number}", hello_from(world, f"D{number}"))
        assert [len(wire.said(Refuse)) for wire in others] == [0] * (MOST_HELLOS - 1) + [1] * 6
        await settle()
        assert 1 <= len(sender.proving) < MOST_HELLOS  # alone, while it may be quick
        while len(sender.proving) < MOST_HELLOS:  # noqa: ASYNC110 - each gets its turn
            await asyncio.sleep(PROOF_TURN_S)
        sender.may_prove.set()
    assert len(sender.proving) == MOST_HELLOS
    assert all(wire.said(Welcome) for wire in [loud, *others[: MOST_HELLOS - 1]])
    await sender.takes(others[-1], hello_from(world, "late"))
    assert others[-1].said(Welcome)


async def during_a_proof(world: World, happens: Callable[[Player, Wire], None]) -> tuple[Player, Wire]:
    player, wire = Player(world.senders[0].engine), Wire("D0")
    async with asyncio.TaskGroup() as tasks:
        player.peers._take(tasks, wire, "D", hello_from(world, "D"))
        await settle()
        assert len(player.proving) == 1
        happens(player, wire)
        player.may_prove.set()
    return player, wire


@pytest.mark.proves("T23")
async def test_a_goodbye_during_a_proof_leaves_nothing_behind(world: World) -> None:
    player, wire = await during_a_proof(world, lambda p, w: p.peers._on_message(w, "D", Goodbye(reason="never mind")))
    assert player.peers.statuses() == [] and player.disconnected == [("D", 1)]
    assert wire.sent == []
    await player.takes(wire, hello_from(world, "D"))  # it may come again
    assert len(player.peers.statuses()) == 1 and wire.said(Welcome)


async def test_a_link_lost_during_a_proof_leaves_nothing_behind(world: World) -> None:
    def lose(player: Player, wire: Wire) -> None:
        wire.is_lost = True
        player.peers._lose(wire, "gone")

    player, wire = await during_a_proof(world, lose)
    assert player.peers.statuses() == [] and player.disconnected == [("D", 1)] and not wire.said(Welcome)


async def test_nothing_goes_out_of_a_session_while_another_link_proves_slots_in_its_place(world: World) -> None:
    """Its receiver may have made them anew: a chunk that goes to what was just proved has a lease of other slots."""
    player, _ = await met(world)
    player.may_prove.clear()
    async with asyncio.TaskGroup() as tasks:
        player.peers._take(tasks, Wire("D0 again", peer_incarnation="D"), "D", hello_from(world, "D"))
        await settle()
        assert len(player.proving) == 2 and player.heard == [("D", "lost")]
        player.may_prove.set()


async def test_an_engine_that_leaves_during_a_proof_leaves_nothing_behind(world: World) -> None:
    player, wire = await during_a_proof(world, lambda p, w: setattr(p, "engine", None))
    assert player.peers.statuses() == [] and player.disconnected == [("D", 1)]
    assert [refusal.code for refusal in wire.said(Refuse)] == ["no_engine"]


# Borrowed incarnations:


@pytest.mark.proves("T18")
async def test_another_key_cannot_take_over_a_incarnation(world: World) -> None:
    player, _ = await met(world, "key of D")
    thief = Wire("elsewhere", "key of E", "D")
    await player.takes(thief, hello_from(world, "D"))
    assert [refusal.code for refusal in thief.said(Refuse)] == ["incarnation_of_another_key"]
    assert player.heard == [] and player.disconnected == [] and len(player.proving) == 1
    again = Wire("D0 on another connection", "key of D", "D")
    await player.takes(again, hello_from(world, "D"))
    assert again.said(Welcome) and set(player.heard) == {("D", "lost")}


@pytest.mark.proves("T18")
async def test_another_link_that_says_our_receivers_incarnation_is_not_our_receiver(world: World) -> None:
    player, honest = await met(world)
    thief = Wire("elsewhere", peer_incarnation="D")
    player.peers._on_message(thief, "D", replace_struct(CLAIM, transfer="stolen"))
    player.peers._on_message(thief, "D", Cancel(transfer="t", code="c"))
    player.peers._on_message(thief, "D", Grant(transfer="t", leases=(SlotLease(0, 1),)))
    player.peers._on_message(thief, "D", Goodbye(reason="not mine to say"))
    assert player.heard == [] and len(player.peers.statuses()) == 1
    assert [refusal.code for refusal in thief.said(Refuse)] == ["no_session"]
    player.peers._on_message(honest, "D", replace_struct(CLAIM, transfer="own"))
    assert [(incarnation, body.transfer) for incarnation, body in player.heard] == [("D", "own")]


# What changes between a Hello and its answer:


@pytest.mark.parametrize(("change", "opened"), [("more ranks", ["P0"]), ("another engine", []), ("another lane", [])])
async def test_a_session_opens_for_the_engine_and_the_hello_that_it_was_asked_for(
    world: World, receiver: Player, change: str, opened: list[str]
) -> None:
    wire = receiver.reach("P0")
    said = welcomed(world, wire)
    if change == "another lane":
        said = replace_struct(said, probe=replace_struct(said.probe, lane=said.probe.lane + 1))
    waiting = asyncio.create_task(receiver.peers._welcome(wire, said))
    await settle()
    if change == "more ranks":
        ranks = (*receiver.engine.ranks, Rank(tp_rank=1, pp_rank=0, address="D1"))
        receiver.engine = replace(receiver.engine, ranks=ranks)
    elif change == "another engine":
        receiver.engine = replace(receiver.engine, epoch=2)
    receiver.may_prove.set()
    await waiting
    assert (receiver.opened_at, receiver.over, wire.is_lost) == (opened, [], False)


def test_an_agent_without_an_engine_leaves_no_half_session_behind(receiver: Player) -> None:
    """Else nobody would say hello at that address once there is an engine: its wants would wait for nothing."""
    engine, receiver.engine = receiver.engine, None
    receiver.peers.outgoing.reach("P0")
    assert receiver.over == [("P0", "not_attached")] and not receiver.wires
    receiver.engine = engine
    assert receiver.reach("P0").said(Hello)


# A receiver that dials several of our addresses: one session, over the latest connection:


async def says_hello(
    player: Player, world: World, wire: Wire, address: str = "", serial: int = 0, lane: int = 0, oldest: int = 0
) -> None:
    said = replace_struct(hello_from(world, "D"), address=address, serial=serial, probe_lane=lane, oldest=oldest)
    await player.takes(wire, said)


def codes(wire: Wire) -> list[str]:
    return [refusal.code for refusal in wire.said(Refuse)]


async def test_a_receiver_that_has_a_session_by_another_address_is_told_so_and_keeps_it(world: World) -> None:
    player, first = await met(world)
    other = Wire("D0 again", peer_incarnation="D")
    await says_hello(player, world, other, address="tcp://also:1", serial=1)
    assert codes(other) == ["already_open"] and not other.said(Welcome)
    assert player.heard == [] and player.disconnected == [] and len(player.proving) == 1
    player.peers._on_message(first, "D", Settled(transfer="t"))
    assert len(player.heard) == 1


async def test_a_receiver_whose_first_connection_is_lost_may_come_by_another_address(world: World) -> None:
    player, first = await met(world)
    first.is_lost = True
    other = Wire("D0 again", peer_incarnation="D")
    await says_hello(player, world, other, address="tcp://also:1", serial=1)
    assert other.said(Welcome) and set(player.heard) == {("D", "lost")}


async def test_a_connection_that_its_receiver_has_given_up_keeps_nobody_out(world: World) -> None:
    player, _ = await met(world)  # serial 0; we have not heard yet that it is no more
    other = Wire("D0 again", peer_incarnation="D")
    await says_hello(player, world, other, address="tcp://also:1", serial=2, oldest=1)
    assert other.said(Welcome) and set(player.heard) == {("D", "lost")}


async def test_of_two_addresses_the_slower_is_told_of_the_other_whichever_was_dialled_first(
    world: World, sender: Player
) -> None:
    sender.may_prove.set()
    fast, slow = Wire("D0", peer_incarnation="D"), Wire("D0 again", peer_incarnation="D")
    await says_hello(sender, world, fast, address="tcp://a:1", serial=2, oldest=1)
    await says_hello(sender, world, slow, address="tcp://b:1", serial=1, oldest=1)
    assert fast.said(Welcome) and codes(slow) == ["already_open"]


async def test_who_asks_by_another_link_is_not_told_that_a_claim_is_over_that_may_be_on_its_way(world: World) -> None:
    player, first = await met(world)
    player.drained = True
    other = Wire("D0 again", peer_incarnation="D")
    player.peers._on_message(other, "D", Cancel(transfer="t", code=""))
    assert not other.sent
    player.peers._on_message(other, "D", Cancel(transfer="t", code="", incarnation="dead"))
    assert other.sent == [Drained(transfer="t")]
    player.peers._lose(first, "gone")
    player.peers._on_message(other, "D", Cancel(transfer="u", code=""))
    assert other.sent[1:] == [Drained(transfer="u")]


async def test_a_hello_after_a_goodbye_takes_the_place_of_the_one_that_is_being_proved(
    world: World, sender: Player
) -> None:
    wire = Wire("D0", peer_incarnation="D")
    async with asyncio.TaskGroup() as tasks:
        sender.peers._take(tasks, wire, "D", replace_struct(hello_from(world, "D"), serial=1))
        await settle()
        sender.peers._take(tasks, wire, "D", Goodbye(reason="other slots"))
        sender.peers._take(tasks, wire, "D", replace_struct(hello_from(world, "D"), serial=1, probe_lane=3))
        sender.peers._take(tasks, wire, "D", replace_struct(hello_from(world, "D"), serial=1, probe_lane=4))
        assert codes(wire) == ["busy"]
        sender.may_prove.set()
    assert [landing.lane for landing in sender.proving] == [0, 3] and sender.disconnected == [("D", 1)]
    assert len(wire.said(Welcome)) == 1 and len(sender.peers.statuses()) == 1
    assert not sender.peers.incoming._hellos_by


async def test_a_hello_of_a_connection_that_was_given_up_comes_too_late(world: World) -> None:
    """It would take over the session of the connection that its receiver has made since; nobody would answer there."""
    player, old = await met(world)
    new = Wire("D0 again", peer_incarnation="D")
    await says_hello(player, world, new, serial=2)
    assert new.said(Welcome) and set(player.heard) == {("D", "lost")}
    await says_hello(player, world, old, serial=1)
    player.peers._on_message(old, "D", Goodbye(reason="given up"))
    player.peers._lose(old, "given up")
    assert codes(old) == ["stale_hello"] and len(player.peers.statuses()) == 1
    player.peers._on_message(new, "D", Settled(transfer="t"))
    assert player.heard[-1] == ("D", Settled(transfer="t"))
    assert player.disconnected == [("D", 1)], "only the route of before, when the new connection took over"


async def test_a_session_whose_route_was_given_up_for_one_that_cannot_be_had_is_over(world: World) -> None:
    player, wire = await met(world)

    async def connect(landing: Landing) -> None:
        raise FabricError("no_route", "test")

    player.connect = connect
    await says_hello(player, world, wire, lane=1)
    assert codes(wire) == ["no_route"] and wire.said(Goodbye)
    assert player.peers.statuses() == [] and player.heard == [("D", "lost")] and player.disconnected == [("D", 1)]


# Several proofs at once, with a real data plane over a fabric whose writes may never end:


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
    return replace_struct(hello_from(world, incarnation), fabric=site.fabric, host=site.host, device=site.device)


@pytest.mark.proves("T22")
@pytest.mark.parametrize("probe_s", [0.1, 600.0], ids=["given up", "tried all the while"])
async def test_receivers_that_cannot_be_written_to_keep_no_newcomer_out(
    probe_s: float, network: Agents, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has its own bound, and none waits for another's."""
    monkeypatch.setattr(choice, "PROBE_S", probe_s)
    async with asyncio.timeout(60), proving(network, world) as player, asyncio.TaskGroup() as tasks:
        dead = [Wire(f"dead{number}") for number in range(5)]
        for wire in dead:
            network.network.stall(wire.address)
            player.peers._take(tasks, wire, wire.address, hello_of(network, world, wire.address))
        await settle()
        newcomer = Wire("newcomer")
        player.peers._take(tasks, newcomer, "newcomer", hello_of(network, world, "newcomer"))
        while not newcomer.sent:  # noqa: ASYNC110 - the data plane's thread answers
            await asyncio.sleep(0.005)
        assert newcomer.said(Welcome)
        if is_patient := probe_s > 60:
            assert not any(wire.sent for wire in dead), "it came in while they were being tried"
            network.network.stalled.clear()
        while not all(wire.sent for wire in dead):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        refused = [refusal.code for wire in dead for refusal in wire.said(Refuse)]
        assert refused == ([] if is_patient else ["no_route"] * 5)


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
            said = replace_struct(hello_from(world, wire.peer_incarnation), serial=number)
            sender.peers._take(tasks, wire, wire.peer_incarnation, said)
        await asyncio.sleep(3 * PROOF_TURN_S)
        assert [landing.incarnation for landing in sender.proving] == ["D", "E"]
        sender.may_prove.set()
    assert [landing.incarnation for landing in sender.proving] == ["D", "E", "D"]
    assert all(wire.said(Welcome) for wire in wires)
    assert {incarnation for incarnation, _ in sender.disconnected} <= {"D"} and len(sender.peers.statuses()) == 2


def test_proofs_of_all_who_are_told_hello_have_a_lane_each() -> None:
    assert MOST_HELLOS <= PROBE_LANES
