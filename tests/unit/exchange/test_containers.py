"""Deadlines and turns keep nothing that is over."""

from __future__ import annotations

import pytest

from kvbridge.exchange.containers import Deadlines, FairQueue, PeerQueue, Shares


def test_deadlines_come_due_in_order_and_those_that_moved_or_were_cleared_are_not_kept() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set("moved", 1000.0 + number)
        deadlines.set(f"cleared {number}", 86400.0)
        deadlines.clear(f"cleared {number}")
    assert len(deadlines) < 100
    for number in range(1000):
        deadlines.set(f"kept {number}", float(number))
    for number in range(0, 1000, 2):
        deadlines.clear(f"kept {number}")
    assert deadlines.next() == 1.0 and deadlines.due(0.9) == []
    assert deadlines.due(500.0) == [f"kept {number}" for number in range(1, 500, 2)]
    assert deadlines.due(1e6) == [*(f"kept {number}" for number in range(501, 1000, 2)), "moved"]
    assert deadlines.next() is None and deadlines.due(1e6) == []
    deadlines.set("earlier", 5.0)
    deadlines.set("earlier", 2.0)
    assert deadlines.due(3.0) == ["earlier"] and deadlines.next() is None


def test_turns_come_in_order_and_what_is_gone_is_not_kept() -> None:
    turns: FairQueue[str] = FairQueue()
    for name, turn in (("c", 3), ("a", 1), ("b", 1), ("a", 0)):
        turns.add(name, turn, name.upper())
    turns.discard("a")
    turns.add("a", 2, "A again")
    assert [turns.take() for _ in range(4)] == ["B", "A again", "C", None]
    for number in range(10_000):
        turns.add(f"gone {number}", number, "")
        turns.discard(f"gone {number}")
    assert not turns and len(turns._heap) < 100


def test_a_peer_that_may_take_nothing_keeps_its_place_and_holds_up_nobody() -> None:
    turns: PeerQueue[str] = PeerQueue()
    for peer, name, turn in (("p", "late", 9), ("p", "early", 1), ("q", "second", 2), ("q", "third", 3)):
        turns.add(peer, name, turn, name)
    assert [turns.take(lambda peer: peer != "p") for _ in range(3)] == ["second", "third", None] and len(turns) == 2
    turns.add("q", "fourth", 4, "fourth")
    turns.discard("p", "late")
    assert [turns.take(lambda peer: True) for _ in range(3)] == ["early", "fourth", None]
    for number in range(10_000):
        turns.add(number, "gone", number, "")
        turns.discard(number, "gone")
    assert not len(turns) and not turns._of and len(turns._peers._heap) < 100


@pytest.mark.parametrize("slots", range(1, 40))
def test_a_peer_that_gives_nothing_back_leaves_a_third_and_everybody_may_have_one(slots: int) -> None:
    shares, free = Shares(), slots
    for frozen in ("one", "another"):
        while shares.may_take(frozen, free):
            shares.take(frozen)
            free -= 1
        assert free >= slots // 3 // (3 if frozen == "another" else 1)
    while free:
        assert shares.may_take(f"peer {free}", free)
        shares.take(f"peer {free}")
        free -= 1
    assert not shares.may_take("who comes last", 0)
    shares.give_back("one")
    assert shares.may_take("who comes last", 1)
