"""A request of real SGLang servers that is aborted, or whose agent is killed, while its rows travel."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvbridge.failpoints import VARIABLE
from testing.agents import AgentProcess
from testing.waiting import wait_for
from tests.system.sglang.fleet import Answer, Fleet, answer_of, assert_idle, prompt
from tests.system.sglang.test_faults import LATE_S, ask, failed

SEEDS = itertools.count(6400)  # no prompt is used twice


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server of a fleet that has one "alone"."""

    fleet: Fleet
    sender: str
    receiver: str

    @property
    def names(self) -> tuple[str, str]:
        return self.receiver, self.sender

    def crossed(self, tokens: list[int]) -> Answer:
        """The rows come; the tokens are one server's alone."""
        (answer,) = self.fleet.crossed(self.sender, self.receiver, tokens)
        self.fleet.assert_same_as_alone(tokens, answer)
        return answer


class Interrupted:
    """Tests of a module's fixture `pair`. `read`: which of a prompt's reads is interrupted; "" is the first."""

    read = ""

    @pytest.mark.parametrize("is_sender", [True, False], ids=["prefill", "decode"])
    def test_a_request_is_aborted_while_its_rows_travel(self, pair: Pair, is_sender: bool) -> None:
        halfway = Halfway(pair, pair.receiver, f"receiver.read_begun=pause:3{self.read}")
        pair.fleet[pair.sender if is_sender else pair.receiver].abort(halfway.rid)
        assert failed(answer := halfway.ends()), answer

    @pytest.mark.parametrize("place", ["sender.tables_sent", "receiver.read_begun", "receiver.read_ended"])
    def test_an_agent_is_killed_while_rows_travel(self, pair: Pair, place: str) -> None:
        is_sender = place.startswith("sender")
        read = self.read if place == "receiver.read_begun" else ""
        answer = Halfway(pair, pair.sender if is_sender else pair.receiver, f"{place}=kill{read}").ends()
        assert is_sender or failed(answer), answer


class Halfway:
    """A prompt of which one agent is at a failpoint, which it says in its log. `taken` and `given` are its answers.

    Agents that have lost each other may need a moment, so prompts are sent until one has come so far.
    """

    def __init__(self, pair: Pair, name: str, said: str) -> None:
        self.fleet, self.pair = pair.fleet, pair
        self.fleet.start(pair.sender, pair.receiver, "alone")
        self.fleet.agents[name][0].kill()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, said)
            self.fleet.start_agents(name)
        (agent,) = self.fleet.agents[name]
        wait_for(lambda: agent.status.engine is not None, 60)
        known, self._pool = _failpoints(agent), ThreadPoolExecutor(2)
        for seed in itertools.islice(SEEDS, 9):
            self.tokens, self.rid = prompt(200, seed=seed), f"halfway-{seed}"
            body = self.fleet.body(pair.sender, self.tokens, self.fleet.room(), rid=self.rid)
            self.taken, self.given = (self._pool.submit(ask, self.fleet, name, body) for name in pair.names)
            wait_for(lambda: _failpoints(agent) > known or self.taken.done(), LATE_S)
            if _failpoints(agent) > known:
                return
        raise AssertionError(f"{said} was not passed: {self.taken.result()}")

    def ends(self) -> tuple[int, Any]:
        """What the decoding side answers. After it all pages are free again, and the next request is carried.

        Of a pool with two halves SGLang tells how much is in use of the one that has more. It ends itself if the pages
        of a half do not add up.
        """
        self.given.result(LATE_S)
        status, said = self.taken.result(LATE_S)
        for name in self.pair.names:
            if self.fleet.agents[name][0].process.poll() is not None:
                self.fleet.start_agents(name)
            assert self.fleet[name].process.poll() is None
        assert_idle(self.fleet, *self.pair.names, timeout_s=LATE_S)
        wait_for(lambda: _is_carried(self.pair, seed=next(SEEDS)), LATE_S)
        self.pair.crossed(prompt(300, seed=next(SEEDS)))
        assert_idle(self.fleet, *self.pair.names)
        if not failed((status, said)):
            self.fleet.assert_same_as_alone(self.tokens, answer_of(said))
        return status, said


def _failpoints(agent: AgentProcess) -> int:
    """How many have fired, of it and those before it at its address."""
    return sum(line.startswith("failpoint ") for line in agent.text().splitlines())


def _is_carried(pair: Pair, seed: int) -> bool:
    body = pair.fleet.body(pair.sender, prompt(50, seed=seed), pair.fleet.room())
    return not failed(pair.fleet.both(pair.sender, pair.receiver, body)[1])
