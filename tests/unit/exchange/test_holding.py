"""How long an offer is kept: a short time by itself, on while somebody waits, not at all where blocks lack."""

from __future__ import annotations

import pytest
from kvbridge_proto.engine import Done, Held
from kvbridge_proto.peer import Hold

from kvbridge.exchange.awaited import HOLD_EVERY_S
from kvbridge.exchange.outbound import FRESH_S
from kvbridge.exchange.rooms import AWAITED_S
from tests.unit.exchange.world import World

HOLD_S = 100.0  # of the world's offers


def wait(world: World, seconds: float) -> None:
    """Time passes as it does in an agent, in small steps."""
    end = world.now + seconds
    while world.now < end:
        world.pass_time(min(1.0, end - world.now))
        world.run()


def test_an_offer_that_nobody_asks_for_ends_with_its_hold() -> None:
    world = World()
    world.offer("r", 64, 16)
    wait(world, HOLD_S + 1)
    assert world.released()["r"].code == "offer_expired"
    assert "64 tokens" in world.released()["r"].reason


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("sinks", [1, 2])
def test_an_offer_is_held_while_a_request_queues_for_it(sources: int, sinks: int) -> None:
    world = World(sources, sinks)
    world.offer("r", 64, 16)
    world.expect("r")
    world.run()
    assert all(len(source.accepted) == sinks for source in world.sources), "sessions are there before they are needed"
    wait(world, 5 * HOLD_S)
    assert not any(world.released(source) for source in range(sources))
    world.want("r", 64)
    world.run()
    assert all("r" in world.answers(sink) for sink in range(sinks))
    wait(world, HOLD_S)
    world.check_rest()


def test_a_want_that_waits_has_its_offer_held() -> None:
    world = World()
    world.hold.add("gather")
    world.offer("r", 64, 16)
    world.want("r", 64, deadline=10 * HOLD_S)
    wait(world, 5 * HOLD_S)
    assert not world.released()
    world.hold.clear()
    world.run()
    assert isinstance(world.answers()["r"], Done)
    world.check_rest()


@pytest.mark.parametrize("end", ["abandon", "engine_left", "empty want"])
def test_who_waits_no_longer_holds_no_longer(end: str) -> None:
    world = World()
    world.offer("r", 64, 16)
    world.expect("r")
    wait(world, 2 * HOLD_S)
    if end == "abandon":
        world.abandon("r")
    elif end == "engine_left":
        world.do(world.sinks[0], world.sinks[0].inbound.engine_left(world.now))
    else:
        world.want("r", 0)
    assert not world.sinks[0].inbound.awaited
    wait(world, HOLD_S + HOLD_EVERY_S)
    assert "r" in world.released()


def test_the_sources_engine_hears_that_its_offer_is_held() -> None:
    world = World()
    world.offer("r", 64, 16)
    world.expect("r")
    wait(world, 2.0)
    assert Held(requests=("r",)) in world.sources[0].told


def test_all_that_waits_is_said_at_once_and_only_every_few_seconds() -> None:
    world = World()
    for number in range(50):
        world.expect(f"r{number}")
    wait(world, 4 * HOLD_EVERY_S)
    assert len(world.holds) <= 6
    assert any(len(hold.rooms) == 50 for hold in world.holds)


def test_a_request_that_gets_its_blocks_at_once_costs_no_message() -> None:
    world = World()
    world.offer("warm", 16, 4)
    world.want("warm", 16)
    world.run()
    world.pass_time(0.0)  # the next round is some seconds away
    world.expect("r")
    world.pass_time(0.02)
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.run()
    world.pass_time(0.1)
    world.run()
    assert not world.holds
    world.check_rest()


def test_one_word_holds_one_offer_of_a_room() -> None:
    world = World()
    for number in range(3):
        world.offer(f"r{number}", 64, 16, room="same")
    source = world.sources[0]
    world.now += 50
    world.do(source, source.outbound.hold("boot", ("same", "same"), world.now))
    wait(world, 51)
    assert set(world.released()) == {"r2"}


