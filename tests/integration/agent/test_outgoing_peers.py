"""The agents that ours fetches from, by every address that requests name: one session each, and only so many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sized
from dataclasses import replace
from itertools import islice, permutations, product
from pathlib import Path
from unittest.mock import ANY

import pytest
from kvbridge_proto.common import Blocks, Rank
from kvbridge_proto.door import TOKEN_BYTES, Ticket
from kvbridge_proto.engine import Abandon, Done, Failed, Want
from kvbridge_proto.peer import Cancel, Claim, Drained, Goodbye, Hello, Refuse, Settled

from kvbridge.agent.outgoing_peers import MOST_NAMES, UNUSED_LINK_S
from kvbridge.errors import PeerError
from testing.agents import agent
from testing.halves import by_slots
from testing.oracle import Shape, fill
from testing.pairs import Benches
from testing.proc import descriptors
from testing.refusals import refused
from testing.waiting import wait_for
from tests.integration.agent.player import Player, Whole, knows, reached, replace_struct, settle, welcomed
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


async def test_a_welcome_is_for_whom_the_link_said_hello_when_it_came(world: World, receiver: Player) -> None:
    """Its handling has its turn later, when the session may be over and the link say hello for another one."""
    sender = world.senders[0].engine
    receiver.may_prove.set()
    wire = receiver.reach("P0")
    stale = replace_struct(welcomed(world, wire), route="pull", probe=None)
    async with asyncio.TaskGroup() as tasks:
        receiver.peers._take(tasks, wire, sender.agent.incarnation, stale)
        receiver.peers._take(tasks, wire, sender.agent.incarnation, Goodbye(reason="rescaled"))
        receiver.peers.outgoing.reach("P0")
    assert len(wire.said(Hello)) == 2, "a session that is over got another Hello"
    assert receiver.over == [("P0", "peer_left")] and receiver.opened_at == []
    await receiver.peers._welcome(wire, welcomed(world, wire))
    assert receiver.opened_at == ["P0"]


async def test_memory_that_is_shared_with_an_agent_that_opens_none_comes_by_slots_and_says_why(
    world: World, receiver: Player
) -> None:
    """Its routes name pull, but it shares no memory: its sender should have known from the Hello."""
    receiver.may_prove.set()
    engine = world.receivers[0].engine
    receiver.engine = replace(engine, site=replace(engine.site, routes=("pull", *engine.site.routes)))
    wire = receiver.reach("P0")
    ticket = Ticket(machine="m", path="/p.door", session="s", epoch=1, token=b"t" * TOKEN_BYTES)
    await receiver.peers._welcome(wire, replace_struct(welcomed(world, wire), route="pull", probe=None, door=ticket))
    assert len(wire.said(Hello)) == 2 and "pull" not in wire.last(Hello).routes
    await receiver.peers._welcome(wire, welcomed(world, wire))
    (found,) = receiver.peers.statuses()
    assert receiver.opened_at == ["P0"] and "pull: share_memory is off" in found.route
    with refused(PeerError, "sharing_off"):
        await receiver.doors.enter(ANY, ticket, ANY, ANY)


async def test_an_agent_that_is_told_hello_by_another_address_is_waited_for(world: World) -> None:
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
        receiver.peers._on_message(wire, "B", Refuse(code="no_engine", reasons=()))
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


# Names that clients make up: only so many are kept, in whatever spelling:


class Fetching(Whole):
    """Its engine's requests bring whatever address their clients say."""

    numbers = 0

    def want(self, sender: str) -> None:
        assert self.engine is not None
        blocks = (Blocks(0, 0, (0,)),)
        self.numbers += 1
        tokens = {"first_token": 0, "end_token": 16, "blocks": blocks}
        want = Want(number=self.numbers, request="r", rendezvous="r", sender=sender, **tokens, deadline_s=100.0)
        self.receiver.want(want, self.engine)

    @property
    def kept(self) -> list[int]:
        """How many addresses are kept anywhere."""
        receiving, outgoing = self.receiving, self.peers.outgoing
        parts = [
            *vars(receiving._senders).values(),
            *vars(by_slots(receiving).unconfirmed).values(),
            receiving._assignment._assigned,
        ]
        return [len(kept) for kept in (*parts, outgoing.sessions, outgoing._aliases) if isinstance(kept, Sized)]


