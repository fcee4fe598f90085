"""Prefill in one engine, decode in the other: rows as in the reference conversion, tokens as from each engine alone."""

from __future__ import annotations

import pytest

from testing.kept import kept
from tests.system.cross.fleet import TOKENS, Cross
from tests.system.sglang import rows
from tests.system.sglang.fleet import Answer, assert_idle, assert_same_tokens, prompt, seed_of

pytestmark = [pytest.mark.cross, pytest.mark.timeout(400)]

LENGTHS = (2, 15, 16, 17, 33, 64, 300, 700)


cross = kept(Cross)


@pytest.mark.parametrize(("sender", "receiver"), [("small", "d16"), ("two", "d16"), ("large", "d16")])
def test_vllm_prefills_and_sglang_decodes(cross: Cross, sender: str, receiver: str) -> None:
    for number, length in enumerate(LENGTHS):
        tokens = prompt(length, seed=seed_of(sender, receiver, number))
        answer, given, taken = cross.to_sglang(sender, receiver, tokens)
        rows.assert_carried(given, taken)
        _assert_as_each_alone(cross, tokens, answer.tokens)
    assert_idle(cross.sglang, receiver)
    cross.vllm[sender].wait_empty()


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "small"), ("p16-two", "small"), ("p16", "large")])
def test_sglang_prefills_and_vllm_decodes(cross: Cross, sender: str, receiver: str) -> None:
    cross.sglang.start(sender)
    for number, length in enumerate(LENGTHS):
        tokens = prompt(length, seed=seed_of(sender, receiver, number))
        found, cached, given, taken = cross.to_vllm(sender, receiver, tokens)
        assert cached == length - 1, "the prompt did not travel, it was computed again"
        rows.assert_carried(given, taken)
        _assert_as_each_alone(cross, tokens, tuple(found))
    assert_idle(cross.sglang, sender)
    cross.vllm[receiver].wait_empty()


def _assert_as_each_alone(cross: Cross, tokens: list[int], found: tuple[int, ...]) -> None:
    alone = cross.sglang.alone(tokens, TOKENS)
    assert_same_tokens(alone, Answer(found, (), 0, None))
    assert_same_tokens(alone, Answer(tuple(cross.vllm.alone(tokens, TOKENS)), (), 0, None))
