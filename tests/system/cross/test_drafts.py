"""Rows of a draft (EAGLE) from vLLM to SGLang, and back: drafts are accepted as in the decoding engine alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.cross.fleet import Cross
from tests.system.engines import drafts as of_vllm
from tests.system.engines.drafts import MORE, repetitive
from tests.system.sglang import drafts as of_sglang
from tests.system.sglang.drafts import per_step
from tests.system.sglang.fleet import assert_idle
from tests.system.sglang.rows import SavedRows, assert_carried

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

PROMPTS = 48


class Drafting(Cross):
    vllm: of_vllm.Drafting
    sglang: of_sglang.Drafting

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        python = os.environ["KVBRIDGE_TEST_VLLM_PYTHON"]
        (folder / "vllm").mkdir()
        start = ("large", "alone")
        self.vllm = of_vllm.Drafting(folder / "vllm", stack, "eagle", dtype="float32", python=python, start=start)
        self.sglang = of_sglang.Drafting(folder / "sglang", stack, environment={"TRITON_INTERPRET": "1"}, plain=())
        self._moved = []


drafting = kept(Drafting)


def test_vllm_prefills_and_sglang_decodes(drafting: Drafting) -> None:
    prompts = [repetitive(40 + i % 90, seed=i) for i in range(PROMPTS)]
    alone, pair = drafting.sglang.many("alone", "", prompts), []
    for tokens in prompts:
        _, body = drafting.for_sglang("large", tokens, amount=MORE)
        status, said = drafting.sglang["d32-drafts"].generate(body)
        assert status == 200, said
        pair.append(said)
    one, two = per_step(alone), per_step(pair)
    print(f"accepted in a step: SGLang {one:.4f}, behind vLLM {two:.4f}")
    assert [each["output_ids"] for each in pair] == [each["output_ids"] for each in alone]
    _, given, taken = drafting.to_sglang("large", "d32-drafts", repetitive(300, seed=7000))
    assert_came(given, taken)
    assert 0.85 * one <= two <= one  # vLLM keeps no hidden state, from which SGLang drafts in its first step
    assert_idle(drafting.sglang, "d32-drafts")


def test_sglang_prefills_and_vllm_decodes(drafting: Drafting) -> None:
    prompts = [repetitive(40 + i % 90, seed=1000 + i) for i in range(PROMPTS)]
    alone, one = drafting.vllm.answers("alone", "", prompts), drafting.vllm.per_step("alone")
    pair = []
    for tokens in prompts:
        begun, params = drafting.for_vllm("p16-drafts", tokens)
        answer = drafting.vllm["large"].run(drafting.vllm.name("many"), tokens, MORE, params)
        assert answer.cached == len(tokens) - 1
        assert drafting.sglang["p16-drafts"].ended(begun)[0] == 200
        pair.append(list(answer.tokens))
    two = drafting.vllm.per_step("large")
    print(f"accepted in a step: vLLM {one:.4f}, behind SGLang {two:.4f}")
    assert pair == alone
    _, _, given, taken = drafting.to_vllm("p16-drafts", "large", repetitive(300, seed=7001))
    assert_came(given, taken)
    assert abs(two - one) <= one / 100
    assert_idle(drafting.sglang, "p16-drafts")


def assert_came(given: SavedRows, taken: SavedRows) -> None:
    assert {layer for layer, _ in taken.rows} == set(range(LAYERS + 1))
    assert_carried(given, taken)
