"""A slice of the matrix of `tests.faults.cases`; `make test-faults` tells all of it, three times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbridge.failpoints import PLACES

from .cases import all_cases
from .runner import Runner

SLICE = (
    "kill the source's agent at source.gathered",
    "kill the source's agent at source.write_posted",
    "kill the sink's agent at sink.notice_landed",
    "kill the sink's agent at sink.claim_sent",
    "kill the source's engine at engine.offer_sent",
    "kill the sink's engine at engine.want_sent",
    "stop the source's agent at source.write_begun",
    "stop the sink's agent at sink.scatter_begun",
    "stop the sink's engine at engine.done_heard",
    "kill the source's agent at source.drained_sent",
    "fail the source's agent at source.write_begun",
    "fail the sink's agent at sink.scatter_begun",
)
CASES = {case.id: case for case in all_cases()}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def test_the_matrix_has_every_failpoint_killed_and_stopped() -> None:
    for name in PLACES:
        actions = {case.action for case in CASES.values() if case.name == name}
        assert {"kill", "stop"} <= actions, name


@pytest.mark.parametrize("case", SLICE)
def test_survives(runner: Runner, case: str) -> None:
    runner.tell(CASES[case])


def test_an_engine_that_comes_back_costs_its_agents_nothing(runner: Runner) -> None:
    """UCX kept a TCP connection for every time that a peer's engine came and went."""
    world = runner.world()
    before = world.held()
    for _ in range(4):
        world.source.engine.close()
        world.source.start_engine()
        world.serves()
    for role, held in world.held().items():
        assert held.is_within(before[role]), f"{role}: {before[role]} then {held}"
