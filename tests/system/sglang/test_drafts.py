"""Real SGLang servers that draft (EAGLE): rows of the draft travel, or are zeros, and as many drafts are accepted."""

from __future__ import annotations

import pytest

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from testing.kept import kept
from tests.system.engines.drafts import repetitive
from tests.system.sglang.drafts import Drafting, per_step
from tests.system.sglang.fleet import assert_idle, prompt
from tests.system.sglang.halfway import Interrupted, Pair
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = 200

drafting = kept(Drafting, environment={"TRITON_INTERPRET": "1"})


@pytest.fixture
def pair(drafting: Drafting) -> Pair:
    return Pair(drafting, "p16-drafts", "d32-drafts")


def test_a_pair_accepts_as_many_drafts_as_one_engine(drafting: Drafting) -> None:
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(PROMPTS)]
    alone = drafting.many("alone", "", prompts)
    pair = drafting.many("d32-drafts", "p16-drafts", prompts)
    one, two = per_step(alone), per_step(pair)
    print(f"accepted in a step: one engine {one:.4f}, a pair {two:.4f}")
    assert 0.05 < one < 0.95 and abs(two - one) <= one / 100
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]
    assert_idle(drafting, "p16-drafts", "d32-drafts")


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_the_draft_s_rows_arrive_byte_for_byte(drafting: Drafting, length: int) -> None:
    (said,) = drafting.many("d32-drafts", "p16-drafts", [prompt(length, seed=1000 + length)])
    given, taken = drafting.rows("p16-drafts", "d32-drafts", said["room"])
    assert {layer for layer, _ in taken.rows} == set(range(LAYERS + 1))
    assert_carried(given, taken)


def test_prefixes_on_both_sides_are_neither_computed_nor_fetched_again(pair: Pair) -> None:
    """The draft's row of a token depends on the next token. So a prefix is one token shorter than what is alike."""
    head = prompt(320, seed=5000)
    pair.crossed(head)
    before = pair.fleet.moved_bytes(pair.receiver)
    pair.crossed(head + prompt(60, seed=5001))
    row = (LAYERS + 1) * 2 * KV_HEADS * HEAD_WIDTH * 4  # parts, bytes
    moved = (pair.fleet.moved_bytes(pair.receiver) - before) / row
    assert 60 <= moved <= 60 + 2 * 32, f"rows of {moved} tokens"


class TestInterrupted(Interrupted):
    pass


def test_without_the_draft_s_rows_the_tokens_are_right_and_fewer_drafts_are_accepted(drafting: Drafting) -> None:
    prompts = [repetitive(60 + i, seed=2000 + i) for i in range(24)]
    alone = drafting.many("alone", "", prompts)
    pair = drafting.many("d32-drafts", "p16", prompts)
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]
    one, two = per_step(alone), per_step(pair)
    print(f"accepted in a step: one engine {one:.4f}, a pair whose prefill side drafts nothing {two:.4f}")
    assert two < 0.95 * one
    given, taken = drafting.rows("p16", "d32-drafts", pair[0]["room"])
    assert {layer for layer, _ in given.rows} == set(range(LAYERS))
    for (layer, part), rows in taken.rows.items():
        assert rows.any() == (layer < LAYERS), f"layer {layer} {part}"


def test_rows_of_a_draft_that_only_the_prefill_side_has_stay_there(drafting: Drafting) -> None:
    prompts = [repetitive(60 + i, seed=3000 + i) for i in range(4)]
    alone = drafting.many("alone", "", prompts)
    pair = drafting.many("d32", "p16-drafts", prompts)
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]


# The last ones: two more servers of two ranks leave little to others.
@pytest.mark.parametrize(("sender", "receiver"), [("p16-drafts", "d16-two-drafts"), ("p16-two-drafts", "d32-drafts")])
def test_every_rank_gets_its_heads_of_the_draft(drafting: Drafting, sender: str, receiver: str) -> None:
    prompts = [repetitive(length, seed=4000 + length + (sender == "p16-drafts")) for length in range(20, 260, 30)]
    alone, pair = drafting.many("alone", "", prompts), drafting.many(receiver, sender, prompts)
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]
    assert abs(per_step(pair) - per_step(alone)) <= per_step(alone) / 100
    for said in pair:
        given, taken = drafting.rows(sender, receiver, said["room"])
        assert {layer for layer, _ in taken.rows} == set(range(LAYERS + 1))
        assert_carried(given, taken)
    assert_idle(drafting, sender, receiver)
