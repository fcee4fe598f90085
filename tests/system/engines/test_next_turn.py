"""Chats between two real engines that differ: the answer's KV goes back, and the next turn's prefill computes the rest.

Each answer must be the one that an engine alone gives.
"""

from __future__ import annotations

import signal
import time

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from testing.kept import kept
from tests.system.engines.fleet import Fleet, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ANSWER, SAYS = 90, 50  # tokens: of each answer, and of what the user says
TURNS = 8
KEEP_S = 60.0

# In bf16, what a step computes of one token and of many differs by enough to turn ties.
fleet = kept(Fleet, dtype="float32", options={"kvbridge_return_s": KEEP_S}, start=("small", "large", "alone"))


def chat(fleet: Fleet, turns: int, seed: int, sender: str = "small", receiver: str = "large") -> list[tuple[int, int]]:
    """Of each turn: how many tokens its prompt has, and how many of them prefill did not compute."""
    said, found = prompt(100, seed=seed), []
    for turn in range(turns):
        said += prompt(SAYS, seed=seed + 1000 * (turn + 1))
        _, prefilled = fleet.prefill(sender, said)
        answer = fleet[receiver].run(fleet.name(f"d-{receiver}"), said, ANSWER, prefilled.params)
        assert answer.cached == len(said) - 1, "the prompt did not travel, it was computed again"
        assert list(answer.tokens) == fleet.alone(said, ANSWER), f"turn {turn}"
        found.append((len(said), prefilled.cached))
        said += answer.tokens
    return found


@pytest.mark.parametrize(("sender", "receiver"), [("small", "large"), ("large", "small")])
def test_a_chat_computes_only_what_is_new(fleet: Fleet, sender: str, receiver: str) -> None:
    turns = chat(fleet, TURNS, 11 + (sender == "large"), sender, receiver)
    block = {"small": 32, "large": 128}[sender]
    expected = []
    for before, _ in turns[:-1]:
        own = before // block * block
        kept_tokens = (before + ANSWER - 1) // PREFIX_TOKENS * PREFIX_TOKENS // block * block  # the last has no KV yet
        expected.append(kept_tokens if kept_tokens - own >= PREFIX_TOKENS else own)
    # Before the first answer that is kept, an engine at rest does not ask before each prompt.
    assert [cached for _, cached in turns[2:]] == expected[1:], turns
    assert sum(expected[1:]) > sum(before // block * block for before, _ in turns[1:-1])


def test_the_rows_that_come_back_are_those_of_the_answer(fleet: Fleet) -> None:
    said = prompt(150, seed=71)
    _, prefilled = fleet.prefill("small", said)
    fleet["large"].run(fleet.name("d-large"), said, ANSWER, prefilled.params)
    said += fleet.alone(said, ANSWER)
    end = (len(said) - 1) // PREFIX_TOKENS * PREFIX_TOKENS
    again = fleet.name("d-again")  # its own prefix cache has the answer's rows
    fleet["large"].run(again, said[: end + 1], 1)
    ours = fleet.rows("large", again, 0, end)
    request, prefilled = fleet.prefill("small", [*said, *prompt(SAYS, seed=72)])
    assert prefilled.cached == end
    assert_carried(ours, fleet.rows("small", request, 0, end))


def test_without_a_decode_agent_the_next_turn_is_computed(fleet: Fleet) -> None:
    said = prompt(200, seed=81)
    _, prefilled = fleet.prefill("small", said)
    answer = fleet["large"].run(fleet.name("d-large"), said, ANSWER, prefilled.params)
    agent = fleet.agents["large"][0]
    agent.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        said += [*answer.tokens, *prompt(SAYS, seed=82)]
        _, prefilled = fleet.prefill("small", said)
        assert prefilled.cached < 200
        assert time.monotonic() - began < 60
    finally:
        agent.process.send_signal(signal.SIGCONT)
    answer = fleet["large"].run(fleet.name("d-large"), said, ANSWER, prefilled.params)
    assert list(answer.tokens) == fleet.alone(said, ANSWER)
