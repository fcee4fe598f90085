"""A request whose agents stand still in its middle, so that it can be aborted there, or they can be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.failpoints import VARIABLE
from testing.kept import Kept
from testing.waiting import wait_for
from tests.system.engines.engine_process import Rows
from tests.system.engines.fleet import Fleet, prompt
from tests.system.sglang.rows import assert_carried

STANDS = "receiver.read_begun=stop"
BACK_S = 60.0  # for an engine to attach to another agent, and for requests to travel again
Check = Callable[[Rows, Rows], None]


@dataclass(frozen=True)
class Pairs:
    """Engines between which rows travel: to two ranks, and from two. `is_like_alone`: tokens are those of one alone."""

    fleet: Fleet
    to_two: tuple[str, str]
    from_two: tuple[str, str]
    check: Check = assert_carried
    is_like_alone: bool = False


class Interrupted:
    """Tests of a module's fixture `pairs`: a request is aborted, or agents are killed, while its rows travel."""

    def test_a_request_is_aborted(self, pairs: Pairs) -> None:
        sender, receiver = pairs.to_two
        _, wanted = about_to_read(pairs.fleet, sender, receiver, prompt(900, seed=100))
        pairs.fleet[receiver].abort(wanted)
        go_on(pairs.fleet, receiver)
        travels(pairs, sender, receiver, seed=2101)

    def test_the_receivers_agents_are_killed(self, pairs: Pairs) -> None:
        """What was to come is computed where it was to be decoded."""
        (sender, receiver), tokens = pairs.to_two, prompt(900, seed=102)
        _, wanted = about_to_read(pairs.fleet, sender, receiver, tokens)
        for each in pairs.fleet.agents[receiver]:
            each.process.kill()
        answer = pairs.fleet[receiver].result(wanted)
        assert (answer.cached, len(answer.tokens)) == (0, 12)
        assert not pairs.is_like_alone or list(answer.tokens) == pairs.fleet.alone(tokens, 12)
        start_agents(pairs.fleet, receiver)
        travels(pairs, sender, receiver, seed=2103)

    def test_the_senders_agents_are_killed(self, pairs: Pairs) -> None:
        """The receiver counts what it has read under a lease, or computes the prompt; never other rows."""
        (sender, receiver), tokens = pairs.from_two, prompt(900, seed=104)
        request, wanted = about_to_read(pairs.fleet, sender, receiver, tokens)
        ours = pairs.fleet.rows(sender, request, 0, len(tokens) - 1)
        for each in pairs.fleet.agents[sender]:
            each.process.kill()
        go_on(pairs.fleet, receiver)
        answer = pairs.fleet[receiver].result(wanted)
        assert not pairs.is_like_alone or list(answer.tokens) == pairs.fleet.alone(tokens, 12)
        if answer.cached:
            assert answer.cached == len(tokens) - 1
            pairs.check(ours, pairs.fleet.rows(receiver, wanted, 0, len(tokens) - 1))
        start_agents(pairs.fleet, sender)
        travels(pairs, sender, receiver, seed=2105)


def start_agents(fleet: Kept[Any], name: str, armed: str = "") -> None:
    """Others beside this engine, which will fail as told; they are waited for."""
    for each in fleet.agents[name]:
        each.stop()
    os.environ[VARIABLE] = armed
    try:
        fleet.start_agents(name)
    finally:
        del os.environ[VARIABLE]
    for each in fleet.agents[name]:
        wait_for(lambda each=each: each.status.engine is not None, BACK_S)


def travels(pairs: Pairs, sender: str, receiver: str, seed: int) -> None:
    """Nothing is held, and the next request goes from one engine to the other, row for row."""
    fleet = pairs.fleet
    for name in (sender, receiver):
        fleet[name].wait_empty(BACK_S)
    end = time.monotonic() + BACK_S
    while True:
        tokens = prompt(200, seed=seed)
        answer, ours, theirs = fleet.crossed(sender, receiver, tokens)
        assert not pairs.is_like_alone or list(answer.tokens) == fleet.alone(tokens, 12)
        if answer.cached == len(tokens) - 1:
            pairs.check(ours, theirs)
            break
        assert time.monotonic() < end, "requests do not travel again"
        seed += 1
    for name in (sender, receiver):
        fleet[name].wait_empty(BACK_S)


def about_to_read(fleet: Fleet, sender: str, receiver: str, tokens: list[int]) -> tuple[str, str]:
    """The prefill's name and that of a request whose agents stand still, about to read its rows."""
    fleet.start(receiver)
    start_agents(fleet, receiver, STANDS)
    request, prefilled = fleet.prefill(sender, tokens)
    wanted = fleet.name(f"d-{receiver}")
    fleet[receiver].submit(wanted, tokens, 12, prefilled.params)
    wait_standing(fleet, receiver)
    return request, wanted


def wait_standing(fleet: Kept[Any], name: str) -> None:
    wait_for(lambda: are_standing(fleet, name), BACK_S)


def are_standing(fleet: Kept[Any], name: str) -> bool:
    """All agents of this engine."""
    stats = [Path(f"/proc/{each.process.pid}/stat").read_text() for each in fleet.agents[name]]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def go_on(fleet: Kept[Any], name: str) -> None:
    for each in fleet.agents[name]:
        os.kill(each.process.pid, signal.SIGCONT)
