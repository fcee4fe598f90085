"""Recurrent states beside vLLM's prefix cache, its default: states lie by position, and prompts begin in its blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.states import GATED, ONE_GROUP, writer
from tests.system.engines.test_states import alone, crosses

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

MODELS = {"gated": (GATED, "bfloat16"), "one group": (ONE_GROUP, "float32")}
# Around the blocks of both engines of both models: 160 and 256, 288 and 384 tokens. Pieces are of 256 in the small one.
LENGTHS = [2, 3, 4, 127, 160, 161, 162, 256, 257, 258, 288, 289, 290, 300, 384, 385, 386, 577, 769, 900]


@pytest.fixture(scope="module", params=list(MODELS))
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fields, dtype = MODELS[request.param]
    with ExitStack() as stack:
        more, start = {"num_gpu_blocks_override": 64}, ("small", "large", "private", "alone")
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack, dtype=dtype, write=writer(fields), more=more, start=start)


def block_of(states: Fleet, name: str) -> int:
    """Tokens of the blocks of all groups of an engine, as its log says."""
    found = re.search(r"kv cache group sizes \((\d+)", states[name].log.read_text())
    assert found is not None
    return int(found[1])


def decodes(states: Fleet, sender: str, receiver: str, tokens: list[int]) -> None:
    """A prompt is computed in pieces that end blocks, which changes numbers a little: in bf16 too much."""
    answer = crosses(states, sender, receiver, tokens)
    assert (states.dtype == "bfloat16" and len(tokens) > 256) or answer == alone(states, tokens, 12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("sender", "receiver"), [("small", "large"), ("large", "small")])
def test_decodes_from_a_state_that_lies_by_position(states: Fleet, sender: str, receiver: str, length: int) -> None:
    # Not the other way's prompt: of rows that are all cached none is wanted, whatever state there is.
    decodes(states, sender, receiver, prompt(length, seed=length + 77 * (sender == "large")))


@pytest.mark.parametrize("length", [2, 257, 385, 900])
@pytest.mark.parametrize(("sender", "receiver"), [("private", "large"), ("large", "private")])
def test_only_one_side_has_a_prefix_cache(states: Fleet, sender: str, receiver: str, length: int) -> None:
    decodes(states, sender, receiver, prompt(length, seed=100 + length + (sender == "large")))


@pytest.mark.parametrize("more", [1, 2, 70])
def test_a_prompt_begins_in_the_senders_prefix_cache(states: Fleet, more: int) -> None:
    block = block_of(states, "large")
    tokens = prompt(2 * block + more, seed=210 + more)
    states["large"].run(states.name("first"), tokens[: block + 20], 1)
    assert states["large"].run(states.name("again"), tokens[: block + 30], 1).cached == block
    decodes(states, "large", "small", tokens)


@pytest.mark.parametrize("more", [1, 2, 70])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_prompt_begins_in_the_receivers_prefix_cache(states: Fleet, blocks: int, more: int) -> None:
    """Its state is another one all the same."""
    block = block_of(states, "small")
    tokens = prompt(3 * block + more, seed=220 + 10 * blocks + more)
    states["small"].run(states.name("first"), tokens[: blocks * block + 1], 1)
    decodes(states, "large", "small", tokens)


def test_rows_outlive_the_state_of_a_prompt_that_was_fetched(states: Fleet) -> None:
    tokens = prompt(900, seed=290)
    for _ in range(2):
        decodes(states, "large", "small", tokens)


def test_a_state_that_ends_a_block_is_others_prefix(states: Fleet) -> None:
    block = block_of(states, "small")
    tokens = prompt(2 * block + 1, seed=291)
    decodes(states, "large", "small", tokens)
    others = [*tokens[:-1], *prompt(40, seed=292)]
    answer = states["small"].run(states.name("others"), others, 12)
    assert answer.cached == 2 * block
    assert states.dtype == "bfloat16" or list(answer.tokens) == alone(states, others, 12)


def test_two_prompts_that_begin_alike_come_at_once(states: Fleet) -> None:
    begin = prompt(500, seed=293)
    prompts = [[*begin, *prompt(length, seed=294 + length)] for length in (30, 60)]
    prefilled = [states.prefill("large", tokens)[1] for tokens in prompts]
    wanted = [states.name("both") for _ in prompts]
    for name, tokens, each in zip(wanted, prompts, prefilled, strict=True):
        states["small"].submit(name, tokens, 12, each.params)
    for name, tokens in zip(wanted, prompts, strict=True):
        answer = states["small"].result(name)
        assert answer.cached == len(tokens) - 1
        assert states.dtype == "bfloat16" or list(answer.tokens) == alone(states, tokens, 12)


def test_its_pool_is_known_before_it_starts(states: Fleet) -> None:
    states.assert_known_beforehand("small", "--mamba-ssm-cache-dtype float32")
