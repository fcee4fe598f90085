"""Real engines that draft: rows of the draft travel, or are zeros, and as many drafts are accepted as in one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from demo.model import LAYERS
from tests.system.engines.drafts import DRAFTED, PLAIN, Drafting, repetitive
from tests.system.engines.fleet import CONFIGS, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = 200
TIE = 0.25  # bf16, summed in another order in a batch of another size: two steps of the likeliest logits


@pytest.fixture(scope="module", params=["draft_model", "eagle", "ngram"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    with ExitStack() as stack:
        yield Drafting(tmp_path_factory.mktemp("fleet"), stack, request.param)


def test_a_pair_accepts_as_many_drafts_as_one_engine(drafting: Drafting) -> None:
    """Of the prompts of which both say the same: after a tie they have other tokens to guess."""
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(PROMPTS)]
    alone, pair, same = both(drafting, prompts, "small")
    one, two = drafting.per_step("alone", same), drafting.per_step("large", same)
    print(f"accepted in a step: one engine {one:.4f}, a pair {two:.4f}; of {sum(same)} prompts")
    assert 0.05 < one < DRAFTED - 0.05 and abs(two - one) <= one / 100
    assert_same_but_for_ties(drafting, prompts, alone, pair)


def both(
    drafting: Drafting, prompts: list[list[int]], sender: str
) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """What one engine says, what a pair does, and for each prompt whether that is the same."""
    alone = drafting.answers("alone", "", prompts)
    pair = drafting.answers("large", sender, prompts)
    return alone, pair, [ours == theirs for ours, theirs in zip(alone, pair, strict=True)]


def assert_same_but_for_ties(
    drafting: Drafting, prompts: list[list[int]], alone: list[list[int]], pair: list[list[int]]
) -> None:
    """Which requests share a step depends on when they come, and so does the order of a sum (AMX: 12 of 200 part)."""
    gaps = [drafting.gap(*each) for each in zip(prompts, alone, pair, strict=True) if each[1] != each[2]]
    assert all(gap <= TIE for gap in gaps) and len(gaps) <= max(2, len(prompts) / 10), gaps


def test_the_draft_s_rows_arrive_byte_for_byte(drafting: Drafting) -> None:
    tokens = prompt(300, seed=1001)
    answer, ours, theirs = drafting.crossed("large", "small", tokens)
    assert answer.cached == len(tokens) - 1 and list(answer.tokens) == drafting.alone(tokens, 12)
    assert {layer for layer, _ in theirs.rows} == set(range(drafting.layers))
    assert_carried(ours, theirs)


@pytest.mark.parametrize("past", range(-1, 3))
def test_blocks_for_drafts_to_come_are_neither_offered_nor_fetched(drafting: Drafting, past: int) -> None:
    """The drafts after the prompt begin in its last block, at the end of it, or in the next one."""
    tokens = prompt(CONFIGS["large"].block_size + past, seed=1100 + past)
    answer, ours, theirs = drafting.crossed("small", "large", tokens)
    assert answer.cached == len(tokens) - 1 and list(answer.tokens) == drafting.alone(tokens, 12)
    assert_carried(ours, theirs)
    for name in ("small", "large"):
        drafting[name].wait_empty()


def test_without_the_draft_s_rows_the_tokens_are_right_and_fewer_drafts_are_accepted(drafting: Drafting) -> None:
    """The prefill side drafts nothing: in the draft's layers the prompt's rows are zeros."""
    prompts = [repetitive(60 + i, seed=2000 + i) for i in range(24)]
    alone, pair, same = both(drafting, prompts, PLAIN)
    one, two = drafting.per_step("alone", same), drafting.per_step("large", same)
    print(f"accepted in a step: one engine {one:.4f}, a pair whose prefill side drafts nothing {two:.4f}")
    assert_same_but_for_ties(drafting, prompts, alone, pair)
    _, _, theirs = drafting.crossed(PLAIN, "large", prompts[0])
    for (layer, part), rows in theirs.rows.items():
        assert rows.any() == (layer < LAYERS), f"layer {layer} {part}"
    unfilled = drafting.layers - LAYERS
    assert (two < 0.9 * one) == bool(unfilled), "a tie changes few of the drafts"
    assert (f"no rows of {unfilled} of our draft model's layers" in drafting["large"].log.read_text()) == bool(unfilled)


def test_rows_of_a_draft_that_only_the_prefill_side_has_stay_there(drafting: Drafting) -> None:
    tokens = prompt(200, seed=3001)
    answer, ours, theirs = drafting.crossed("large", PLAIN, tokens)
    assert answer.cached == len(tokens) - 1 and list(answer.tokens) == drafting.alone(tokens, 12)
    assert {layer for layer, _ in ours.rows} == set(range(drafting.layers))
    assert {layer for layer, _ in theirs.rows} == set(range(LAYERS))
