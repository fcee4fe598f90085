"""Two engines, and a Player for the agent of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from testing.pairs import Bench
from tests.integration.agent.player import Player
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


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bench_of(tmp_path: Path, stack: ExitStack) -> Callable[..., Bench]:
    """Starts a bench. Its arguments are those of Bench."""
    return partial(Bench, tmp_path, stack)
