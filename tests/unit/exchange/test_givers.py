"""What sessions give is worked out once, and again as soon as one of them is another."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest

from kvbridge.errors import PeerError
from kvbridge.exchange.givers import Givers
from kvbridge.exchange.session import Session
from tests.unit.exchange.world import World


def sessions_of(world: World) -> list[Session]:
    world.offer("r", 64, 16)
    world.want("r", 64)
    world.run()
    return [world.sinks[0].inbound._sources.open[node.name] for node in world.sources]


def test_the_same_sessions_are_assigned_once_and_others_anew() -> None:
    world = World(sources=2)
    sessions, pool, givers = sessions_of(world), world.sinks[0].home.pool, Givers()
    first = givers.takes("P0", sessions, pool)
    assert givers.takes("P0", list(sessions), pool) is first
    again = givers.takes("P0", [sessions[0], replace(sessions[1])], pool)
    assert again == first and again is not first
    assert givers.takes("P0", sessions, copy(pool)) is not first
    givers.forget()
    assert givers.takes("P0", sessions, pool) is not first


def test_a_rank_that_is_missing_is_named() -> None:
    world = World(sources=2)
    sessions = sessions_of(world)
    with pytest.raises(PeerError, match=r"expected 2, the agents hold \[1\]"):
        Givers().takes("P0", sessions[1:], world.sinks[0].home.pool)
