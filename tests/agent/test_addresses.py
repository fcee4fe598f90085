"""One agent, several addresses, several connections: one session, and it is the latest that counts."""

from __future__ import annotations

import asyncio
import time
from itertools import count, islice, permutations, product
from typing import Any

import pytest
from kvbridge_proto.engine import Failed, Want
from kvbridge_proto.peer import Cancel, Drained, Goodbye, Hello, Refuse, Settled, Welcome
from kvbridge_proto.words import Blocks

from kvbridge.agent.dialling import MOST_NAMES, REST_S
from kvbridge.agent.metrics import Metrics
from kvbridge.agent.routes import Landing
from kvbridge.agent.sink import Sink
from kvbridge.errors import FabricError
from kvbridge.exchange.inbound import Inbound
from kvbridge.exchange.session import Home
from kvbridge.exchange.slots import SlotPool
from tests.exchange.world import World

from .test_greetings import Player, greeting, met, replace_struct, run, settle, welcomed
from .wire import Wire

# The source:


async def says_hello(
    player: Player, world: World, wire: Wire, address: str = "", serial: int = 0, lane: int = 0, oldest: int = 0
) -> None:
    said = replace_struct(greeting(world, "D"), address=address, serial=serial, probe_lane=lane, oldest=oldest)
    async with asyncio.TaskGroup() as tasks:
        player.peers._take(tasks, wire, "D", said)


def codes(wire: Wire) -> list[str]:
    return [refusal.code for refusal in wire.said(Refuse)]


def test_a_sink_that_has_a_session_by_another_address_is_told_so_and_keeps_it() -> None:
    async def story(world: World) -> None:
        player, first = await met(world)
        other = Wire("D0 again", peer_boot="D")
        await says_hello(player, world, other, address="tcp://also:1", serial=1)
        assert codes(other) == ["already_open"] and not other.said(Welcome)
        assert player.heard == [] and player.disconnected == [] and len(player.proving) == 1
        player.peers._hear(first, "D", Settled(transfer="t"))
        assert len(player.heard) == 1

    run(story)


def test_a_sink_whose_first_connection_is_lost_may_come_by_another_address() -> None:
    async def story(world: World) -> None:
        player, first = await met(world)
        first.is_lost = True
        other = Wire("D0 again", peer_boot="D")
        await says_hello(player, world, other, address="tcp://also:1", serial=1)
        assert other.said(Welcome) and player.heard == [("D", "lost")]

    run(story)


def test_a_connection_that_its_sink_has_given_up_keeps_nobody_out() -> None:
    async def story(world: World) -> None:
        player, _ = await met(world)  # serial 0; we have not heard yet that it is no more
        other = Wire("D0 again", peer_boot="D")
        await says_hello(player, world, other, address="tcp://also:1", serial=2, oldest=1)
        assert other.said(Welcome) and player.heard == [("D", "lost")]

    run(story)


def test_of_two_addresses_the_slower_is_told_of_the_other_whichever_was_dialled_first() -> None:
    async def story(world: World) -> None:
        player = Player(world.sources[0].home)
        player.may_prove.set()
        fast, slow = Wire("D0", peer_boot="D"), Wire("D0 again", peer_boot="D")
        await says_hello(player, world, fast, address="tcp://a:1", serial=2, oldest=1)
        await says_hello(player, world, slow, address="tcp://b:1", serial=1, oldest=1)
        assert fast.said(Welcome) and codes(slow) == ["already_open"]

    run(story)


def test_who_asks_by_another_link_is_not_told_that_a_claim_is_over_that_may_be_on_its_way() -> None:
    async def story(world: World) -> None:
        player, first = await met(world)
        player.drained = True
        other = Wire("D0 again", peer_boot="D")
        player.peers._hear(other, "D", Cancel(transfer="t", code=""))
        assert not other.sent
        player.peers._hear(other, "D", Cancel(transfer="t", code="", boot="dead"))
        assert other.sent == [Drained(transfer="t")]
        player.peers._lose(first, "gone")
        player.peers._hear(other, "D", Cancel(transfer="u", code=""))
        assert other.sent[1:] == [Drained(transfer="u")]

    run(story)


