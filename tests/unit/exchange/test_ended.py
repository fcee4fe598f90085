"""Claims on an offer that has ended, and wants that a rank says nothing to: they hear why, at once if it is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kvbridge_proto.engine import Done, Failed, Offer, Released
from kvbridge_proto.words import Blocks

from kvbridge.exchange.rooms import ENDED_S, Rooms
from tests.unit.exchange.world import World

SOON_S = 1.0


def withdrawn(world: World) -> None:
    world.offer("r", 64, 16)
    world.withdraw("r")


def expired(world: World) -> None:
    world.offer("r", 64, 16)
    world.pass_time(101)


def broken(world: World) -> None:
    world.offer_pieces("r", 16, (Blocks(0, 0, (10**6,)),))


def refused(world: World) -> None:
    world.offer("other", 64, 16)
    world.offer("another", 64, 16)
    world.offer("r", 64, 16)


def rescaled(world: World) -> None:
    world.offer("r", 64, 16)
    (source,) = world.sources
    world.do(source, source.outbound.rescaled("test", world.now))


ENDS = {
    "withdrawn": withdrawn,
    "offer_expired": expired,
    "block_out_of_range": broken,
    "too_many_offers": refused,
    "rescaled": rescaled,
}


def failure(world: World, request: str, sink: int = 0) -> str:
    answer = world.answers(sink)[request]
    assert isinstance(answer, Failed), answer
    return answer.code


@pytest.mark.parametrize("code", ENDS)
def test_a_claim_on_an_offer_that_has_ended_hears_at_once_why(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.outbound.MOST_OFFERS", 2)
    world = World()
    ENDS[code](world)
    world.want("r", 64)
    world.run()
    assert failure(world, "r") == code
    assert not world.nodes["P0"].outbound._rooms._ended


def only(world: World, sink: int, act: Callable[[], None]) -> None:
    """Only this rank of the sinks' engine does it."""
    others = [node for i, node in enumerate(world.sinks) if i != sink]
    nodes = dict(world.nodes)
    for node in others:
        del world.nodes[node.name]
    try:
        act()
    finally:
        world.nodes = nodes


@pytest.mark.parametrize("comes_again", [False, True])
def test_all_sinks_of_a_want_hear_the_same_though_another_is_offered_meanwhile(comes_again: bool) -> None:
    world = World(sinks=2)
    world.offer("r", 32, 8, last=False)
    only(world, 0, lambda: world.want("r", 64))
    world.run()
    world.withdraw("r", comes_again)
    world.run()
    assert failure(world, "r") == "withdrawn"
    comes_for_the_first(world)


def test_the_sinks_of_a_want_that_come_after_the_end_hear_though_another_is_offered_between() -> None:
    world = World(sinks=2)
    withdrawn(world)
    only(world, 0, lambda: world.want("r", 64))
    world.run()
    assert failure(world, "r") == "withdrawn"
    comes_for_the_first(world)


def comes_for_the_first(world: World) -> None:
    """Another is offered in the room, and only then the second sink of a want comes whose first has failed."""
    world.offer("s", 64, 16, room="r")
    only(world, 1, lambda: world.want("r", 64))
    world.run()
    assert failure(world, "r", 1) == "withdrawn"
    world.want("again", 64, room="r")
    world.run()
    assert all(isinstance(world.answers(sink)["again"], Done) for sink in (0, 1))
    world.check_rest()


def test_a_sink_that_never_came_in_time_hears_that_the_offer_expired() -> None:
    world = World(sinks=2)
    world.offer("r", 64, 16)
    only(world, 0, lambda: world.want("r", 64))
    world.run()
    world.pass_time(101)
    only(world, 1, lambda: world.want("r", 64))
    world.run()
    assert failure(world, "r", 1) == "offer_expired"
    world.check_rest()


def test_a_want_that_failed_may_come_again_under_its_name() -> None:
    world = World()
    withdrawn(world)
    world.want("r", 64)
    world.run()
    assert failure(world, "r") == "withdrawn"
    world.sinks[0].told.clear()
    world.want("r", 64)
    world.run()
    assert not world.answers(), "one offer's end is the answer to one want"
    world.offer("s", 64, 16, room="r")
    world.run()
    assert isinstance(world.answers()["r"], Done)
    world.check_rest()


def test_another_offer_in_the_room_is_what_claims_come_for() -> None:
    world = World()
    withdrawn(world)
    world.offer("s", 64, 16, room="r")
    world.want("r", 64)
    world.run()
    assert isinstance(world.answers()["r"], Done)
    world.want("next", 64, room="r")  # the end of the first is forgotten
    world.run()
    assert "next" not in world.answers()


