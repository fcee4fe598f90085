"""Transfers that are abandoned, or lose an agent, at random moments: nobody writes where they may no longer."""

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
    reads_past_the_lease,
    receivers_agent_dies,
    senders_agent_dies,
    stands_still_for_a_while,
    stands_still_over_a_withdrawal,
)

# A scatter, or a read, of 4 MiB outlasts an engine's waking up: were Failed told while one runs, it would show.
SCALE = Scale(devices=("cpu", "cpu"), route="nixl", tokens=512, slot_bytes=4 << 20, receive_slots=4, send_slots=2)
# A sample that the sender compares would keep Done back, and a read that counts too late from showing.
PULLED = replace(SCALE, route="pull", more={"verify": "never"})


@pytest.fixture(scope="module", params=[SCALE, PULLED], ids=lambda scale: scale.route)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(tmp_path_factory.mktemp("disturbed"), request.param) as pair:
        yield pair


@pytest.mark.proves("G7")
def test_nobody_writes_after_failed(pair: Pair) -> None:
    abandons(pair, seed=1, rounds=20)


@pytest.mark.proves("G13")
def test_what_is_read_while_the_agent_stands_still_never_counts(pair: Pair) -> None:
    if pair.scale.route == "pull":  # what is pulled is read at once: chance would stop no agent in time
        reads_past_the_lease(pair)
    else:
        stands_still_over_a_withdrawal(pair, seed=4, rounds=8)


@pytest.mark.proves("G20")
def test_the_receivers_agent_dies(pair: Pair) -> None:
    receivers_agent_dies(pair, seed=2, times=1)


@pytest.mark.proves("G5", "G21")
def test_the_senders_agent_dies(pair: Pair) -> None:
    senders_agent_dies(pair, seed=3, times=2)


def test_an_agent_that_stood_still_costs_time_and_no_transfer(tmp_path: Path) -> None:
    with pair_of(tmp_path, replace(SCALE, route="pull")) as pair:
        stands_still_for_a_while(pair)
