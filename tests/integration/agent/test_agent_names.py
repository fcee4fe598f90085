"""Names that clients make up for agents: only so many are kept, however they are spelled."""

from __future__ import annotations

from itertools import count, islice, product
from typing import Any

from kvbridge_proto.engine import Failed, Want
from kvbridge_proto.peer import Cancel, Claim, Drained
from kvbridge_proto.words import Blocks, Rank

from kvbridge.agent.dialling import MOST_NAMES
from kvbridge.agent.journal import Journal
from kvbridge.agent.lives import Lives
from kvbridge.agent.metrics import Metrics
from kvbridge.agent.sink import Sink
from kvbridge.exchange.inbound import Inbound
from kvbridge.exchange.session import Home
from kvbridge.exchange.slots import SlotPool
from tests.integration.agent.player import Player, knows, replace_struct, run, welcomed
from tests.integration.agent.receiver import Receiver
from tests.unit.exchange.world import NOTHING, World


class Fetching(Player, Receiver):
    """A real sink, whose engine's requests bring whatever address their clients say."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        Receiver.__init__(self)
        self.told: list[Any] = []
        numbers = count()
        self.inbound = Inbound(SlotPool(4), lambda: f"t{next(numbers)}", lambda: next(numbers).to_bytes(16, "big"))
        dialling = self.peers.dialling
        clock = lambda: 0.0  # noqa: E731
        metrics = Metrics()
        lives = Lives("sink", Journal(), metrics.lived)
        self.sink = Sink(self.inbound, dialling, self, metrics, lives, self.told.append, clock)  # type: ignore[arg-type]
        self.sink.attached = NOTHING
        dialling.sink = self.sink
        self.may_prove.set()

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


async def fetching(world: World) -> tuple[Fetching, str]:
    """One whose engine wants something of P0, and who that is."""
    player = Fetching(world.sinks[0].home)
    player.want("P0")
    await player.peers._welcome(player.wires["P0"], welcomed(world, player.wires["P0"]))
    return player, world.sources[0].home.agent.boot


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
        player, boot = await fetching(world)
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


def test_a_name_that_nothing_is_wanted_by_makes_room_for_another() -> None:
    """Else whoever made up as many first would keep all others from fetching by the agent's real name."""

    async def story(world: World) -> None:
        player, boot = await fetching(world)
        player.want("waits")
        knows(player, "waits", boot)
        for number in range(500):
            player.want(f"name-{number}")
            knows(player, f"name-{number}", boot)
            player.sink.abandon(next(reversed(player.inbound.wants)))
            player.report()
        assert max(player.kept) <= MOST_NAMES and "too_many_names" not in {told.code for told in player.told}
        before = len(player.wires["P0"].said(Claim))
        for address in ("real", "waits", "P0", "name-0"):
            player.want(address)
            if address in ("real", "name-0"):
                knows(player, address, boot)
        assert len(player.wires["P0"].said(Claim)) == before + 4 and len(player.inbound.wants) == 6

    run(story)


def test_an_address_of_a_rank_stays_a_name_whoever_else_comes() -> None:
    async def story(world: World) -> None:
        player, boot = Fetching(world.sinks[0].home), world.sources[0].home.agent.boot
        player.want("P0")
        greeting = welcomed(world, player.wires["P0"])
        ranks = (Rank(tp_rank=0, pp_rank=0, address="its own"),)
        await player.peers._welcome(player.wires["P0"], replace_struct(greeting, ranks=ranks))
        for address in ("its own", *(f"name-{number}" for number in range(40))):
            player.peers.dialling.reach(address)
            knows(player, address, boot)
        assert "its own" in player.peers.dialling._also and "name-0" not in player.peers.dialling._also

    run(story)


def test_a_name_too_many_still_asks_for_what_is_in_doubt_by_it() -> None:
    """Else whoever makes up names could keep the slots in quarantine that only this name's successor can give back."""

    async def story(world: World) -> None:
        player, boot = Fetching(world.sinks[0].home), world.sources[0].home.agent.boot
        player.inbound._doubts.add("t", "was here", "dead", "")
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