def reclaim(world: World, blocks: int) -> set[str]:
    """Which offers end when the source's engine is short of so many blocks."""
    source = world.sources[0]
    before = set(world.released())
    world.do(source, source.outbound.reclaim(blocks, world.now))
    new = set(world.released()) - before
    assert all(world.released()[name].code == "reclaimed" for name in new)
    return new


def test_the_oldest_go_first_and_no_more_than_needed() -> None:
    world = World()
    for number in range(4):
        world.offer(f"r{number}", 64, 16)
        world.now += 1
    assert reclaim(world, 17) == {"r0", "r1"}
    assert reclaim(world, 1) == {"r2"}


def test_an_offer_that_has_only_just_been_made_is_left() -> None:
    world = World()
    world.offer("r", 64, 16)
    world.now += FRESH_S / 2
    assert reclaim(world, 100) == set()
    world.now += FRESH_S
    assert reclaim(world, 100) == {"r"}


def test_an_offer_that_is_still_computed_is_left() -> None:
    world = World()
    world.offer("r", 32, 8, last=False)
    world.now += 10
    assert reclaim(world, 100) == set()


def test_an_offer_that_is_claimed_is_left() -> None:
    world = World()
    world.hold.add("gather")
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.run()
    world.now += 10
    assert reclaim(world, 100) == set()
    world.hold.clear()
    world.run()
    assert isinstance(world.answers()["r"], Done)
    world.check_rest()


def test_an_offer_that_is_awaited_is_left_for_as_long_as_that_is_said() -> None:
    world = World()
    world.offer("r", 64, 16)
    world.expect("r")
    wait(world, 2 * AWAITED_S)
    assert reclaim(world, 100) == set()
    world.abandon("r")
    wait(world, AWAITED_S + 1)
    assert reclaim(world, 100) == {"r"}


def test_an_offer_is_left_that_was_awaited_before_it_was_made() -> None:
    world = World()
    world.expect("r")
    wait(world, 2.0)
    world.offer("r", 64, 16)
    world.now += FRESH_S
    assert reclaim(world, 100) == set()
    outbound = world.sources[0].outbound
    assert outbound.unclaimed(world.now + AWAITED_S + 1) == [outbound.offers["r"]]


def test_two_sinks_that_wait_for_equal_prompts_hold_one_each() -> None:
    world = World()
    for number in range(3):
        world.offer(f"r{number}", 64, 16, room="same")
    source = world.sources[0]
    world.now += 50
    for boot in ("one", "two"):
        world.do(source, source.outbound.hold(boot, ("same",), world.now))
    world.now += FRESH_S
    assert reclaim(world, 100) == {"r2"}
    wait(world, 51)
    assert set(world.released()) == {"r2"}


def test_nobody_is_told_before_all_ranks_of_a_source_can_hear_it() -> None:
    world = World(sources=2)
    for number in range(2):
        world.offer(f"r{number}", 64, 16)
    world.hold.add("hello")
    world.expect("r0")
    world.pass_time(0.0)
    world.pass_time(0.1)
    world.hold.clear()
    world.step()  # a session with the first rank
    world.pass_time(0.1)
    assert not world.holds
    world.run()
    wait(world, 0.2)
    assert len(world.holds) >= 2, "both ranks hear of it, without waiting for the next round"


def test_what_is_said_of_unknown_rooms_and_requests_is_nothing() -> None:
    world = World()
    source, sink = world.sources[0], world.sinks[0]
    assert source.outbound.hold("boot", ("nowhere",) * 1000, 0.0) == []
    assert source.outbound.reclaim(1 << 40, 0.0) == []
    assert sink.inbound.abandon("nobody", 0.0) == []


def test_expected_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.inbound.MOST_WANTS", 3)
    world = World()
    for number in range(5):
        world.expect(f"r{number}")
    assert len(world.sinks[0].inbound.awaited) == 3


def test_many_rooms_are_said_in_several_messages() -> None:
    from kvbridge.exchange.awaited import holds

    said = holds([f"room {number}" for number in range(2500)])
    assert [len(hold.rooms) for hold in said] == [1024, 1024, 452]
    assert all(isinstance(hold, Hold) for hold in said)
