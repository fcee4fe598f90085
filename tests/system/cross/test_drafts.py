"""Rows of a draft (EAGLE) from vLLM to SGLang, and back: drafts are accepted as in the decoding engine alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.cross.fleet import SEEDS, Cross
from tests.system.engines import drafts as of_vllm
from tests.system.engines.drafts import MORE, repetitive
from tests.system.sglang import drafts as of_sglang
from tests.system.sglang.drafts import per_step
from tests.system.sglang.fleet import assert_idle
from tests.system.sglang.rows import SavedRows, assert_carried

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

SOME = 16  # prompts, where ranks differ


class Drafting(Cross):
    vllm: of_vllm.Drafting
    sglang: of_sglang.Drafting

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        python = os.environ["KVBRIDGE_TEST_VLLM_PYTHON"]
        (folder / "vllm").mkdir()
        start = ("large", "two", "alone")
        self.vllm = of_vllm.Drafting(folder / "vllm", stack, "eagle", dtype="float32", python=python, start=start)
        self.sglang = of_sglang.Drafting(folder / "sglang", stack, environment={"TRITON_INTERPRET": "1"}, plain=())
        self._moved = []


drafting = kept(Drafting)


@pytest.mark.parametrize(
    ("sender", "receiver", "count"),
    [("two", "d32-drafts", SOME), ("large", "d16-two-drafts", SOME), ("large", "d32-drafts", 3 * SOME)],
)
def test_vllm_prefills_and_sglang_decodes(drafting: Drafting, sender: str, receiver: str, count: int) -> None:
    prompts = [repetitive(40 + i % 90, seed=next(SEEDS)) for i in range(count)]
    drafting.vllm.start(sender)
    drafting.sglang.start(receiver)  # nothing is held for as long as a start may take
    alone, pair = drafting.sglang.many("alone", "", prompts), []
    for tokens in prompts:
        _, body = drafting.for_sglang(sender, tokens, amount=MORE)
        status, said = drafting.sglang[receiver].generate(body)
        assert status == 200, said
        pair.append(said)
    one, two = per_step(alone), per_step(pair)
    print(f"accepted in a step: SGLang {one:.4f}, behind vLLM {two:.4f}")
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]
    _, given, taken = drafting.to_sglang(sender, receiver, repetitive(300, seed=next(SEEDS)))
    assert_came(given, taken)
    assert 0.8 * one <= two <= one  # vLLM keeps no hidden state, from which SGLang drafts in its first step
    assert_idle(drafting.sglang, receiver)


@pytest.mark.parametrize(
    ("sender", "receiver", "count"),
    [("p16-two-drafts", "large", SOME), ("p16-drafts", "two", SOME), ("p16-drafts", "large", 3 * SOME)],
)
def test_sglang_prefills_and_vllm_decodes(drafting: Drafting, sender: str, receiver: str, count: int) -> None:
    prompts = [repetitive(40 + i % 90, seed=next(SEEDS)) for i in range(count)]
    drafting.sglang.start(sender)
    drafting.vllm.start(receiver)
    alone, one = drafting.vllm.answers("alone", "", prompts), drafting.vllm.per_step("alone")
    pair = []
    for tokens in prompts:
        begun, params = drafting.for_vllm(sender, tokens)
        answer = drafting.vllm[receiver].run(drafting.vllm.name("many"), tokens, MORE, params)
        assert answer.cached == len(tokens) - 1
        assert drafting.sglang[sender].ended(begun)[0] == 200
        pair.append(list(answer.tokens))
    two = drafting.vllm.per_step(receiver)
    print(f"accepted in a step: vLLM {one:.4f}, behind SGLang {two:.4f}")
    assert pair == alone
    _, _, given, taken = drafting.to_vllm(sender, receiver, repetitive(300, seed=next(SEEDS)))
    assert_came(given, taken)
    assert abs(two - one) <= one / 100
    assert_idle(drafting.sglang, sender)


def assert_came(given: SavedRows, taken: SavedRows) -> None:
    assert {layer for layer, _ in taken.rows} == set(range(LAYERS + 1))
    assert_carried(given, taken)