async def fetching(world: World) -> tuple[Fetching, str]:
    """One whose engine wants something of P0, and who that is."""
    player = Fetching(world.receivers[0].engine)
    player.want("P0")
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    return player, world.senders[0].engine.agent.incarnation


@pytest.mark.proves("T6")
async def test_spellings_of_one_host_are_one_address(world: World) -> None:
    player = Fetching(world.receivers[0].engine)
    letters = product(*((letter, letter.upper()) for letter in "localhost"))
    for number, spelled in enumerate(islice(letters, 500)):
        player.want(f"tcp://{''.join(spelled)}:{'0' * (number % 2)}7700" + "#" * (number % 3 == 0))
    assert list(player.wires) == ["tcp://localhost:7700"] and max(player.kept) == 1


@pytest.mark.proves("T6")
async def test_a_session_has_only_so_many_names_and_a_want_by_one_more_fails_at_once(world: World) -> None:
    player, incarnation = await fetching(world)
    for number in range(500):
        player.want(f"name-{number}")
        if number < MOST_NAMES - 1:
            assert not player.told
        knows(player, f"name-{number}", incarnation)
    assert max(player.kept) <= MOST_NAMES and list(player.peers.outgoing.sessions) == ["P0"]
    failed = [told for told in player.told if isinstance(told, Failed)]
    assert len(failed) == 500 - (MOST_NAMES - 1) and {each.code for each in failed} == {"too_many_names"}
    assert "name-499 is P0" in failed[-1].reason and f"limit {MOST_NAMES}" in failed[-1].reason
    assert player.wires["name-499"].is_lost
    player.peers._lose(player.wires["P0"], "gone")
    assert max(player.kept) <= 1  # slots were lent to P0: it may still write them


@pytest.mark.proves("T6")
async def test_a_name_that_nothing_is_wanted_by_makes_room_for_another(world: World) -> None:
    """Else whoever made up as many first would keep all others from fetching by the agent's real name."""
    player, incarnation = await fetching(world)
    player.want("waits")
    knows(player, "waits", incarnation)
    for number in range(500):
        player.want(f"name-{number}")
        knows(player, f"name-{number}", incarnation)
        player.receiver.abandon(Abandon(number=next(reversed(player.receiving.wants))))
        player.report()
    assert max(player.kept) <= MOST_NAMES and "too_many_names" not in {told.code for told in player.told}
    before = claims(player)
    for address in ("real", "waits", "P0", "name-0"):
        player.want(address)
        if address in ("real", "name-0"):
            knows(player, address, incarnation)
    assert claims(player) == before + 4 and len(player.receiving.wants) == 6


def claims(player: Fetching) -> int:
    """How many wants were claimed; an empty claim tells of a want that failed before."""
    return sum(each.end_token > 0 for each in player.wires["P0"].said(Claim))


async def test_an_address_of_a_rank_stays_a_name_whoever_else_comes(world: World) -> None:
    player, incarnation = Fetching(world.receivers[0].engine), world.senders[0].engine.agent.incarnation
    player.want("P0")
    welcome = welcomed(world, player.wires["P0"])
    ranks = (Rank(tp_rank=0, pp_rank=0, address="its own"),)
    await player.peers._welcome(player.wires["P0"], replace_struct(welcome, ranks=ranks))
    for address in ("its own", *(f"name-{number}" for number in range(40))):
        player.peers.outgoing.reach(address)
        knows(player, address, incarnation)
    assert "its own" in player.peers.outgoing._aliases and "name-0" not in player.peers.outgoing._aliases


