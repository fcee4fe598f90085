"""A slice of the matrix of `tests.system.faults.cases`, half of it with keys.

`make test-faults` runs all of it three times, the second time with keys.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from itertools import product

import pytest
from rich.console import Console

from kvbridge.commands.status import rendered
from kvbridge.failpoints import PLACES
from tests.system.faults.cases import ACTORS, Runner, all_cases
from tests.system.faults.world import QUIET_S

PLAIN = (
    "kill the sender's agent at sender.gathered",
    "kill the receiver's agent at receiver.notice_landed",
    "kill the sender's engine at engine.offer_sent",
    "fail the sender's agent at sender.write_begun",
    "kill the receiver's engine while the sender's agent is at sender.write_posted",
    "stop the sender's agent while the receiver's engine is at engine.want_sent",
)
KEYED = (
    "kill the sender's agent at sender.drained_sent",
    "stop the receiver's agent at receiver.scatter_begun",
    "fail the receiver's agent at receiver.scatter_begun",
    "kill the sender's agent while the receiver's agent is at receiver.claim_sent",
    "kill the receiver's agent while the sender's agent is at sender.write_begun",
    "kill the sender's engine while the sender's agent is at sender.gather_begun",
)
PULL = (
    "stop the sender's agent while the receiver's agent is at receiver.read_begun (pull)",
    "kill the sender's engine while the receiver's agent is at receiver.read_begun (pull)",
    "fail the receiver's agent at receiver.read_begun (pull)",
    "stop the receiver's agent at receiver.read_ended (pull)",
    "stop the sender's agent at sender.renewal_heard (pull)",
)
CASES = {case.id: case for case in all_cases()}
FOUR = ("sender's agent", "receiver's agent", "sender's engine", "receiver's engine")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def test_the_matrix_has_all_four_killed_and_stopped_at_every_failpoint_by_whoever_passes_it() -> None:
    assert {str(actor) for actor in ACTORS} == set(FOUR)
    cases = [(case.way, case.name, str(case.passer), str(case.victim), case.action) for case in all_cases()]
    assert len(cases) == len(CASES), "of two cases with one name only one is told"
    for name, place in PLACES.items():
        which, what = place.process.split()
        for way in ("slots", "pull") if place.way == "any" else (place.way,):
            for passer in (f"{role}'s {what}" for role in ("sender", "receiver") if which in (role, "either")):
                told = {case[3:] for case in cases if case[:3] == (way, name, passer)}
                assert set(product(FOUR, ("kill", "stop"))) <= told, f"{passer} at {name}"
        assert (place.error is None) == all(case[4] != "fail" for case in cases if case[1] == name), name


@pytest.mark.parametrize("case", KEYED)
def test_survives_with_keys(runner: Runner, case: str) -> None:
    runner.tell(CASES[case], is_keyed=True)


@pytest.mark.parametrize("case", PLAIN)
def test_survives(runner: Runner, case: str) -> None:
    runner.tell(CASES[case])


def test_an_engine_that_comes_back_costs_its_agents_nothing(runner: Runner) -> None:
    """UCX kept a TCP connection for every time that a peer's engine came and went."""
    world = runner.world()
    before = world.held()
    for _ in range(4):
        world.sender.engine.close()
        world.sender.start_engine()
        world.serves()
    for role, held in world.held().items():
        assert held.is_within(before[role]), f"{role}: {before[role]} then {held}"


def test_an_agent_that_answers_nothing_is_noticed(runner: Runner) -> None:
    """Nobody has said that it would stand still."""
    world = runner.world()
    world.calm(patience_s=3.0)
    world.receiver.agent.send_signal(signal.SIGSTOP)
    world.begin()
    with pytest.raises(AssertionError, match="no answer"):
        world.finish()
    world.hurts(world.receiver)
    world.wakes(world.receiver.agent, 0.0)
    world.finish()
    world.serves()
    world.is_clean()


def test_a_want_that_nobody_offers_ends_at_its_deadline(runner: Runner) -> None:
    world = runner.world()
    world.calm()
    world.sender.engine.send_signal(signal.SIGSTOP)
    (number,) = world.begin(1)
    while number not in world.receiver.ends:
        world.receiver.hear(0.02)
    assert world.receiver.ends[number]["code"] == "deadline"
    world.wakes(world.sender.engine, 0.0)
    world.finish()
    world.serves()
    world.is_clean()


def test_an_agent_says_that_it_was_started_to_fail(runner: Runner) -> None:
    world, said = runner.world(), "sender.drained_sent=pause@1000"
    world.restarts_agent(world.sender, "sender.drained_sent=pause:0.1@1000")
    status = world.sender.agent.status()
    assert status is not None and status.failpoints == (said,)
    shown = io.StringIO()
    Console(file=shown, width=200).print(rendered(status))
    assert f"FAILPOINTS ARE ON, this agent fails on purpose: {said}" in shown.getvalue()
    assert "FAILPOINTS ARE ON" in world.sender.agent.tail(200)
    world.sender.agent.end()
    with pytest.raises(AssertionError, match="bad_failpoint"):
        world.sender.start_agent("nowhere=kill")
        assert not world.sender.agent.is_dead(), world.sender.agent.tail(1)
    world.restarts_agent(world.sender)
    world.serves()
    unarmed = world.sender.agent.status()
    assert unarmed is not None and "FAILPOINTS" not in str(unarmed.counters)


@pytest.mark.proves("G3")
@pytest.mark.parametrize("case", PULL)
def test_survives_while_it_pulls(runner: Runner, case: str) -> None:
    told = runner.tell(CASES[case])
    if "sender's agent while" in case:  # or the story has not shown that what was read too late does not count
        assert "foreign rows" in told


def test_a_receiver_that_was_given_up_lets_go_of_the_memory(runner: Runner) -> None:
    """It stood still when its session ended, and when its sender's engine did: no message tells it afterwards."""
    world = runner.world(way="pull")
    world.calm()
    world.hurts(world.receiver)
    world.receiver.agent.send_signal(signal.SIGSTOP)
    world.sender.becomes(lambda status: not status.peers, QUIET_S)
    name = world.sender.job.name
    world.sender.engine.close()
    world.receiver.agent.send_signal(signal.SIGCONT)
    world.unmaps(name)
    world.sender.start_engine()
    world.serves()
    world.is_clean()
    world.holds_no_more()
