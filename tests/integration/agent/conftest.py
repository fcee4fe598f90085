"""Tests that are coroutines are run. Two engines, and a Player for the agent of either."""

from __future__ import annotations

import pytest

from tests.integration.agent.player import Player
from tests.support.loops import pytest_pyfunc_call  # noqa: F401
from tests.unit.exchange.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def receiver(world: World) -> Player:
    return Player(world.receivers[0].engine)


@pytest.fixture
def sender(world: World) -> Player:
    return Player(world.senders[0].engine)