async def test_a_name_too_many_still_asks_for_what_is_unconfirmed_by_it(world: World) -> None:
    """Else whoever makes up names could keep the slots in quarantine that only this name's successor can give back."""
    player, incarnation = Fetching(world.receivers[0].engine), world.senders[0].engine.agent.incarnation
    by_slots(player.receiving).unconfirmed.add("t", "was here", "dead", "")
    player.want("P0")
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    for address in [*(f"name-{number}" for number in range(MOST_NAMES)), "was here"]:
        player.want(address)
        knows(player, address, incarnation)
    (asked,) = player.wires["P0"].said(Cancel)
    assert (asked.transfer, asked.incarnation) == ("t", "dead") and max(player.kept) <= MOST_NAMES
    player.peers._on_message(player.wires["P0"], incarnation, Drained(transfer="t"))
    assert not by_slots(player.receiving).unconfirmed.is_any("was here")


# Hundreds of addresses where nobody listens, with real agents:


LIMITS = (128, 512)  # of descriptors, soft and hard
MADE_UP = 600  # more links than that
PATIENCE_S = 20.0  # a slow machine tries 200 addresses a second, a busy one fewer than 100
CODES = {"peer_unreachable", "too_many_links", "deadline"}


@pytest.mark.proves("T5")
def test_made_up_addresses_neither_detach_the_engine_nor_keep_a_real_sender_out(bench_of: Benches) -> None:
    shape = Shape("nhd", blocks=8)
    bench = bench_of(shape, shape, nofile=LIMITS, connect_s=PATIENCE_S)
    sender, receiver = bench.sender, bench.receiver
    address, table = sender.agent.address, [1, 2]
    fill(sender.held, table, range(32))
    sender.offer("real", table, 32)
    before, most = descriptors(receiver.agent.process.pid), 0
    for number in range(MADE_UP):
        receiver.want(f"made up {number}", f"tcp://127.0.7.7:{2000 + number}", table, range(32), deadline_s=5.0)
        if number == MADE_UP // 2:
            receiver.want("real", address, table, range(32), deadline_s=2 * PATIENCE_S)
        if number % 100 == 0:
            most = max(most, descriptors(receiver.agent.process.pid))
    assert isinstance(receiver.answer("real", 3 * PATIENCE_S), Done)
    failed = [receiver.answer(f"made up {number}", 3 * PATIENCE_S) for number in range(MADE_UP)]
    assert all(isinstance(each, Failed) for each in failed)
    assert {each.code for each in failed} <= CODES
    assert most < LIMITS[1] * 3 // 4, f"{most} descriptors, {before} before"
    status = receiver.agent.status
    assert status.engine is not None and status.engine.epoch == 1, "the engine was detached"
    assert sender.released("real").code == ""
    assert "Traceback" not in receiver.agent.text()
    # Its link to the sender, the data side's, and the sender's door stay.
    wait_for(lambda: descriptors(receiver.agent.process.pid) <= before + 12, 120)


def test_an_agent_raises_its_soft_limit_to_the_hard_one(tmp_path: Path) -> None:
    with agent(tmp_path, "a", nofile=LIMITS) as running:
        limits = Path(f"/proc/{running.process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert line.split()[3:5] == ["512", "512"]
        assert "enough for 16 peers each way" in running.text()


async def test_who_is_refused_is_said_to_be_absent_once_to_those_who_asked_before(receiver: Player) -> None:
    outgoing, wire = receiver.peers.outgoing, receiver.reach("P0")
    wire.is_up, wire.is_refused = False, True
    outgoing.retried(wire)
    receiver.reach("P0")  # another want, while the answer is on its way
    first, second = receiver.looks
    first()
    outgoing.retried(wire)
    second()
    assert [address for address, _ in receiver.gone] == ["P0", "P0"] and receiver.gone[0] < receiver.gone[1]
    outgoing.retried(wire)
    assert len(receiver.looks) == 3, "the second look began as its want came, and knows no better than it"
    receiver.looks.pop()()
    outgoing.retried(wire)
    assert len(receiver.looks) == 2 and len(receiver.gone) == 3, "nobody has asked since"
    receiver.reach("P0")
    wire.is_up = True
    receiver.looks.pop()()
    assert len(receiver.gone) == 3 and not receiver.over
