"""The shard assignment of a set of sessions is cached until one of them changes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import pytest

from kvbridge.errors import PeerError
from kvbridge.exchange import wants
from kvbridge.exchange.session import Session
from kvbridge.exchange.wants import ShardAssignment
from kvbridge.geometry.shard import assign
from tests.unit.exchange.world import World


def sessions_of(world: World) -> Mapping[str, Session]:
    world.begin()
    sessions = world.receivers[0].receiving._senders.whole("P0")
    assert sessions is not None and len(sessions) == len(world.senders)
    return sessions


def test_the_same_sessions_are_assigned_once_and_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wants, "assign", assign)  # other tests here remember what it finds (memo.py)
    world = World(senders=2)
    sessions, pool, assignment = sessions_of(world), world.receivers[0].engine.pool, ShardAssignment()
    first, *_ = assignment.takes("P0", sessions, pool)
    senders = world.receivers[0].receiving._senders
    assert senders.whole("P0") is sessions and assignment.takes("P0", sessions, pool)[0] is first
    senders.enter("P1", sessions["P1"])
    assert senders.whole("P0") is sessions, "nothing has changed"
    senders.enter("P1", replace(sessions["P1"]))
    others = senders.whole("P0")
    assert others is not None
    again, *_ = assignment.takes("P0", others, pool)
    assert again == first and again is not first
    assert assignment.takes("P0", sessions, copy(pool))[0] is not first
    assignment.forget()
    assert assignment.takes("P0", sessions, pool)[0] is not first
    senders.leave("P1")
    assert senders.whole("P0") is None


def test_a_rank_that_is_missing_is_named() -> None:
    world = World(senders=2)
    sessions = sessions_of(world)
    with pytest.raises(PeerError, match=r"expected 2, the agents hold \[1\]"):
        ShardAssignment().takes("P0", {"P1": sessions["P1"]}, world.receivers[0].engine.pool)