def test_a_hello_after_a_goodbye_takes_the_place_of_the_one_that_is_being_proved() -> None:
    async def story(world: World) -> None:
        player, wire = Player(world.sources[0].home), Wire("D0", peer_boot="D")
        async with asyncio.TaskGroup() as tasks:
            player.peers._take(tasks, wire, "D", replace_struct(greeting(world, "D"), serial=1))
            await settle()
            player.peers._take(tasks, wire, "D", Goodbye(reason="other slots"))
            player.peers._take(tasks, wire, "D", replace_struct(greeting(world, "D"), serial=1, probe_lane=3))
            player.peers._take(tasks, wire, "D", replace_struct(greeting(world, "D"), serial=1, probe_lane=4))
            assert codes(wire) == ["busy"]
            player.may_prove.set()
        assert [landing.lane for landing in player.proving] == [0, 3] and player.disconnected == [("D", 1)]
        assert len(wire.said(Welcome)) == 1 and len(player.peers.statuses()) == 1
        assert not player.peers.accepting._greeted_by

    run(story)


def test_a_hello_of_a_connection_that_was_given_up_comes_too_late() -> None:
    """It would take over the session of the connection that its sink has made since; nobody would answer there."""

    async def story(world: World) -> None:
        player, old = await met(world)
        new = Wire("D0 again", peer_boot="D")
        await says_hello(player, world, new, serial=2)
        assert new.said(Welcome) and player.heard == [("D", "lost")]
        await says_hello(player, world, old, serial=1)
        player.peers._hear(old, "D", Goodbye(reason="given up"))
        player.peers._lose(old, "given up")
        assert codes(old) == ["stale_hello"] and len(player.peers.statuses()) == 1
        player.peers._hear(new, "D", Settled(transfer="t"))
        assert player.heard[1:] == [("D", Settled(transfer="t"))] and player.disconnected == []

    run(story)


def test_a_session_whose_route_was_given_up_for_one_that_cannot_be_had_is_over() -> None:
    async def story(world: World) -> None:
        player, wire = await met(world)

        async def connect(landing: Landing) -> None:
            raise FabricError("no_route", "test")

        player.connect = connect  # type: ignore[assignment,method-assign]
        await says_hello(player, world, wire, lane=1)
        assert codes(wire) == ["no_route"] and wire.said(Goodbye)
        assert player.peers.statuses() == [] and player.heard == [("D", "lost")] and player.disconnected == [("D", 1)]

    run(story)


# The sink:


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


def test_one_session_serves_every_address_of_an_agent() -> None:
    async def story(world: World) -> None:
        player, boot = await reached(world)
        dialling = player.peers.dialling
        dialling.reach("also")
        (said,) = player.wires["also"].said(Hello)
        (first,) = player.wires["P0"].said(Hello)
        assert (said.address, first.address) == ("also", "P0") and said.serial > first.serial
        knows(player, "also", boot)
        assert player.opened_at == ["P0", "also"] and player.over == [] and player.wires["also"].is_lost
        dialling.send("also", Settled(transfer="t"))
        assert player.wires["P0"].said(Settled)
        dialling.reach("also")
        dialling.ask("also")
        assert player.opened_at == ["P0", "also", "also"] and len(player.wires["P0"].said(Hello)) == 2
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        assert player.opened_at[3:] == ["P0", "also"]
        player.peers._lose(player.wires["P0"], "gone")
        assert player.over == [("P0", "peer_lost"), ("also", "peer_lost")] and player.peers.statuses() == []
        dialling.reach("also")
        assert len(player.wires["also"].said(Hello)) == 2

    run(story)


def test_an_agent_that_is_being_greeted_by_another_address_is_waited_for() -> None:
    async def story(world: World) -> None:
        player, boot = await reached(world)
        player.peers.dialling.ask("P0")
        player.peers.dialling.reach("also")
        knows(player, "also", boot)
        assert player.opened_at == ["P0"]
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        assert player.opened_at == ["P0", "P0", "also"]
        player.peers.end_all("the engine left")
        assert player.over == [("P0", "engine_left"), ("also", "engine_left")]

    run(story)


def test_the_welcome_that_the_other_address_gets_may_come_later_than_the_word_of_it() -> None:
    async def story(world: World) -> None:
        player, boot = Player(world.sinks[0].home), world.sources[0].home.agent.boot
        player.may_prove.set()
        for address in ("P0", "also"):
            player.peers.dialling.reach(address)
        knows(player, "also", boot)
        assert not player.opened_at and not player.over
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        assert player.opened_at == ["P0", "also"] and player.wires["also"].is_lost and not player.over
        assert len(player.peers.statuses()) == 1

    run(story)


