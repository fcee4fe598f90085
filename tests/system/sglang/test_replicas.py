"""Data-parallel attention: each replica has its own requests and KV, and they share the rest of the model.

SGLang's Llama does not have it, its Qwen3 does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from demo.model import write_model
from tests.system.kept import kept
from tests.system.sglang.fleet import (
    TOKENS,
    Fleet,
    answer_of,
    assert_idle,
    assert_says_the_same,
    assert_sixteen_at_once,
    prompt,
    seed_of,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LENGTHS = (1, 16, 17, 300, 700)
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
PAIRS = [("p16-replicas", "d16"), ("p16", "d32-replicas"), ("p16-replicas", "d32-replicas")]


# All at once: replicas that are up turn without rest, and leave little time to one that starts.
fleet = kept(Fleet, write=partial(write_model, **QWEN3), start=("p16-replicas", "d32-replicas", "p16", "d16", "alone"))


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_says_what_one_server_alone_says(fleet: Fleet, sender: str, receiver: str) -> None:
    # Twice: rooms that follow each other go to one replica after the other.
    assert_says_the_same(fleet, sender, receiver, LENGTHS * 2)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_sixteen_requests_at_once(fleet: Fleet, sender: str, receiver: str) -> None:
    assert_sixteen_at_once(fleet, sender, receiver)


def test_all_answers_to_a_prompt_come_from_one_replica(fleet: Fleet) -> None:
    """The one whose prefix cache the first of their requests has filled."""
    sender, receiver = "p16-replicas", "d32-replicas"
    for number in range(2):  # a room for each replica
        tokens = prompt(200, seed=seed_of(sender, receiver, 2000 + number))
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "n": 2}
        body = fleet.body(sender, tokens, fleet.room(), sampling_params=sampling)
        given, (status, said) = fleet.both(sender, receiver, body)
        assert status == 200, (said, given)
        for each in map(answer_of, said):
            fleet.assert_same_as_alone(tokens, each)
            assert each.cached >= 192, f"{each.cached} tokens of the prompt were in the cache"
    assert_idle(fleet, sender, receiver)


# The last one: four ranks on two cores want them for themselves.
def test_ranks_within_replicas(fleet: Fleet) -> None:
    for name in ("p16-replicas", "d32-replicas"):
        fleet.kill(name)
    test_says_what_one_server_alone_says(fleet, "p16-replicas-of-two", "d16")
