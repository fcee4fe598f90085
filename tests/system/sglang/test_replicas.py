"""Data-parallel attention: each replica has its own requests and KV, and they share the rest of the model.

SGLang's Llama does not have it, its Qwen3 does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.system.engines.model import write_model
from tests.system.sglang.fleet import TOKENS, Fleet, answer_of, assert_idle, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LENGTHS = (1, 16, 17, 300, 700)
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
PAIRS = [("p16-replicas", "d16"), ("p16", "d32-replicas"), ("p16-replicas", "d32-replicas")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"), stack, partial(write_model, **QWEN3))
        # All at once: replicas that are up turn without rest, and leave little time to one that starts.
        fleet.start("p16-replicas", "d32-replicas", "p16", "d16", "alone")
        yield fleet


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_says_what_one_server_alone_says(fleet: Fleet, sender: str, receiver: str) -> None:
    for number, length in enumerate(LENGTHS * 2):  # rooms that follow each other go to one replica after the other
        tokens = prompt(length, seed=_seed(sender, receiver, number))
        (answer,) = fleet.crossed(sender, receiver, tokens)
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, sender, receiver)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_sixteen_requests_at_once(fleet: Fleet, sender: str, receiver: str) -> None:
    prompts = [prompt(40 + 23 * i, seed=_seed(sender, receiver, 1000 + i)) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda tokens: fleet.crossed(sender, receiver, tokens)[0], prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, sender, receiver)


def test_all_answers_to_a_prompt_come_from_one_replica(fleet: Fleet) -> None:
    """The one whose prefix cache the first of their requests has filled."""
    sender, receiver = "p16-replicas", "d32-replicas"
    for number in range(2):  # a room for each replica
        tokens = prompt(200, seed=_seed(sender, receiver, 2000 + number))
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "n": 2}
        body = fleet.body(sender, tokens, fleet.room(), sampling_params=sampling)
        given, (status, said) = fleet.both(sender, receiver, body)
        assert status == 200, (said, given)
        for each in map(answer_of, said):
            fleet.assert_same_as_alone(tokens, each)
            assert each.cached >= 192, f"{each.cached} tokens of the prompt were in the cache"
    assert_idle(fleet, sender, receiver)


def _seed(sender: str, receiver: str, number: int) -> int:
    """Prompts of different pairs share no prefix."""
    return sum(map(ord, f"{sender}>{receiver}")) * 7919 + number * 31


# The last one: four ranks on two cores want them for themselves.
def test_ranks_within_replicas(fleet: Fleet) -> None:
    for name in ("p16-replicas", "d32-replicas"):
        fleet.kill(name)
    test_says_what_one_server_alone_says(fleet, "p16-replicas-of-two", "d16")
