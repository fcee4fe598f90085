"""One receiver that dials several of our addresses: there is one session, over the latest connection."""

from __future__ import annotations

import asyncio

from kvbridge_proto.peer import Cancel, Drained, Goodbye, Refuse, Settled, Welcome

from kvbridge.errors import FabricError
from kvbridge.routes.slots.slot_route import Landing
from tests.integration.agent.player import Player, Wire, greeting, met, replace_struct, settle
from tests.unit.exchange.world import World


async def says_hello(
    player: Player, world: World, wire: Wire, address: str = "", serial: int = 0, lane: int = 0, oldest: int = 0
) -> None:
    said = replace_struct(greeting(world, "D"), address=address, serial=serial, probe_lane=lane, oldest=oldest)
    await player.takes(wire, said)


def codes(wire: Wire) -> list[str]:
    return [refusal.code for refusal in wire.said(Refuse)]


async def test_a_receiver_that_has_a_session_by_another_address_is_told_so_and_keeps_it(world: World) -> None:
    player, first = await met(world)
    other = Wire("D0 again", peer_incarnation="D")
    await says_hello(player, world, other, address="tcp://also:1", serial=1)
    assert codes(other) == ["already_open"] and not other.said(Welcome)
    assert player.heard == [] and player.disconnected == [] and len(player.proving) == 1
    player.peers._hear(first, "D", Settled(transfer="t"))
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
    player.peers._hear(other, "D", Cancel(transfer="t", code=""))
    assert not other.sent
    player.peers._hear(other, "D", Cancel(transfer="t", code="", incarnation="dead"))
    assert other.sent == [Drained(transfer="t")]
    player.peers._lose(first, "gone")
    player.peers._hear(other, "D", Cancel(transfer="u", code=""))
    assert other.sent[1:] == [Drained(transfer="u")]


async def test_a_hello_after_a_goodbye_takes_the_place_of_the_one_that_is_being_proved(
    world: World, sender: Player
) -> None:
    wire = Wire("D0", peer_incarnation="D")
    async with asyncio.TaskGroup() as tasks:
        sender.peers._take(tasks, wire, "D", replace_struct(greeting(world, "D"), serial=1))
        await settle()
        sender.peers._take(tasks, wire, "D", Goodbye(reason="other slots"))
        sender.peers._take(tasks, wire, "D", replace_struct(greeting(world, "D"), serial=1, probe_lane=3))
        sender.peers._take(tasks, wire, "D", replace_struct(greeting(world, "D"), serial=1, probe_lane=4))
        assert codes(wire) == ["busy"]
        sender.may_prove.set()
    assert [landing.lane for landing in sender.proving] == [0, 3] and sender.disconnected == [("D", 1)]
    assert len(wire.said(Welcome)) == 1 and len(sender.peers.statuses()) == 1
    assert not sender.peers.incoming._greeted_by


async def test_a_hello_of_a_connection_that_was_given_up_comes_too_late(world: World) -> None:
    """It would take over the session of the connection that its receiver has made since; nobody would answer there."""
    player, old = await met(world)
    new = Wire("D0 again", peer_incarnation="D")
    await says_hello(player, world, new, serial=2)
    assert new.said(Welcome) and set(player.heard) == {("D", "lost")}
    await says_hello(player, world, old, serial=1)
    player.peers._hear(old, "D", Goodbye(reason="given up"))
    player.peers._lose(old, "given up")
    assert codes(old) == ["stale_hello"] and len(player.peers.statuses()) == 1
    player.peers._hear(new, "D", Settled(transfer="t"))
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
