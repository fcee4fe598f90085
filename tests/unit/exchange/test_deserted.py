"""Receivers that never come back, their host gone: what the sender sees of it, and when its offers end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbridge.exchange.sender import LOST_S
from tests.unit.exchange.world import World

pytestmark = pytest.mark.proves("G16")

HOLD_S = 100.0


def dies(world: World, *names: str) -> None:
    """The sender notices once, where it has a session."""
    for name in names:
        node = world.nodes[name]
        node.is_dead = True
        if world.sender.accepted.pop(node.incarnation, None) is not None:
            world.do(world.sender, world.sender.sending.lost(node.incarnation))
    world.events[:] = [each for each in world.events if each[0] != "message"]
    world.run()


def everyone(world: World) -> list[str]:
    return [each.name for each in world.receivers]


def before_it_claims(world: World) -> None:
    world.offer("r", 64, 16)
    dies(world, *everyone(world))


def before_anything_is_offered(world: World) -> None:
    world.fetch("r", 64)
    dies(world, *everyone(world))
    world.serve("r", 64, 16)


def while_it_fetches(world: World) -> None:
    world.offer("r", 32, 8, last=False)
    world.fetch("r", 64)
    dies(world, *everyone(world))


def before_its_other_rank_claims(world: World) -> None:
    world.offer("r", 32, 8, last=False)
    world.want("r", 64, at=world.receivers[0])
    world.run()
    dies(world, *everyone(world))


def one_after_the_other(world: World) -> None:
    two_have_claimed(world)
    dies(world, "D1", "D2", "D3")


def while_another_rank_goes_on(world: World) -> None:
    """That one has its rows, and dies too."""
    two_have_claimed(world)
    world.offer("r", 64, 8, 8)
    world.run()
    assert "r" in world.answers(1)
    dies(world, "D1", "D2", "D3")


def two_have_claimed(world: World) -> None:
    """The first is lost, the second still fetches."""
    world.offer("r", 32, 8, last=False)
    for node in world.receivers[:2]:
        world.want("r", 64, at=node)
    world.run()
    dies(world, "D0")
    world.pass_time(0.0)
    world.pass_time(LOST_S)
    assert world.sender.sending.offers


# What an offer of a dead receiver looks like, and after how long it is given back. One that nobody has claimed is like
# one whose decode has not begun, or is tried on another engine: it is there until `hold_s`, or until its engine needs
# the blocks (`Reclaim`).
CASES: dict[tuple[Callable[[World], None], int], tuple[float, str]] = {
    (before_it_claims, 1): (HOLD_S, "offer_expired"),
    (before_it_claims, 2): (HOLD_S, "offer_expired"),
    (before_anything_is_offered, 1): (HOLD_S, "offer_expired"),
    (before_anything_is_offered, 2): (HOLD_S, "offer_expired"),
    (while_it_fetches, 1): (0.0, "peer_lost"),
    (while_it_fetches, 2): (0.0, "peer_lost"),
    (before_its_other_rank_claims, 2): (LOST_S, "peer_lost"),
    (one_after_the_other, 4): (LOST_S, "peer_lost"),
    (while_another_rank_goes_on, 4): (LOST_S, "peer_lost"),
}


@pytest.mark.parametrize(("dying", "receivers"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_an_offer_ends_by_what_its_sender_sees(dying: Callable[[World], None], receivers: int) -> None:
    seconds, code = CASES[dying, receivers]
    world = World(receivers=receivers)
    world.begin("before")
    dying(world)
    if seconds:
        world.pass_time(0.0)  # a tick is when it begins to count
        world.pass_time(seconds - 1.0)
        assert world.sender.sending.offers
        if code == "offer_expired":
            assert world.sender.sending.unclaimed(world.now), "its engine can have the blocks whenever it needs them"
        world.pass_time(1.0)
    assert not world.sender.sending.offers
    assert world.released()["r"].code == code, world.released()["r"]
    assert not world.sender.sending.outgoing_transfers


def after_its_first_rank_was_cut_off() -> World:
    """It had claimed what is offered so far, and its other rank has not."""
    world = World(receivers=2)
    world.begin("before")
    world.offer("r", 32, 8, last=False)
    first = world.receivers[0]
    world.want("r", 64, at=first)
    world.run()
    world.lose_link(first, world.sender)
    world.run()
    return world


@pytest.mark.parametrize("before_s", [LOST_S - 1.0, None], ids=["in time", "before the sender has ticked"])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_receiver_that_comes_again_is_served(is_slow: bool, before_s: float | None) -> None:
    """And its other rank, however slow that is."""
    world = after_its_first_rank_was_cut_off()
    if before_s is not None:
        world.pass_time(before_s)
    world.want("r", 64, at=world.receivers[0])
    world.offer("r", 64, 8, 8)
    world.run()
    world.pass_time(0.0)
    world.pass_time(2 * LOST_S if is_slow else 1.0)
    world.want("r", 64, at=world.receivers[1])
    world.run()
    world.check_done("r")


def test_a_rank_that_comes_too_late_hears_why() -> None:
    world = World(receivers=2)
    world.begin("before")
    before_its_other_rank_claims(world)
    world.pass_time(0.0)
    world.pass_time(LOST_S)
    late = world.receivers[1]
    late.is_dead = False
    world.do(late, late.receiving.unreachable("P0", "peer_lost", "cut", world.now))
    world.want("r", 64, at=late)
    world.run()
    answer = world.failure("r", 1)
    assert answer.code == "peer_lost" and "1 of 2 ranks of the same want never came" in answer.reason


def test_another_rank_that_comes_does_not_stand_for_the_lost_one() -> None:
    """A third never does."""
    world = World(receivers=4)
    world.begin("before")
    world.offer("r", 64, 16)
    world.hold.add("gather")
    world.want("r", 64, at=world.receivers[0])
    world.run()
    world.hold.clear()
    dies(world, "D0")
    world.pass_time(0.0)
    world.want("r", 64, at=world.receivers[1])
    world.run()
    assert world.sender.sending.offers
    world.pass_time(LOST_S)
    assert world.released()["r"].code == "peer_lost"
