"""Many greetings, and hostile ones: lanes, floods of Hellos, goodbyes during a proof, borrowed incarnations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvbridge_proto.peer import PROBE_LANES, Cancel, Claim, Goodbye, Hello, Refuse, Welcome

from kvbridge.agent.incoming_peers import MOST_GREETINGS, TURN_S
from tests.integration.agent.player import Player, greeting, met, run, settle, welcomed
from tests.integration.agent.wire import Wire
from tests.unit.exchange.world import World


def claim(transfer: str) -> Claim:
    return Claim(
        transfer=transfer,
        want="w",
        receiver=0,
        receivers=1,
        rendezvous="r",
        sender_epoch=1,
        receiver_epoch=1,
        first_token=0,
        end_token=4,
        takes=(),
        plan="",
        token=b"t" * 16,
        leases=(),
        deadline_s=1.0,
    )


# The receiver's lanes:


def test_two_proofs_never_share_a_lane_and_the_others_wait_their_turn() -> None:
    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        addresses = [f"P{number}" for number in range(PROBE_LANES + 6)]
        for address in addresses:
            player.peers.outgoing.reach(address)
        asked = [wire for wire in player.wires.values() if wire.said(Hello)]
        assert len(asked) == PROBE_LANES
        assert len({wire.sent[0].probe_lane for wire in asked}) == PROBE_LANES
        player.may_prove.set()
        await player.peers._welcome(asked[5], welcomed(world, asked[5]))  # proved: its lane is free
        player.peers._lose(asked[9], "gone")  # lost: its lane is free
        player.peers._hear(asked[11], "incarnation", Goodbye(reason="x"))
        player.peers._hear(asked[12], "incarnation", Refuse(code="no_engine", reasons=()))
        later = [player.wires[address] for address in addresses[PROBE_LANES:]]
        lanes = [wire.said(Hello)[0].probe_lane for wire in later if wire.said(Hello)]
        assert lanes == [asked[i].sent[0].probe_lane for i in (5, 9, 11, 12)]
        assert player.opened_at == ["P5"]

    run(story)


def test_who_is_not_reached_takes_no_lane_from_others() -> None:
    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        made_up = [player.dial(f"M{number}") for number in range(PROBE_LANES + 1)]
        for wire in made_up:
            wire.is_up = False
            player.peers.outgoing.reach(wire.address)
        player.peers.outgoing.reach("P0")
        assert player.wires["P0"].said(Hello) and not any(wire.sent for wire in made_up)
        made_up[0].is_up = True
        player.peers.outgoing.reached(made_up[0])
        assert made_up[0].said(Hello)
        await asyncio.sleep(0.3)
        player.peers.outgoing.tick(time.monotonic())
        assert len(player.over) == PROBE_LANES + 2, "nobody is waited for without end"

    run(story)


def test_who_waits_for_a_lane_is_told_in_time() -> None:
    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        for number in range(PROBE_LANES + 2):
            player.peers.outgoing.reach(f"P{number}")
        await asyncio.sleep(0.3)
        player.peers.outgoing.tick(asyncio.get_running_loop().time())
        assert {code for _, code in player.over} == {"peer_unreachable"}
        first = {address for address, _ in player.over}
        assert {f"P{number}" for number in range(PROBE_LANES)} <= first
        await asyncio.sleep(0.3)
        player.peers.outgoing.tick(asyncio.get_running_loop().time())
        assert len(player.over) == PROBE_LANES + 2  # once each, and all of them
        player.peers.outgoing.reach("again")
        assert player.wires["again"].said(Hello)

    run(story)


def test_what_we_stood_still_for_is_not_counted_against_others() -> None:
    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        outgoing, now = player.peers.outgoing, time.monotonic()
        outgoing.reach("P0")  # connect_s is 0.2
        outgoing.tick(now + 0.15)
        outgoing.tick(now + 8.0, late_s=7.8)
        assert not player.over
        outgoing.tick(now + 8.1)
        assert player.over == [("P0", "peer_unreachable")]

    run(story)


def test_an_engine_that_leaves_gives_all_lanes_back() -> None:
    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        for turn in range(3):
            for number in range(PROBE_LANES + 3):
                player.peers.outgoing.reach(f"P{turn}-{number}")
            player.peers.end_all("the engine left")
            assert not player.peers.outgoing._without_lane
        player.peers.outgoing.reach("last")
        assert player.wires["last"].said(Hello)

    run(story)


def test_a_sender_keeps_no_session_that_its_receiver_gave_up() -> None:
    """It may answer a Hello that crossed its Goodbye, and a refused Welcome is an open session to it."""

    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        player.may_prove.set()
        for address in ("left", "refused"):
            player.peers.outgoing.reach(address)
        left, refused = player.wires["left"], player.wires["refused"]
        player.peers._hear(left, "incarnation", Goodbye(reason="sent before it heard our Hello"))
        assert [type(body) for body in left.sent] == [Hello, Goodbye]
        said = welcomed(world, refused)
        refused.peer_incarnation = "another"
        await player.peers._welcome(refused, said)
        assert refused.said(Goodbye) and ("refused", "bad_welcome") in player.over

    run(story)


def test_a_flood_of_welcomes_is_looked_at_once() -> None:
    async def story(world: World) -> None:
        player = Player(world.receivers[0].engine)
        player.peers.outgoing.reach("P0")
        said = welcomed(world, player.wires["P0"])
        waiting = [asyncio.create_task(player.peers._welcome(player.wires["P0"], said)) for _ in range(1000)]
        await settle()
        assert len(player.checked) == 1
        player.may_prove.set()
        await asyncio.gather(*waiting)
        assert player.opened_at == ["P0"]

    run(story)


# The sender's greetings:


def test_a_flood_of_hellos_costs_one_proof_a_link_and_a_bounded_number_in_all() -> None:
    async def story(world: World) -> None:
        player = Player(world.senders[0].engine)
        async with asyncio.TaskGroup() as tasks:
            loud = Wire("loud")
            for _ in range(1000):
                player.peers._take(tasks, loud, "D-loud", greeting(world, "D-loud"))
            assert [refusal.code for refusal in loud.said(Refuse)] == ["busy"] * 999
            others = [Wire(f"other{number}") for number in range(MOST_GREETINGS + 5)]
            for number, wire in enumerate(others):
                player.peers._take(tasks, wire, f"D{number}", greeting(world, f"D{number}"))
            assert [len(wire.said(Refuse)) for wire in others] == [0] * (MOST_GREETINGS - 1) + [1] * 6
            await settle()
            assert 1 <= len(player.proving) < MOST_GREETINGS  # alone, while it may be quick
            while len(player.proving) < MOST_GREETINGS:  # noqa: ASYNC110 - each gets its turn
                await asyncio.sleep(TURN_S)
            player.may_prove.set()
        assert len(player.proving) == MOST_GREETINGS
        assert all(wire.said(Welcome) for wire in [loud, *others[: MOST_GREETINGS - 1]])
        async with asyncio.TaskGroup() as tasks:
            player.peers._take(tasks, others[-1], "late", greeting(world, "late"))
        assert others[-1].said(Welcome)

    run(story)


async def during_a_proof(world: World, happens: Callable[[Player, Wire], None]) -> tuple[Player, Wire]:
    player, wire = Player(world.senders[0].engine), Wire("D0")
    async with asyncio.TaskGroup() as tasks:
        player.peers._take(tasks, wire, "D", greeting(world, "D"))
        await settle()
        assert len(player.proving) == 1
        happens(player, wire)
        player.may_prove.set()
    return player, wire


def test_a_goodbye_during_a_proof_leaves_nothing_behind() -> None:
    async def story(world: World) -> None:
        player, wire = await during_a_proof(world, lambda p, w: p.peers._hear(w, "D", Goodbye(reason="never mind")))
        assert player.peers.statuses() == [] and player.disconnected == [("D", 1)]
        assert wire.sent == []
        async with asyncio.TaskGroup() as tasks:  # and it may come again
            player.peers._take(tasks, wire, "D", greeting(world, "D"))
        assert len(player.peers.statuses()) == 1 and wire.said(Welcome)

    run(story)


def test_a_link_lost_during_a_proof_leaves_nothing_behind() -> None:
    async def story(world: World) -> None:
        def lose(player: Player, wire: Wire) -> None:
            wire.is_lost = True
            player.peers._lose(wire, "gone")

        player, wire = await during_a_proof(world, lose)
        assert player.peers.statuses() == [] and player.disconnected == [("D", 1)] and not wire.said(Welcome)

    run(story)


def test_nothing_goes_out_of_a_session_while_another_link_proves_slots_in_its_place() -> None:
    """Its receiver may have made them anew: a chunk that goes to what was just proved has a lease of other slots."""

    async def story(world: World) -> None:
        player, _ = await met(world)
        player.may_prove.clear()
        async with asyncio.TaskGroup() as tasks:
            player.peers._take(tasks, Wire("D0 again", peer_incarnation="D"), "D", greeting(world, "D"))
            await settle()
            assert len(player.proving) == 2 and player.heard == [("D", "lost")]
            player.may_prove.set()

    run(story)


def test_an_engine_that_leaves_during_a_proof_leaves_nothing_behind() -> None:
    async def story(world: World) -> None:
        player, wire = await during_a_proof(world, lambda p, w: setattr(p, "engine", None))
        assert player.peers.statuses() == [] and player.disconnected == [("D", 1)]
        assert [refusal.code for refusal in wire.said(Refuse)] == ["no_engine"]

    run(story)


# Borrowed incarnations:


def test_another_key_cannot_take_over_a_incarnation() -> None:
    async def story(world: World) -> None:
        player, _ = await met(world, "key of D")
        thief = Wire("elsewhere", "key of E", "D")
        async with asyncio.TaskGroup() as tasks:
            player.peers._take(tasks, thief, "D", greeting(world, "D"))
        assert [refusal.code for refusal in thief.said(Refuse)] == ["incarnation_of_another_key"]
        assert player.heard == [] and player.disconnected == [] and len(player.proving) == 1
        again = Wire("D0 on another connection", "key of D", "D")
        async with asyncio.TaskGroup() as tasks:
            player.peers._take(tasks, again, "D", greeting(world, "D"))
        assert again.said(Welcome) and set(player.heard) == {("D", "lost")}

    run(story)


def test_another_link_that_says_our_receivers_incarnation_is_not_our_receiver() -> None:
    async def story(world: World) -> None:
        player, honest = await met(world)
        thief = Wire("elsewhere", peer_incarnation="D")
        player.peers._hear(thief, "D", claim("stolen"))
        player.peers._hear(thief, "D", Cancel(transfer="t", code="c"))
        player.peers._hear(thief, "D", Goodbye(reason="not mine to say"))
        assert player.heard == [] and len(player.peers.statuses()) == 1
        assert [refusal.code for refusal in thief.said(Refuse)] == ["no_session"]
        player.peers._hear(honest, "D", claim("own"))
        assert [(incarnation, body.transfer) for incarnation, body in player.heard] == [("D", "own")]

    run(story)
