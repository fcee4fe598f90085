"""If slots are scarce, whoever has waited longest goes first, at the receiver and at the sender."""

from __future__ import annotations

import pytest
from kvbridge_proto.engine import Done

from tests.unit.exchange.world import World

pytestmark = pytest.mark.proves("G18")

LONG = 240


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("slots", "local"), [(2, 2), (1, 4), (4, 1), (8, 2)])
def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(slots: int, local: int, seed: int) -> None:
    world = World(1, 1, slots=slots, local=local, seed=seed)
    world.offer("long", LONG, LONG // 4)
    world.want("long", LONG)
    for _ in range(25):
        world.step()
    before = world.placed("long")
    world.offer("short", 16, 4)
    world.want("short", 16)
    while "short" not in world.answers():
        assert world.step()
    assert isinstance(world.answers()["short"], Done)
    after = world.placed("long")
    assert before is not None and after is not None and after - before < LONG // 4 // 2
    world.run()
    world.check_done("long")
    assert sum(world.scatters.values()) == LONG // 4 + 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("short", "slots", "local"), [(4, 2, 8), (12, 2, 8), (12, 160, 1)])
def test_a_long_prompt_gets_its_turn_however_many_short_ones_come(
    short: int, slots: int, local: int, seed: int
) -> None:
    """Who has just come has not waited longest: each round of all is one chunk for the long one as well."""
    world = World(1, 1, slots=slots, local=local, seed=seed)
    world.offer("long", LONG, LONG // 4)
    world.want("long", LONG)
    for _ in range(40):
        world.step()
    begun = ended = 0
    while ended < 10 * short:
        ended = len(world.answers()) - ("long" in world.answers())
        while begun - ended < short:
            world.offer(f"short {begun}", 4, 1)
            world.want(f"short {begun}", 4)
            begun += 1
        assert world.step()
    placed = world.placed("long")
    assert placed is None or placed >= 16


@pytest.mark.parametrize("seed", range(5))
def test_many_get_on_at_one_pace(seed: int) -> None:
    """At any moment nobody is more than a few chunks ahead, however the slots become free."""
    world = World(1, 1, slots=3, local=2, seed=seed)
    names = [f"r{i}" for i in range(5)]
    for name in names:
        world.offer(name, 80, 20)
        world.want(name, 80)
    most = 0
    while world.step():
        landed = [placed for name in names if (placed := world.placed(name)) is not None]
        if len(landed) == len(names):
            most = max(most, max(landed) - min(landed))
    assert len(world.answers()) == len(names) and 0 < most <= 5
    world.check_rest()
