"""A sender and a receiver, in an order of events that no test has chosen."""

from __future__ import annotations

import pytest

from tests.unit.exchange.world import World


@pytest.fixture
def world() -> World:
    return World()
