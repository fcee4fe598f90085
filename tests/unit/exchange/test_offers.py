"""Once an offer is over, nobody may read its blocks, and what its engine still says of it opens no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Failed

from kvbridge.loopback.messages import number_of
from tests.unit.exchange.world import World

SEEDS = range(25)


@pytest.mark.proves("G13")
@pytest.mark.parametrize("seed", SEEDS)
def test_who_wants_again_what_it_gave_up_reads_blocks_that_are_still_there(seed: int) -> None:
    world = World(slots=8, local=2, seed=seed)
    world.offer("r", 64, 16)
    world.want("r", 64)
    for _ in range(8 + seed % 12):
        world.step()
    world.abandon("r")
    for _ in range(seed % 3):
        world.step()
    world.fetch("r", 64)  # the world sees to it that nothing is read of an offer that is released
    world.pass_time(101)
    world.run()
    world.check_rest()


def expired(world: World) -> None:
    """Two chunks of r are being gathered, and nobody waits for more."""
    world.hold.add("gather")
    world.offer("r", 64, 16, last=False)
    world.fetch("r", 64)
    world.pass_time(101)
    assert world.senders[0].send_orders.moving == 2 and number_of("r") in world.senders[0].sending.offers


def without_engine(world: World) -> None:
    """It hears nothing any more."""
    expired(world)
    world.do(world.senders[0], world.senders[0].sending.engine_left(world.now))


def wrong(world: World) -> None:
    world.offer("r", 16, (Blocks(0, 0, (10**6,)),))


@pytest.mark.parametrize("end", [expired, without_engine, wrong])
def test_more_of_an_offer_that_has_ended_opens_no_other(world: World, end: Callable[[World], None]) -> None:
    end(world)
    world.offer("r", 64, 0, more=True)
    world.go_on()
    world.offer("r", 64, 0, more=True)
    assert not world.senders[0].sending.offers


def test_open_offers_and_wants_of_an_engine_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.sender.MOST_OFFERS", 3)
    monkeypatch.setattr("kvbridge.exchange.receiver.MOST_WANTS", 3)
    for number in range(5):
        world.offer(f"o{number}", 16, 4)
        world.want(f"w{number}", 16)
    assert {name: said.code for name, said in world.released().items()} == dict.fromkeys(
        ("o3", "o4"), "too_many_offers"
    )
    answers = {name: said.code for name, said in world.answers().items() if isinstance(said, Failed)}
    assert answers == dict.fromkeys(("w3", "w4"), "too_many_wants")
    world.offer("o0", 16, 0, more=True)  # one that is known may grow
    world.offer("o5", 8, 2, last=False)
    world.withdraw("o1")
    world.offer("o5", 16, 4, more=True)
    assert number_of("o5") not in world.senders[0].sending.offers, "the rest of one that was refused is no new one"
