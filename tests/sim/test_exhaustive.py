"""Every order in which a small transfer can go while an adversary cuts, restarts, cancels and delays: all states."""

from __future__ import annotations

from collections import deque

import pytest

from kvbridge.exchange.table import IllegalEvent
from tests.sim.model import State, Wrong, begin
from tests.sim.mutations import switched_off

ADVERSARY = ("cut", "restart", "abandon", "withdraw", "repeat", "fails", "late")
MOST_STATES = 40_000


def explore(first: State) -> tuple[int, int]:
    """Go through all states that can be reached: how many, and in how many of them only the adversary could go on."""
    seen, rests = {first.key}, 0
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        moves = state.moves()
        if all(move[0] in ADVERSARY for move in moves):
            state.check_rest()
            rests += 1
        for move in moves:
            following = state.after(move)
            if (key := following.key) not in seen:
                seen.add(key)
                waiting.append(following)
                assert len(seen) <= MOST_STATES, "more states than there should be"
    return len(seen), rests


def test_the_transfer_has_two_chunks() -> None:
    state = begin(1, 8, slots=2, local=2, budget={})
    while not state.outbound.outlets:
        state.make(state.moves()[0])
    assert [out.plan.chunks for out in state.outbound.outlets.values()] == [2]


@pytest.mark.parametrize(
    ("wants", "slots", "budget", "at_least"),
    [
        (1, 2, {"abandon": 1, "cut": 1, "restart": 1, "late": 1}, 2000),
        (1, 2, {"abandon": 1, "cut": 1, "fails": 1, "repeat": 1}, 1000),
        (1, 2, {"withdraw": 1, "cut": 1, "late": 1}, 500),
        (1, 1, {"abandon": 1, "cut": 2, "restart": 1}, 200),
        (2, 2, {"abandon": 1}, 2000),
        (2, 1, {"cut": 1, "abandon": 1}, 200),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_no_order_of_events_breaks_it(wants: int, slots: int, budget: dict[str, int], at_least: int) -> None:
    """No slot under two leases, no row of another chunk, one answer; in the end everything is free again."""
    states, rests = explore(begin(wants, 8, slots=slots, local=min(2, 3 - wants), budget=budget))
    assert states >= at_least and rests


@pytest.mark.parametrize(
    ("rule", "slots"),
    [
        ("doubtful slots are free at once", 2),
        ("drained is said while writes are under way", 2),
        ("a lost link counts as a dead source", 2),
        ("blocks are released while they are read", 2),
        ("a lost transfer's slots are forgotten", 2),
        ("a chunk may land twice", 1),
    ],
)
def test_the_search_misses_this_rule(rule: str, slots: int) -> None:
    budget = {"abandon": 1, "cut": 1, "withdraw": 1, "repeat": 1}
    with switched_off(rule), pytest.raises((Wrong, IllegalEvent)):
        explore(begin(1, 8, slots=slots, local=2, budget=budget))
