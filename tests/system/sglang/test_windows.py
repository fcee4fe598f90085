"""Real SGLang servers of models whose layers with a window have memory of their own (`SWAKVPool`).

The oracle is SGLang's own mapping of slots, on both sides: the rows that a token of the window has on the prefill side
are those it has on the decode side. Before the window the decode side has no slots.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvbridge.failpoints import VARIABLE
from tests.integration.agent.harness import AgentProcess
from tests.support.waiting import wait_for
from tests.system.engines.kinds import SEEN, write_halves
from tests.system.kept import kept
from tests.system.sglang.fleet import Answer, Fleet, answer_of, assert_idle, prompt
from tests.system.sglang.rows import SavedRows, assert_carried
from tests.system.sglang.server import ServerConfig
from tests.system.sglang.test_faults import LATE_S, ask, failed

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

# SGLang has no prefix cache on the decode side for a model whose halves differ in their heads. It takes running
# requests out every few steps, and puts them back.
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
OTHERS = {"d64-plain": ServerConfig("decode", page_size=64, keeps_prefixes=False, environment=RETRACTS)}
LAYERS = (1, 2)  # with a window
SEEDS = itertools.count(6400)  # no prompt is used twice

fleet = kept(Fleet, write=write_halves, others=OTHERS, start=("p16", "d64-plain", "alone"))


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server, and how many tokens before the current one a window has."""

    fleet: Fleet
    sender: str
    receiver: str
    before: int

    @property
    def names(self) -> tuple[str, str]:
        return self.receiver, self.sender

    def crossed(self, tokens: list[int]) -> Answer:
        """The rows of full layers come, those of windows from the window on; the tokens are one server's alone."""
        ((room, answer),) = self.fleet.ask(self.sender, self.receiver, [tokens])
        self.check(room, tokens, answer)
        return answer

    def check(self, room: int, tokens: list[int], answer: Answer) -> None:
        given, taken = self.fleet.rows(self.sender, self.receiver, room)
        assert_carried(chosen(given, False), chosen(taken, False))
        first = max(0, len(tokens) - self.before)
        assert_carried(chosen(given, True, first), chosen(taken, True, first))
        page = self.fleet.configs[self.receiver].page_size
        for rows in chosen(taken, True).rows.values():
            assert not rows[: max(0, first - page - max(page, self.before))].any(), "rows before the window"
        self.fleet.assert_same_as_alone(tokens, answer)


def chosen(rows: SavedRows, have_window: bool, first: int = 0) -> SavedRows:
    """The rows of some layers, from a token on."""
    return SavedRows(
        {key: each[first:] for key, each in rows.rows.items() if (key[0] in LAYERS) == have_window}, rows.codec
    )


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(fleet, "p16", "d64-plain", SEEN)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 79, 80, 81, 96, 300, 304, 319])
def test_a_window_is_carried(pair: Pair, length: int) -> None:
    pair.crossed(prompt(length, seed=length))


@pytest.mark.parametrize("length", [257, 512, 513, 1500])
def test_a_window_of_a_prompt_that_is_computed_in_chunks(pair: Pair, length: int) -> None:
    pair.crossed(prompt(length, seed=1000 + length))


def test_a_prefix_that_the_prefilling_side_has(pair: Pair) -> None:
    """Its own rows are offered where it has them; the window may lie in the prefix, behind it, or in both."""
    head = prompt(320, seed=2000)
    pair.crossed(head)
    for more in (1, 40, 200):
        answer = pair.crossed(head + prompt(more, seed=2000 + more))
        assert len(answer.tokens) > 1


def test_requests_that_are_taken_out_and_put_back(pair: Pair) -> None:
    prompts = [prompt(60 + 90 * i, seed=3000 + i) for i in range(6)]
    pair.fleet.start(pair.sender, pair.receiver)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: pair.fleet.ask(pair.sender, pair.receiver, [each])[0], prompts))
    for tokens, (room, answer) in zip(prompts, answers, strict=True):
        pair.check(room, tokens, answer)
    assert "Testing retraction. #retracted_reqs: 1" in pair.fleet[pair.receiver].text()
    assert_idle(pair.fleet, pair.sender, pair.receiver)


class Halfway:
    """A prompt of which one agent is at a failpoint, which it says in its log. `taken` and `given` are its answers.

    It is one chunk of rows of full layers, and one of windows. Agents that have lost each other may need a moment, so
    prompts are sent until one has come so far.
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
        """What the decoding side answers. After it all pages of both halves are free again, and the next is carried.

        SGLang tells how much is in use of the half that has more, and ends itself if the pages of a half do not add up.
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


@pytest.mark.parametrize("is_sender", [True, False], ids=["prefill", "decode"])
def test_a_request_is_aborted_while_its_windows_rows_travel(pair: Pair, is_sender: bool) -> None:
    """The rows of full layers are there, those of windows are about to be written."""
    halfway = Halfway(pair, pair.receiver, "receiver.read_begun=pause:3@2")
    pair.fleet[pair.sender if is_sender else pair.receiver].abort(halfway.rid)
    assert failed(halfway.ends())


@pytest.mark.parametrize(
    ("is_sender", "place"),
    [(True, "sender.tables_sent=kill"), (False, "receiver.read_begun=kill@2"), (False, "receiver.read_ended=kill")],
)
def test_an_agent_is_killed_while_windows_rows_travel(pair: Pair, is_sender: bool, place: str) -> None:
    halfway = Halfway(pair, pair.sender if is_sender else pair.receiver, place)
    answer = halfway.ends()
    assert is_sender or failed(answer), answer
