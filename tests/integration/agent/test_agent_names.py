"""Names of agents that clients make up: only so many are kept, in whatever spelling."""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice, product

import pytest
from kvbridge_proto.common import Blocks, Rank
from kvbridge_proto.engine import Abandon, Failed, Want
from kvbridge_proto.peer import Cancel, Claim, Drained

from kvbridge.agent.outgoing_peers import MOST_NAMES
from testing.halves import by_slots
from tests.integration.agent.player import Whole, knows, replace_struct, welcomed
from tests.unit.exchange.world import World


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
    greeting = welcomed(world, player.wires["P0"])
    ranks = (Rank(tp_rank=0, pp_rank=0, address="its own"),)
    await player.peers._welcome(player.wires["P0"], replace_struct(greeting, ranks=ranks))
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
    player.peers._hear(player.wires["P0"], incarnation, Drained(transfer="t"))
    assert not by_slots(player.receiving).unconfirmed.is_any("was here")
