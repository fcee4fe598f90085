"""One sender with several addresses and connections: there is one session, found under every address."""

from __future__ import annotations

import asyncio
import time
from itertools import permutations

import pytest
from kvbridge_proto.peer import Goodbye, Hello, Refuse, Settled

from kvbridge.agent.outgoing_peers import UNUSED_LINK_S
from tests.integration.agent.player import Player, knows, reached, replace_struct, settle, welcomed
from tests.unit.exchange.world import World


async def test_one_session_serves_every_address_of_an_agent(world: World) -> None:
    player, incarnation = await reached(world)
    outgoing = player.peers.outgoing
    (said,) = player.reach("also").said(Hello)
    (first,) = player.wires["P0"].said(Hello)
    assert (said.address, first.address) == ("also", "P0") and said.serial > first.serial
    knows(player, "also", incarnation)
    assert player.opened_at == ["P0", "also"] and player.over == [] and player.wires["also"].is_lost
    outgoing.send("also", Settled(transfer="t"))
    assert player.wires["P0"].said(Settled)
    outgoing.reach("also")
    outgoing.ask("also")
    assert player.opened_at == ["P0", "also", "also"] and len(player.wires["P0"].said(Hello)) == 2
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    assert player.opened_at[3:] == ["P0", "also"]
    player.peers._lose(player.wires["P0"], "gone")
    assert player.over == [("P0", "peer_lost"), ("also", "peer_lost")] and player.peers.statuses() == []
    assert len(player.reach("also").said(Hello)) == 2


async def test_a_welcome_is_for_whom_the_link_greeted_when_it_came(world: World, receiver: Player) -> None:
    """Its handling has its turn later, when the session may be over and the link greet for another one."""
    sender = world.senders[0].engine
    receiver.may_prove.set()
    wire = receiver.reach("P0")
    stale = replace_struct(welcomed(world, wire), route="pull", probe=None)
    async with asyncio.TaskGroup() as tasks:
        receiver.peers._take(tasks, wire, sender.agent.incarnation, stale)
        receiver.peers._take(tasks, wire, sender.agent.incarnation, Goodbye(reason="rescaled"))
        receiver.peers.outgoing.reach("P0")
    assert len(wire.said(Hello)) == 2, "a session that is over was greeted for again"
    assert receiver.over == [("P0", "peer_left")] and receiver.opened_at == []
    await receiver.peers._welcome(wire, welcomed(world, wire))
    assert receiver.opened_at == ["P0"]


async def test_an_agent_that_is_being_greeted_by_another_address_is_waited_for(world: World) -> None:
    player, incarnation = await reached(world)
    player.peers.outgoing.ask("P0")
    player.peers.outgoing.reach("also")
    knows(player, "also", incarnation)
    assert player.opened_at == ["P0"]
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    assert player.opened_at == ["P0", "P0", "also"]
    player.peers.end_all("the engine left")
    assert player.over == [("P0", "engine_left"), ("also", "engine_left")]


async def test_an_address_becomes_no_name_of_a_session_with_another_key(world: World) -> None:
    player, incarnation = await reached(world)
    player.reach("also").key = "of another"
    knows(player, "also", incarnation)
    assert not player.over
    knows(player, "also", incarnation)
    assert player.over == [("also", "already_open")] and player.opened_at == ["P0"]


async def test_who_says_that_we_have_a_session_when_we_have_none_is_told_so_once(world: World) -> None:
    """It has not noticed yet that we gave it up; other sessions are older, so the first Hello could not say that."""
    player, _ = await reached(world)
    (said,) = player.reach("other").said(Hello)
    assert said.oldest == 1 < said.serial
    knows(player, "other", "an incarnation that we have not met")
    again = player.wires["other"].said(Hello)[1]
    assert again.oldest > again.serial == said.serial and not player.over
    knows(player, "other", "an incarnation that we have not met")
    assert player.over == [("other", "already_open")] and player.opened_at == ["P0"]
    await settle()


