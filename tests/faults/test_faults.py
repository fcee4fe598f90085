"""A slice of the matrix of `tests.faults.cases`; `make test-faults` tells all of it, three times."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator

import pytest
from rich.console import Console

from kvbridge.commands.status import rendered
from kvbridge.failpoints import PLACES

from .cases import all_cases
from .runner import Runner

SLICE = (
    "kill the source's agent at source.gathered",
    "kill the source's agent at source.write_posted",
    "kill the sink's agent at sink.notice_landed",
    "kill the source's engine at engine.offer_sent",
    "kill the sink's engine at engine.want_sent",
    "stop the source's agent at source.write_begun",
    "stop the sink's agent at sink.scatter_begun",
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


def test_an_agent_that_answers_nothing_is_noticed(runner: Runner) -> None:
    """Nobody has said that it would stand still."""
    world = runner.world()
    world.calm()
    world.sink.agent.send(signal.SIGSTOP)
    world.begin()
    with pytest.raises(AssertionError, match="no answer"):
        world.finish()
    world.hurts(world.sink)
    world.wakes(world.sink.agent, 0.0)
    world.finish()
    world.serves()
    world.is_clean()


def test_an_agent_says_that_it_was_started_to_fail(runner: Runner) -> None:
    world, said = runner.world(), "source.drained_sent=pause@1000"
    world.restarts_agent(world.source, "source.drained_sent=pause:0.1@1000")
    status = world.source.agent.status()
    assert status is not None and f"kvbridge_failpoints_total{{armed={said}}}" in status.counters
    shown = io.StringIO()
    Console(file=shown, width=200).print(rendered(status))
    assert f"FAILPOINTS ARE ON, this agent fails on purpose: {said}" in shown.getvalue()
    assert "FAILPOINTS ARE ON" in world.source.agent.tail(200)
    world.source.agent.end()
    with pytest.raises(AssertionError, match="bad_failpoint"):
        world.source.start_agent("nowhere=kill")
        assert not world.source.agent.is_dead(), world.source.agent.tail(1)
    world.restarts_agent(world.source)
    world.serves()
    unarmed = world.source.agent.status()
    assert unarmed is not None and "FAILPOINTS" not in str(unarmed.counters)
