"""The shard assignment of a set of sessions is cached until one of them changes."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest

from kvbridge.errors import PeerError
from kvbridge.exchange.known_senders import ShardAssignment
from kvbridge.exchange.session import Session
from tests.unit.exchange.world import World


def sessions_of(world: World) -> list[Session]:
    world.begin()
    return [world.receivers[0].receiving._senders.open[node.name] for node in world.senders]


def test_the_same_sessions_are_assigned_once_and_others_anew() -> None:
    world = World(senders=2)
    sessions, pool, assignment = sessions_of(world), world.receivers[0].engine.pool, ShardAssignment()
    first, _ = assignment.takes("P0", sessions, pool)
    assert assignment.takes("P0", list(sessions), pool)[0] is first
    again, _ = assignment.takes("P0", [sessions[0], replace(sessions[1])], pool)
    assert again == first and again is not first
    assert assignment.takes("P0", sessions, copy(pool))[0] is not first
    assignment.forget()
    assert assignment.takes("P0", sessions, pool)[0] is not first


def test_a_rank_that_is_missing_is_named() -> None:
    world = World(senders=2)
    sessions = sessions_of(world)
    with pytest.raises(PeerError, match=r"expected 2, the agents hold \[1\]"):
        ShardAssignment().takes("P0", sessions[1:], world.receivers[0].engine.pool)
