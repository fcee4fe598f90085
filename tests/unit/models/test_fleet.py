"""How many engines some traffic needs, against numbers computed by hand and against a bound that was measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvbridge.commands.plan import sides_of
from kvbridge.commands.plan_fleet import kv_bytes, link, read_goal
from kvbridge.errors import OperatorError
from kvbridge.models.fleet import EngineSize, FleetGoal, FleetKV, plan_fleet, prefill_s, sequences, step_s
from tests.support.families import config

ROOT = Path(__file__).parents[3]
# 10 GB of memory, a tera of each; a sequence has 1000 + 100 tokens of 100 kB.
GOAL = FleetGoal(
    gpus=40, rate=4.0, prompt_tokens=1000, answer_tokens=100, parameters=1e9, flops=1e12, memory_rate=1e12,
    memory=10e9, prefill_efficiency=0.5, decode_efficiency=0.5, busy=0.5, most_sequences=10, step_s=1.0,
)  # fmt: skip
ONE = EngineSize(1)
KV = FleetKV(carried=100_000_000, prompt=100_000_000, sequence=110_000_000)


def test_numbers_are_those_computed_by_hand() -> None:
    assert prefill_s(GOAL, 1) == 4.0  # 2 x 1e9 x 1000 / (1e12 x 0.5)
    assert prefill_s(replace(GOAL, active=1e8), 2) == pytest.approx(0.2)
    # FLOPs bind: 2 x 1e9 x 10 / (1e12 x 0.5); reading takes (2e9 + 10 x 1.05e8) / (1e12 x 0.5) = 6.1 ms.
    assert step_s(GOAL, KV, ONE, 10) == pytest.approx(0.04)
    assert step_s(replace(GOAL, active=1e6), KV, ONE, 10) == pytest.approx(0.0061)
    found = plan_fleet(GOAL, KV, ONE, ONE)
    assert found.prefill_rate == 0.125 and found.decode_rate == pytest.approx(1.25)  # 0.5 x 10 / (100 x 0.04)
    assert (found.prefill, found.decode, found.rate) == (32, 4, 4.0)
    assert link(GOAL, found, KV) == 25e6  # 1e8 bytes in 4 s


def test_an_engine_of_replicas_counts_with_all_of_them() -> None:
    """Twice what one does, on twice the GPUs. Replicas that share weights have more room, and read them once."""
    one, two, shared = EngineSize(1), EngineSize(1, replicas=2, copies=2), EngineSize(1, replicas=2)
    alone, found = plan_fleet(GOAL, KV, one, one), plan_fleet(GOAL, KV, two, two)
    assert (found.prefill, found.decode, found.rate, found.prefill_s) == (16, 2, 4.0, alone.prefill_s)
    assert (found.prefill_rate, found.decode_rate) == (0.25, pytest.approx(2.5))
    assert (found.sequences, found.step_s) == (20, pytest.approx(alone.step_s))
    assert link(GOAL, found, KV) == 2 * link(GOAL, alone, KV)
    many = replace(GOAL, most_sequences=100, active=1e6)
    assert (sequences(many, KV, two), sequences(many, KV, shared)) == (127, 145)  # 1.8e10 less 4e9 or 2e9, by 1.1e8
    assert step_s(many, KV, two, 20) == pytest.approx(step_s(many, KV, one, 10))
    assert step_s(many, KV, shared, 20) == pytest.approx((2e9 + 20 * 1.05e8) / (2 * 1e12 * 0.5))
    with pytest.raises(OperatorError, match="one engine of each role needs 4"):
        plan_fleet(replace(GOAL, gpus=3), KV, two, two)


@pytest.mark.parametrize(
    ("command", "size"),
    [
        ("vllm serve M -tp 2 -dp 4", EngineSize(2, 4, 4)),
        ("vllm serve M --data-parallel-size 4 --enable-expert-parallel", EngineSize(1, 4)),
        ("vllm serve M -tp 2 -pp 2", EngineSize(4)),
        ("sglang --tp 4 --dp 2", EngineSize(4, 2, 2)),
        ("sglang --tp 4 --dp-size 2 --enable-dp-attention", EngineSize(2, 2)),
    ],
)
def test_replicas_are_those_of_the_command(command: str, size: EngineSize, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama", 2, 8, 4, 128)))
    assert sides_of(tmp_path, command, "vllm serve M")[0].size == size


def test_a_fleet_that_is_too_small_is_split_to_serve_most() -> None:
    found = plan_fleet(replace(GOAL, gpus=4), KV, ONE, ONE)
    assert (found.prefill, found.decode, found.rate) == (3, 1, 0.375)  # 2 and 2 would serve 0.25


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 10), ({"most_sequences": 100}, 63), ({"step_s": 0.0161, "most_sequences": 100}, 4), ({"memory": 2e9}, 0)],
    ids=["most", "memory: 7e9 / 1.1e8", "step: 4 x 4 ms", "weights alone do not fit"],
)
def test_sequences_are_bound_by_each_limit(changes: dict, count: int) -> None:
    assert sequences(replace(GOAL, **changes), KV, ONE) == count


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"gpus": 1}, "needs 2"), ({"memory": 2e9}, "prefill: 1 GPUs"), ({"step_s": 0.001}, "one sequence within")],
)
def test_what_cannot_be_says_why(changes: dict, words: str) -> None:
    with pytest.raises(OperatorError, match=words) as raised:
        plan_fleet(replace(GOAL, **changes), KV, ONE, ONE)
    assert raised.value.code == "fleet_too_small"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus=2,rate=1,prompt_tokens=1,answer_tokens=1", "needs parameters too"),
        ("gpu=2,rates=1", "did you mean rate"),
        ("gpus=two", "must be a number"),
        ("gpus=0", "must be positive"),
        ("rate=nan", "must be positive"),
        ("busy=0", "must be positive and at most 1"),
        ("memory_share=90", "must be positive and at most 1"),
        ("prefill_efficiency=0", "must be positive and at most 1"),
        ("most_sequences=0", "must be positive"),
        ("gpus=1000000000000", "at most 1e[+]07"),
        ("gpus=8,gpus=9", "need NAME=VALUE once"),
        ("gpus=2,rate=1,prompt_tokens=1,answer_tokens=1,parameters=1e9,active=2e9", "parameters are 1e[+]09"),
    ],
)
def test_a_goal_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        read_goal(text)


def test_bytes_of_kv_are_those_of_the_model_converted_for_the_decode_engine(tmp_path: Path) -> None:
    """A llama of 2 layers and 4 heads of 128: 2 x 2 x 4 x 128 numbers a token, of 2 bytes or 1."""
    (tmp_path / "config.json").write_text(json.dumps(config("llama", 2, 8, 4, 128)))
    goal = replace(GOAL, prompt_tokens=64, answer_tokens=64)
    same = kv_bytes(*sides_of(tmp_path, "vllm serve M -tp 2", "vllm serve M"), goal)
    assert same == FleetKV(64 * 4096, 64 * 4096, 128 * 4096)
    cast = kv_bytes(*sides_of(tmp_path, "vllm serve M", "vllm serve M -tp 2 --kv-cache-dtype fp8"), goal)
    assert (cast.prompt, cast.sequence) == (64 * 2048, 128 * 2048)


def test_the_default_efficiency_promises_no_more_than_was_seen() -> None:
    """One H200 prefilled 9.6 prompts a second and was not at its limit: a bound from below, which proves no more."""
    rows = json.loads((ROOT / "bench/results/gpu_serving.json").read_text())["rows"]
    (seen,) = (row["points"][-1]["answered_per_s"] for row in rows if row["setup"] == "kvbridge")
    mean = round((8192 - 1024) / math.log(8))  # of lengths that are uniform in their logarithm
    goal = FleetGoal(gpus=2, rate=seen, prompt_tokens=mean, answer_tokens=64, parameters=8.03e9, gpu="h200")
    assert 1 / prefill_s(goal, 1) < seen