def test_an_address_becomes_no_name_of_a_session_with_another_key() -> None:
    async def story(world: World) -> None:
        player, boot = await reached(world)
        player.peers.dialling.reach("also")
        player.wires["also"].key = "of another"
        knows(player, "also", boot)
        assert not player.over
        knows(player, "also", boot)
        assert player.over == [("also", "already_open")] and player.opened_at == ["P0"]

    run(story)


def test_who_says_that_we_have_a_session_when_we_have_none_is_told_so_once() -> None:
    """It has not noticed yet that we gave it up; other sessions are older, so the first Hello could not say that."""

    async def story(world: World) -> None:
        player, _ = await reached(world)
        player.peers.dialling.reach("other")
        (said,) = player.wires["other"].said(Hello)
        assert said.oldest == 1 < said.serial
        knows(player, "other", "a boot that we have not met")
        again = player.wires["other"].said(Hello)[1]
        assert again.oldest > again.serial == said.serial and not player.over
        knows(player, "other", "a boot that we have not met")
        assert player.over == [("other", "already_open")] and player.opened_at == ["P0"]
        await settle()

    run(story)


@pytest.mark.parametrize("refused", list(permutations(("also", "third", "fourth"))))
def test_many_addresses_of_one_agent_become_names_of_the_one_that_is_welcome(refused: tuple[str, ...]) -> None:
    async def story(world: World) -> None:
        player, boot = Player(world.sinks[0].home), world.sources[0].home.agent.boot
        player.may_prove.set()
        for address in ("P0", "also", "third", "fourth"):
            player.peers.dialling.reach(address)
        for address in refused[:2]:
            knows(player, address, boot)
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        knows(player, refused[2], boot)
        assert player.opened_at[0] == "P0" and sorted(player.opened_at[1:]) == ["also", "fourth", "third"]
        assert list(player.peers.dialling.sessions) == ["P0"] and not player.over
        player.peers._lose(player.wires["P0"], "gone")
        assert len(player.over) == 4 and not player.peers.dialling._also

    run(story)


def test_names_of_what_becomes_a_name_come_along() -> None:
    async def story(world: World) -> None:
        player, boot = await reached(world)
        dialling = player.peers.dialling
        dialling.reach("also")
        knows(player, "also", boot)
        dialling.reach("other")
        dialling._merge(dialling.sessions["P0"], dialling.sessions["other"])
        assert dialling._also == {"P0": "other", "also": "other"}

    run(story)


def test_who_was_taken_for_the_other_address_and_is_somebody_else_is_waited_for_no_longer() -> None:
    async def story(world: World) -> None:
        player = Player(world.sinks[0].home)
        player.may_prove.set()
        for address in ("P0", "other"):
            player.peers.dialling.reach(address)
        knows(player, "other", "a boot that we have not met")
        assert len(player.wires["other"].said(Hello)) == 1
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        assert len(player.wires["other"].said(Hello)) == 2 and player.opened_at == ["P0"]

    run(story)


def test_a_hello_that_nobody_answers_is_taken_back_before_its_connection_is_closed() -> None:
    async def story(world: World) -> None:
        player = Player(world.sinks[0].home)
        player.peers.dialling.reach("P0")
        wire = player.wires["P0"]
        close = wire.close
        wire.close = lambda: (wire.sent.append("closed"), close())  # type: ignore[method-assign,assignment]
        player.peers.dialling.tick(time.monotonic() + 1000.0)
        assert player.over == [("P0", "peer_unreachable")] and wire.is_lost
        assert [type(body).__name__ for body in wire.sent] == ["Hello", "Goodbye", "str"]

    run(story)