@pytest.mark.parametrize("refused", list(permutations(("also", "third", "fourth"))))
async def test_many_addresses_of_one_agent_become_names_of_the_one_that_is_welcome(
    refused: tuple[str, ...], world: World, receiver: Player
) -> None:
    incarnation = world.senders[0].engine.agent.incarnation
    receiver.may_prove.set()
    receiver.reach("P0", "also", "third", "fourth")
    for address in refused[:2]:
        knows(receiver, address, incarnation)
    await receiver.peers._welcome(receiver.wires["P0"], welcomed(world, receiver.wires["P0"]))
    knows(receiver, refused[2], incarnation)
    assert receiver.opened_at[0] == "P0" and sorted(receiver.opened_at[1:]) == ["also", "fourth", "third"]
    assert list(receiver.peers.outgoing.sessions) == ["P0"] and not receiver.over
    assert all(receiver.wires[address].is_lost for address in refused)
    receiver.peers._lose(receiver.wires["P0"], "gone")
    assert len(receiver.over) == 4 and not receiver.peers.outgoing._aliases


async def test_names_of_what_becomes_a_name_come_along(world: World) -> None:
    player, incarnation = await reached(world)
    outgoing = player.peers.outgoing
    outgoing.reach("also")
    knows(player, "also", incarnation)
    outgoing.reach("other")
    outgoing._merge(outgoing.sessions["P0"], outgoing.sessions["other"])
    assert outgoing._aliases == {"P0": "other", "also": "other"}


async def test_who_was_taken_for_the_other_address_and_is_somebody_else_is_waited_for_no_longer(
    world: World, receiver: Player
) -> None:
    receiver.may_prove.set()
    receiver.reach("P0", "other")
    knows(receiver, "other", "an incarnation that we have not met")
    assert len(receiver.wires["other"].said(Hello)) == 1
    await receiver.peers._welcome(receiver.wires["P0"], welcomed(world, receiver.wires["P0"]))
    assert len(receiver.wires["other"].said(Hello)) == 2 and receiver.opened_at == ["P0"]


async def test_a_hello_that_nobody_answers_is_taken_back_before_its_connection_is_closed(receiver: Player) -> None:
    wire = receiver.reach("P0")
    close = wire.close
    wire.close = lambda: (wire.sent.append("closed"), close())
    receiver.peers.outgoing.tick(time.monotonic() + 1000.0)
    assert receiver.over == [("P0", "peer_unreachable")] and wire.is_lost
    assert [type(body).__name__ for body in wire.sent] == ["Hello", "Goodbye", "str"]


async def test_a_link_that_has_had_no_session_for_a_while_is_closed(receiver: Player) -> None:
    """Agents that refuse have as many names as requests make up, and links are few."""
    outgoing = receiver.peers.outgoing
    for address in ("used", "unused"):
        outgoing.reach(address)
        wire = receiver.wires[address]
        receiver.peers._hear(wire, "B", Refuse(code="no_engine", reasons=()))
    assert receiver.over == [("used", "no_engine"), ("unused", "no_engine")]
    outgoing.tick(time.monotonic() + UNUSED_LINK_S - 5.0)
    assert not receiver.wires["unused"].is_lost, "it may bring a Drained yet"
    outgoing.reach("used")
    outgoing._deadlines.clear("used")
    outgoing.tick(time.monotonic() + UNUSED_LINK_S + 5.0)
    assert receiver.wires["unused"].is_lost and not receiver.wires["used"].is_lost


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_link_whose_session_ended_with_our_engine_is_closed_as_well(is_told: bool, world: World) -> None:
    """Engines come and go, slots are made anew: the links of before would use up all that there may be."""
    player, _ = await reached(world)
    outgoing, wire = player.peers.outgoing, player.wires["P0"]
    (player.peers.end_all if is_told else player.peers.renew)("the engine left")
    assert wire.said(Goodbye) and not outgoing.sessions
    outgoing.tick(time.monotonic() + UNUSED_LINK_S - 5.0)
    assert not wire.is_lost, "it may bring a Drained yet"
    outgoing.tick(time.monotonic() + UNUSED_LINK_S + 5.0)
    assert wire.is_lost
