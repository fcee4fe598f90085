"""MiniMax M3 from vLLM to SGLang, and back: index keys, which vLLM keeps in bf16 whatever K and V are in.

Blocks have 128 tokens in vLLM, pages 64 or 128 in SGLang. Tokens are compared with SGLang alone.
"""

from __future__ import annotations

import pytest

from demo.model import LAYERS
from testing.kept import kept
from tests.system.cross.fleet import TOKENS, Cross, prompts
from tests.system.cross.halfway import Interrupted
from tests.system.engines.kinds import write_plain_sparse
from tests.system.engines.test_plain_index_keys import CHOOSING, PLUGIN
from tests.system.sglang.fleet import Answer, assert_idle, assert_same_tokens
from tests.system.sglang.rows import SavedRows, assert_parts_carried
from tests.system.sglang.test_plain_index_keys import CHANGES, OTHERS, write

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

VLLM = {"environment": {"PYTHONPATH": str(PLUGIN)}, "start": ("large",)}
SGLANG = {"changes": CHANGES, "others": OTHERS, "write": write}
minimax = kept(Cross, write=write_plain_sparse, of_vllm=VLLM, of_sglang=SGLANG, start=("p64", "d128", "alone"))
LENGTHS = (2, 129, 300)


def test_vllm_prefills_and_sglang_decodes(minimax: Cross) -> None:
    for tokens in prompts(LENGTHS, seed=0):
        answer, given, taken = minimax.to_sglang("large", "d128", tokens)
        assert_came(given, "bf16", taken, "fp32")
        assert_same_tokens(minimax.sglang.alone(tokens, TOKENS), answer)
    minimax.assert_prefix_stayed()
    assert_idle(minimax.sglang, "d128")
    minimax.vllm["large"].wait_empty()


def test_sglang_prefills_and_vllm_decodes(minimax: Cross) -> None:
    for tokens in prompts(LENGTHS, seed=500):
        found, cached, given, taken = minimax.to_vllm("p64", "large", tokens)
        assert cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert_came(given, "fp32", taken, "bf16")
        assert_same_tokens(minimax.sglang.alone(tokens, TOKENS), Answer(tuple(found), (), 0, None))
    minimax.assert_prefix_stayed()
    assert_idle(minimax.sglang, "p64")


class TestInterrupted(Interrupted):
    to_sglang, to_vllm = ("large", "d128"), ("p64", "large")

    @pytest.fixture
    def cross(self, minimax: Cross) -> Cross:
        return minimax


def assert_came(given: SavedRows, ours: str, taken: SavedRows, theirs: str) -> None:
    """K and V byte for byte, index keys in the receiver's codec."""
    kinds = {(layer, part) for layer in range(LAYERS) for part in "kv"}
    assert set(taken.rows) == kinds | {(layer, "index_key") for layer in CHOOSING}
    assert_parts_carried(given, taken, {("k", "v"): ("fp32", "fp32"), ("index_key",): (ours, theirs)})
