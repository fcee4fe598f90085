"""tests/integration/agent/test_abandon.py on GPUs, over every route, with some GiB in 128 MiB slots.

The stories of one route share a pair of agents and engines, so a run of the whole file starts few processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.agent.disturbed import (
    Pair,
    Scale,
    abandons,
    pair_of,
    receivers_agent_dies,
    senders_agent_dies,
    stands_still,
)

ONE, TWO = ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")


def scale(devices: tuple[str, str], route: str) -> Scale:
    tokens = 131072 if route == "pull" else 32768  # what is read in a few milliseconds is over before it is abandoned
    return Scale(devices, route, tokens=tokens, slot_bytes=128 << 20, receive_slots=6, send_slots=2)


SCALES = [
    *(
        pytest.param(scale(ONE, route), marks=pytest.mark.gpu, id=f"one-{route}")
        for route in ("pull", "direct", "nixl", "host")
    ),
    *(
        pytest.param(scale(TWO, route), marks=pytest.mark.multi_gpu, id=f"two-{route}")
        for route in ("pull", "direct", "nixl")
    ),
]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(tmp_path_factory.mktemp("disturbed"), request.param) as pair:
        yield pair


@pytest.mark.parametrize("pair", SCALES, indirect=True)
def test_nobody_writes_after_failed(pair: Pair) -> None:
    abandons(pair, seed=1, rounds=20)


@pytest.mark.parametrize("pair", SCALES, indirect=True)
def test_the_receivers_agent_dies(pair: Pair) -> None:
    receivers_agent_dies(pair, seed=2, times=1)


@pytest.mark.parametrize("pair", SCALES, indirect=True)
def test_the_senders_agent_dies(pair: Pair) -> None:
    senders_agent_dies(pair, seed=3, times=1)


@pytest.mark.parametrize("scale", [each for each in SCALES if each.id in ("one-direct", "one-nixl", "one-host")])
def test_the_senders_agent_stands_still(tmp_path: Path, scale: Scale) -> None:
    with pair_of(tmp_path, replace(scale, more={"silence_s": "2", "rebuild_s": "1"})) as pair:
        stands_still(pair, seed=4)
