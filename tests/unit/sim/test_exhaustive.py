"""Every order of events in a small transfer while an adversary cuts, restarts, cancels and delays: all states."""

from __future__ import annotations

from collections import deque

import pytest

from kvbridge.exchange.actions import Action
from kvbridge.exchange.receiver import Receiver
from kvbridge.exchange.transfer import OpenWant
from kvbridge.geometry.unfilled import Filling
from kvbridge.state_machines import IllegalEvent
from tests.unit.exchange.network import Network, Wrong
from tests.unit.sim.model import State
from tests.unit.sim.mutations import switched_off

ADVERSARY = ("cut", "restart", "abandon", "withdraw", "repeat", "fails", "remain", "late", "lie")
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
        for following in state.following(moves):
            if (key := following.key) not in seen:
                seen.add(key)
                waiting.append(following)
                assert len(seen) <= MOST_STATES, "more states than there should be"
    return len(seen), rests


def test_the_transfer_has_two_chunks() -> None:
    state = State(1, 8, slots=2, local=2, budget={})
    while not state.sender.sending.outgoing_transfers:
        state.make(state.moves()[0])
    assert [out.plan.chunks for out in state.sender.sending.outgoing_transfers.values()] == [2]


@pytest.mark.parametrize(
    ("wants", "slots", "budget", "at_least"),
    [
        (1, 2, {"abandon": 1, "cut": 1, "restart": 1, "late": 1}, 2000),
        (1, 2, {"abandon": 1, "cut": 1, "fails": 1, "repeat": 1}, 1000),
        (1, 2, {"withdraw": 1, "cut": 1, "late": 1}, 500),
        (2, 1, {"fails": 1, "remain": 1}, 150),
        (2, 2, {"fails": 1, "remain": 1}, 200),
        (1, 1, {"abandon": 1, "cut": 2, "restart": 1}, 200),
        (2, 2, {"abandon": 1, "lie": 1}, 2000),
        (2, 1, {"cut": 1, "abandon": 1}, 200),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_no_order_of_events_breaks_it(wants: int, slots: int, budget: dict[str, int], at_least: int) -> None:
    """No slot under two leases, no row of another chunk, one answer; in the end everything is free again."""
    states, rests = explore(State(wants, 8, slots=slots, local=min(2, 3 - wants), budget=budget))
    assert states >= at_least and rests


@pytest.mark.parametrize(
    ("lag", "slots", "budget", "at_least"),
    [
        ("receiver", 1, {"abandon": 1, "cut": 1}, 500),
        ("receiver", 1, {"fails": 1, "remain": 1}, 70),
        ("receiver", 1, {"repeat": 1, "withdraw": 1}, 500),
        ("receiver", 2, {"abandon": 1}, 500),
        ("sender", 1, {"abandon": 1, "cut": 1}, 500),
        ("sender", 1, {"fails": 1, "remain": 1}, 100),
        ("sender", 1, {"withdraw": 1, "late": 1}, 100),
        ("sender", 2, {"abandon": 1, "restart": 1}, 1000),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_no_order_of_events_breaks_it_when_the_data_plane_hears_and_is_heard_late(
    lag: str, slots: int, budget: dict[str, int], at_least: int
) -> None:
    """Landings cross a stop, notices come between it and quiet, leases are taken back before they are heard of; chunks
    are begun after the exchange has stopped them."""
    states, rests = explore(State(1, 8, slots=slots, local=1, budget=budget, lag=lag))
    assert states >= at_least and rests


@pytest.mark.parametrize(
    ("budget", "at_least"), [({"abandon": 1, "cut": 1}, 100), ({"restart": 1}, 30), ({"withdraw": 1}, 30)], ids=str
)
def test_no_order_of_events_breaks_it_when_layers_get_zeros_meanwhile(budget: dict[str, int], at_least: int) -> None:
    """Zeros are written before Done, and never once a want was answered."""
    states, rests = explore(State(1, 4, slots=1, local=1, budget=budget, drafts=1))
    assert states >= at_least and rests


@pytest.mark.parametrize(("budget", "seen"), [({}, "is done without its zeros"), ({"abandon": 1}, "gets zeros after")])
def test_the_search_notices_zeros_that_nobody_waits_for(
    budget: dict[str, int], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Receiver._fill

    def forgotten(self: Receiver, wanted: OpenWant, filling: Filling) -> list[Action]:
        actions, wanted.filling = right(self, wanted, filling), ""
        return actions

    monkeypatch.setattr(Receiver, "_fill", forgotten)
    if "abandon" in budget:
        monkeypatch.setattr(Network, "_tell", lambda self, node, said: node.answers.update({said.request: said}))
    with pytest.raises(Wrong, match=seen):
        explore(State(1, 4, slots=1, local=1, budget=budget, drafts=1))


@pytest.mark.parametrize(
    ("rule", "slots", "local", "lag"),
    [
        ("free_quarantined_at_once", 2, 2, ""),
        ("drained_while_writing", 2, 2, ""),
        ("lost_link_is_dead_sender", 2, 2, ""),
        ("release_while_read", 2, 2, ""),
        ("forget_lost_transfer_slots", 2, 2, ""),
        ("land_chunk_twice", 2, 1, ""),  # the second lease waits for a local slot: it is free to lie with
        ("scatter_after_end", 1, 1, "receiver"),
        ("failed_while_scattering", 1, 1, "receiver"),
        ("send_what_is_to_stop", 1, 1, "sender"),
        ("gathered_too_soon", 1, 1, "sender"),
        ("release_while_read", 1, 1, "sender"),
    ],
)
def test_the_search_notices_a_rule_that_is_off(rule: str, slots: int, local: int, lag: str) -> None:
    budget = {"abandon": 1, "cut": 1} if lag else {"abandon": 1, "cut": 1, "withdraw": 1, "repeat": 1, "lie": 1}
    with switched_off(rule), pytest.raises((Wrong, IllegalEvent)):
        explore(State(1, 8, slots=slots, local=local, budget=budget, lag=lag))


def test_a_slot_is_not_lent_to_another_while_what_landed_in_it_is_read() -> None:
    with switched_off("free_slot_while_scattering"), pytest.raises(Wrong, match="has"):
        explore(State(2, 8, slots=2, local=1, budget={"fails": 1}))


def test_a_chunk_that_landed_under_two_leases_is_not_another_chunk() -> None:
    """The one thing that a lying sender could gain without that rule: Done with rows that never came."""
    with switched_off("land_chunk_twice"), pytest.raises(Wrong, match="is done without"):
        explore(State(1, 8, slots=2, local=1, budget={"lie": 1}))


def test_a_repeated_notice_counts_once_by_either_of_two_rules() -> None:
    """Its chunk has landed, and its lease is used up; without both, a slot is read that another chunk is written to."""
    state = State(1, 8, slots=1, local=2, budget={"repeat": 1})
    with switched_off("land_chunk_twice"):
        explore(state)
        with switched_off("ignore_lease_generation"), pytest.raises((Wrong, IllegalEvent)):
            explore(state)
