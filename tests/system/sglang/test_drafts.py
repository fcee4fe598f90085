"""Real SGLang servers that draft (EAGLE): rows of the draft travel, or are zeros, and as many drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo.model import LAYERS
from tests.system.engines.drafts import MORE, SGLANG_EAGLE, repetitive, write_drafted, write_eagle
from tests.system.sglang.drafting import VARIABLE
from tests.system.sglang.fleet import CONFIGS, Fleet, assert_idle, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

FLAGS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "2"),
)
PROMPTS, AT_ONCE = 200, 24


class Drafting(Fleet):
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        model = write_drafted(folder / "model")
        eagle = write_eagle(folder / "eagle", model, architectures=[SGLANG_EAGLE])
        more: dict[str, Any] = {
            "flags": (*FLAGS, "--speculative-draft-model-path", str(eagle)),
            "environment": {VARIABLE: "1", "TRITON_INTERPRET": "1"},
        }
        drafting = {f"{name}-drafts": replace(CONFIGS[name], **more) for name in ("p16", "d32", "alone")}
        super().__init__(folder, stack, write=lambda at: at, others=drafting, start=("p16", "d32", *drafting))

    def many(self, receiver: str, sender: str, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """What the decoding server says, with the rooms; without a `sender`, one by itself."""
        said: list[dict[str, Any]] = []
        plainly = {"return_logprob": False, "top_logprobs_num": 0}
        for at in range(0, len(prompts), AT_ONCE):
            some = prompts[at : at + AT_ONCE]
            rooms = [self.room() for _ in some]
            if sender:
                status, answers = self.both(sender, receiver, self.body(sender, some, rooms, MORE, **plainly))[1]
            else:
                no = dict.fromkeys(("bootstrap_host", "bootstrap_port"))
                status, answers = self[receiver].generate(self.body(receiver, some, None, MORE, **plainly | no))
            assert status == 200, answers
            said += [answer | {"room": room} for answer, room in zip(answers, rooms, strict=True)]
        return said


def per_step(said: Sequence[dict[str, Any]]) -> float:
    """Drafts accepted in a step. The first token comes from the prefill, and one of each step is no draft."""
    steps = sum(each["meta_info"]["spec_verify_ct"] for each in said)
    return float(sum(each["meta_info"]["completion_tokens"] - 1 for each in said) / steps - 1)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    with ExitStack() as stack:
        yield Drafting(tmp_path_factory.mktemp("fleet"), stack)


def test_a_pair_accepts_as_many_drafts_as_one_engine(drafting: Drafting) -> None:
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(PROMPTS)]
    alone = drafting.many("alone-drafts", "", prompts)
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


def test_without_the_draft_s_rows_the_tokens_are_right_and_fewer_drafts_are_accepted(drafting: Drafting) -> None:
    prompts = [repetitive(60 + i, seed=2000 + i) for i in range(24)]
    alone = drafting.many("alone-drafts", "", prompts)
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
    alone = drafting.many("alone-drafts", "", prompts)
    pair = drafting.many("d32", "p16-drafts", prompts)
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]
