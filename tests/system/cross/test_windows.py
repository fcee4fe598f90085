"""Layers with a window, which vLLM keeps in a group of blocks and SGLang in a pool of their own: from one to the other.

Rows are compared where both engines still have them when they are looked at; tokens with each engine alone.
"""

from __future__ import annotations

import pytest

from demo.vllm_rows import LATER
from testing.kept import kept
from tests.system.cross.fleet import TOKENS, Cross, prompts
from tests.system.cross.halfway import Interrupted
from tests.system.engines.kinds import SEEN, write_alike_halves
from tests.system.sglang.fleet import Answer, assert_idle, assert_same_tokens
from tests.system.sglang.rows import SavedRows, assert_windows_carried

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

# With 111 tokens, as with every 32nd number, vLLM gives up a block that it would need for the last token itself.
# It keeps the window of 712 tokens from 608 on, as far as one begins that ends with its last whole block.
LENGTHS = (2, 79, 80, 81, 111, 112, 300, 712)


windows = kept(Cross, write=write_alike_halves, of_vllm={"start": ("small", "alone")}, start=("d16", "p32", "alone"))


def test_vllm_prefills_and_sglang_decodes(windows: Cross) -> None:
    for tokens in prompts(LENGTHS, seed=0):
        answer, given, taken = windows.to_sglang("small", "d16", tokens)
        assert_came(given, taken, len(tokens))
        assert_as_each_alone(windows, tokens, answer.tokens)
    windows.assert_prefix_stayed()
    assert_idle(windows.sglang, "d16")
    windows.vllm["small"].wait_empty()


def test_sglang_prefills_and_vllm_decodes(windows: Cross) -> None:
    """vLLM takes whole blocks of 32 tokens, so SGLang's pages are as large."""
    for tokens in prompts(LENGTHS, seed=500):
        found, cached, given, taken = windows.to_vllm("p32", "small", tokens)
        assert cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert_came(given, taken, len(tokens) - 1)
        assert_as_each_alone(windows, tokens, tuple(found))
    windows.assert_prefix_stayed()
    assert_idle(windows.sglang, "p32")
    windows.vllm["small"].wait_empty()


class TestInterrupted(Interrupted):
    to_sglang, to_vllm = ("small", "d16"), ("p32", "small")

    @pytest.fixture
    def cross(self, windows: Cross) -> Cross:
        return windows


def assert_came(given: SavedRows, taken: SavedRows, tokens: int) -> None:
    assert_windows_carried(given, taken, (1, 2), max(0, tokens + LATER + 1 - SEEN))


def assert_as_each_alone(cross: Cross, tokens: list[int], found: tuple[int, ...]) -> None:
    alone = cross.sglang.alone(tokens, TOKENS)
    assert_same_tokens(alone, Answer(found, (), 0, None))
    assert_same_tokens(alone, Answer(tuple(cross.vllm.alone(tokens, TOKENS)), (), 0, None))