def test_a_link_that_has_had_no_session_for_a_while_is_closed() -> None:
    """Agents that refuse have as many names as requests make up, and links are few."""

    async def story(world: World) -> None:
        player = Player(world.sinks[0].home)
        dialling = player.peers.dialling
        for address in ("used", "unused"):
            dialling.reach(address)
            wire = player.wires[address]
            player.peers._hear(wire, "B", Refuse(code="no_engine", reasons=()))
        assert player.over == [("used", "no_engine"), ("unused", "no_engine")]
        dialling.tick(time.monotonic() + REST_S - 5.0)
        assert not player.wires["unused"].is_lost, "it may bring a Drained yet"
        dialling.reach("used")
        dialling._deadlines.clear("used")
        dialling.tick(time.monotonic() + REST_S + 5.0)
        assert player.wires["unused"].is_lost and not player.wires["used"].is_lost

    run(story)


# Names that clients make up:


class Fetching(Player):
    """A real sink, whose engine's requests bring whatever address their clients say."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.told: list[Any] = []
        numbers = count()
        self.inbound = Inbound(SlotPool(4), lambda: f"t{next(numbers)}", lambda: next(numbers).to_bytes(16, "big"))
        dialling = self.peers.dialling
        clock = lambda: 0.0  # noqa: E731
        self.sink = Sink(self.inbound, dialling, self, Metrics(), self.told.append, clock)  # type: ignore[arg-type]
        dialling.sink = self.sink
        self.may_prove.set()

    def expect(self, slots: int) -> None: ...

    def want(self, source: str) -> None:
        assert self.home is not None
        blocks = (Blocks(0, 0, (0,)),)
        request = f"r{len(self.inbound.wants)}-{len(self.told)}"
        want = Want(
            request=request, room="r", source=source, first_token=0, end_token=16, blocks=blocks, deadline_s=100.0
        )
        self.sink.want(want, self.home)

    @property
    def kept(self) -> list[int]:
        """How many addresses are kept anywhere."""
        inbound, dialling = self.inbound, self.peers.dialling
        parts = [*vars(inbound._sources).values(), *vars(inbound._doubts).values(), inbound._givers._assigned]
        return [len(kept) for kept in (*parts, dialling.sessions, dialling._also)]


def test_spellings_of_one_host_are_one_address() -> None:
    async def story(world: World) -> None:
        player = Fetching(world.sinks[0].home)
        letters = product(*((letter, letter.upper()) for letter in "localhost"))
        for number, spelled in enumerate(islice(letters, 500)):
            player.want(f"tcp://{''.join(spelled)}:{'0' * (number % 2)}7700" + "#" * (number % 3 == 0))
        assert list(player.wires) == ["tcp://localhost:7700"] and max(player.kept) == 1

    run(story)


def test_a_session_has_only_so_many_names_and_a_want_by_one_more_fails_at_once() -> None:
    async def story(world: World) -> None:
        player, boot = Fetching(world.sinks[0].home), world.sources[0].home.agent.boot
        player.want("P0")
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        for number in range(500):
            player.want(f"name-{number}")
            if number < MOST_NAMES - 1:
                assert not player.told
            knows(player, f"name-{number}", boot)
        assert max(player.kept) <= MOST_NAMES and list(player.peers.dialling.sessions) == ["P0"]
        failed = [told for told in player.told if isinstance(told, Failed)]
        assert len(failed) == 500 - (MOST_NAMES - 1) and {each.code for each in failed} == {"too_many_names"}
        assert "name-499 is P0" in failed[-1].reason and f"limit {MOST_NAMES}" in failed[-1].reason
        assert player.wires["name-499"].is_lost
        player.peers._lose(player.wires["P0"], "gone")
        assert max(player.kept) <= 1  # slots were lent to P0: it may still write them

    run(story)


def test_a_name_too_many_still_asks_for_what_is_in_doubt_by_it() -> None:
    """Else whoever makes up names could keep the slots in quarantine that only this name's successor can give back."""

    async def story(world: World) -> None:
        player, boot = Fetching(world.sinks[0].home), world.sources[0].home.agent.boot
        player.inbound._doubts.add("t", "was here", "dead")
        player.want("P0")
        await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
        for address in [*(f"name-{number}" for number in range(MOST_NAMES)), "was here"]:
            player.want(address)
            knows(player, address, boot)
        (asked,) = player.wires["P0"].said(Cancel)
        assert (asked.transfer, asked.boot) == ("t", "dead") and max(player.kept) <= MOST_NAMES
        player.peers._hear(player.wires["P0"], boot, Drained(transfer="t"))
        assert not player.inbound._doubts.is_any("was here")

    run(story)