def test_a_preempted_prompt_is_waited_for() -> None:
    world = World()
    world.offer("r", 64, 16)
    world.withdraw("r", comes_again=True)
    world.want("r", 64)
    world.run()
    assert not world.answers()
    world.offer("r~1", 64, 16, room="r")
    world.run()
    assert isinstance(world.answers()["r"], Done)
    world.check_rest()


def test_the_end_of_a_write_gives_nothing_back_of_what_is_offered_under_that_name_since() -> None:
    """Released comes when the blocks are read: what was gathered of them may be on its way, or late."""
    world = World()
    (source,) = world.sources
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.hold = {"write"}
    world.run()
    world.withdraw("r", comes_again=True)
    world.run()
    assert "r" in world.released() and source.outbound.outlets
    world.offer("r", 64, 16)
    world.hold.clear()
    world.run()
    assert not source.outbound.outlets and "r" in world.released() and "r" in source.outbound.offers
    world.want("next", 64, room="r")
    world.run()
    assert isinstance(world.answers()["next"], Done)
    assert [told.code for told in source.told if isinstance(told, Released)] == ["withdrawn", ""]
    assert not source.outbound.offers and source.sending.slots.free == len(source.sending.slots)


@pytest.mark.parametrize("end", [64, 0])
def test_an_offer_that_was_served_is_not_remembered(end: int) -> None:
    """The next equal prompt has the same room; its claim may come before its offer."""
    world = World(sinks=2)
    world.offer("a", 64, 16, room="prompt")
    world.want("a", end, room="prompt")
    world.run()
    world.withdraw("a")
    world.want("b", 64, room="prompt")
    world.run()
    assert "b" not in world.answers()
    world.offer("b", 64, 16, room="prompt")
    world.run()
    assert all(isinstance(world.answers(sink)["b"], Done) for sink in (0, 1))
    world.check_rest()


def test_of_two_equal_prompts_the_one_that_is_open_goes_first() -> None:
    world = World()
    for name in ("a", "b"):
        world.offer(name, 64, 16, room="prompt")
    world.withdraw("a")
    for name in ("c", "d"):
        world.want(name, 64, room="prompt")
    world.run()
    assert isinstance(world.answers()["c"], Done) and failure(world, "d") == "withdrawn"


def test_ends_are_forgotten_in_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.exchange.rooms.MOST_ENDED", 3)
    world = World()
    rooms: Rooms = world.nodes["P0"].outbound._rooms
    for number in range(5):
        world.offer(f"r{number}", 64, 16)
        world.withdraw(f"r{number}")
    assert list(rooms._ended) == ["r2", "r3", "r4"] and len(rooms._by_age) == 3
    world.pass_time(ENDED_S)
    world.want("r4", 64, deadline=SOON_S)
    world.run()
    assert "r4" not in world.answers() and not rooms._ended and not rooms._by_age


def test_an_engine_that_left_takes_its_ends_with_it() -> None:
    world = World()
    withdrawn(world)
    (source,) = world.sources
    world.do(source, source.outbound.engine_left(world.now))
    assert not source.outbound._rooms._ended


def test_claims_that_wait_for_a_rebuild_hear_of_an_end_at_once() -> None:
    world = World()
    (source,) = world.sources
    world.offer("r", 64, 16)
    source.outbound.pause(is_alone=True)
    world.want("r", 64)
    world.run()
    assert not world.answers()
    world.withdraw("r")
    world.run()
    assert failure(world, "r") == "withdrawn"
    world.check_rest()


def test_a_rank_that_offers_nothing_is_named_at_the_deadline() -> None:
    world = World(sources=2)
    source = world.nodes["P0"]
    said = Offer(room="r", request="r", tokens=64, blocks=(Blocks(0, 0, tuple(range(16))),), is_last=True, hold_s=100.0)
    world.want("r", 64)
    world.do(source, source.outbound.offer(said, source.home, 0.0))
    world.run()
    world.pass_time(50)
    world.settle()
    answer = world.answers()["r"]
    assert isinstance(answer, Failed) and answer.code == "deadline"
    assert answer.reason.endswith("chunks; nothing came from P1"), answer.reason


def test_a_rank_that_its_engine_has_not_named_is_missed_at_the_deadline() -> None:
    world = World(sources=2)
    for node in world.sources:
        node.home = replace(node.home, ranks=())
    world.want("r", 64)
    world.run(20)
    world.pass_time(50)
    answer = world.answers()["r"]
    assert isinstance(answer, Failed) and answer.code == "deadline"
    assert "1 of 2 ranks, for its engine has told P0 of 1 only" in answer.reason
