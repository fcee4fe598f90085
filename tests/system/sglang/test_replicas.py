"""Data-parallel attention: each replica has its own requests and KV, and they share the rest of the model.

SGLang's Llama does not have it, its Qwen3 does.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import pytest

from demo.model import QWEN3, write_model
from testing.agents import PYTHON
from testing.kept import kept
from tests.support.pages import block, told, why_not
from tests.system.engines.replicas import COMMON, PAGE, assert_spread, moved, status_of
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
from tests.system.sglang.rows import assert_carried
from tests.system.sglang.server import ServerConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

START_S = 380.0
LENGTHS = (1, 16, 17, 300, 700)
PAIRS = [("p16-replicas", "d16"), ("p16", "d32-replicas"), ("p16-replicas", "d32-replicas")]
RANKS = [("p16-two", "d32-replicas"), ("p16-replicas", "d16-two")]  # tensor parallelism on one side, data on the other
BALANCED = ServerConfig(
    "prefill", tensor_parallel_size=2, data_parallel_size=2, flags=("--load-balance-method", "round_robin")
)


fleet = kept(
    Fleet,
    write=partial(write_model, **QWEN3),
    others={"p16-balanced": BALANCED},
    start=("p16-replicas", "d32-replicas", "p16", "d16", "alone"),
)


# The first one: it wants the processors for servers of its own.
def test_the_page_spreads_prompts_over_replicas(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    begins = ("# four ranks of SGLang", COMMON, "# SGLang: each side")
    again = "for first in 1 2 3 4 5 6; do ask 8000 $first; done\n"
    script = "".join(block(PAGE, each) for each in begins) + again + block("README.md", "kill $(jobs")
    environments = {".venv": str(Path(PYTHON).parents[1]), ".venv-sglang": sys.prefix}
    assert_spread(told(script, tmp_path, environments, START_S), computed=0)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS + RANKS)
def test_says_what_one_server_alone_says(fleet: Fleet, sender: str, receiver: str) -> None:
    # Twice: rooms that follow each other go to one replica after the other.
    assert_says_the_same(fleet, sender, receiver, LENGTHS * 2)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_sixteen_requests_at_once(fleet: Fleet, sender: str, receiver: str) -> None:
    assert_sixteen_at_once(fleet, sender, receiver)


@pytest.mark.parametrize("named_by", ["room", "body"])
def test_every_replica_takes_from_every_other(fleet: Fleet, named_by: str) -> None:
    """A room chooses the replica of prefill, unless the body names one: decode is told of that one."""
    sender, receiver = "p16-replicas", "d32-replicas"
    prefill, decode = (list(map(status_of, fleet.agents[name])) for name in (sender, receiver))
    for number, (giver, taker) in enumerate(itertools.product(range(2), range(2))):
        tokens = prompt(200 + 33 * number, seed=seed_of(sender, receiver, 3000 + number + 10 * (named_by == "room")))
        room = 2 * fleet.room() + (giver if named_by == "room" else 1 - giver)
        body = fleet.body(sender, tokens, room)
        where = {} if named_by == "room" else {"disagg_prefill_dp_rank": giver}
        with moved(prefill, "sender") as sent, moved(decode) as received:
            body |= where | ({} if named_by == "room" else {"routed_dp_rank": giver})
            given, (status, said) = fleet.both(sender, receiver, body, **where | {"routed_dp_rank": taker})
        assert status == 200, (said, given)
        assert [bool(each) for each in sent] == [each == giver for each in range(2)]
        assert [bool(each) for each in received] == [each == taker for each in range(2)]
        assert_carried(*fleet.rows(sender, receiver, room))
        fleet.assert_same_as_alone(tokens, answer_of(said))
    assert_idle(fleet, sender, receiver)


def test_replicas_that_a_server_balances_without_looking_at_rooms(fleet: Fleet) -> None:
    """The decode server asks which replica has the room."""
    fleet.start("p16-balanced")
    with moved(list(map(status_of, fleet.agents["p16-balanced"])), "sender") as sent:
        assert_says_the_same(fleet, "p16-balanced", "d16", (16, 300, 40, 170))
    assert all(sent), "one replica got them all"


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
