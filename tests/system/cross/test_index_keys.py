"""Models with sparse attention, from vLLM to SGLang and back. SGLang rotates the index keys of one, not of the other.

Blocks have 16 tokens in vLLM and 64 in SGLang. Rows only: each engine computes them in its own way, and vLLM's CPU
backend for latents says other tokens anyway (tests/system/engines/test_latents.py).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from testing.kept import kept
from tests.support import index_keys
from tests.system.cross.fleet import Cross
from tests.system.engines.kinds import write_sparse
from tests.system.engines.test_index_keys import INDEXED, PLUGIN
from tests.system.sglang.fleet import assert_idle, prompt
from tests.system.sglang.rows import SavedRows, assert_carried
from tests.system.sglang.test_index_keys import CHANGES, OTHERS, write
from tests.system.sglang.test_latents import YARN

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

VLLM = {"more": {"attention_backend": "CPU_MLA"}, "environment": {"PYTHONPATH": str(PLUGIN)}}
SGLANG = {"changes": CHANGES, "others": OTHERS}
sparse = kept(Cross, write=write, of_vllm=VLLM, of_sglang=SGLANG)
rotated = kept(Cross, write=partial(write_sparse, rope_scaling=YARN), of_vllm=VLLM, of_sglang=SGLANG)
LENGTHS = (2, 65, 300)


def test_vllm_prefills_and_sglang_decodes(sparse: Cross) -> None:
    for length in LENGTHS:
        _, given, taken = sparse.to_sglang("sixteen", "d64", prompt(length, seed=length))
        assert_came(given, "fp32", taken, "bf16")
    assert_idle(sparse.sglang, "d64")
    sparse.vllm["sixteen"].wait_empty()


def test_sglang_prefills_and_vllm_decodes(sparse: Cross) -> None:
    for length in LENGTHS:
        _, cached, given, taken = sparse.to_vllm("p64", "sixteen", prompt(length, seed=500 + length))
        assert cached == length - 1
        assert_came(given, "bf16", taken, "fp32")
    assert_idle(sparse.sglang, "p64")


def test_vllm_prefills_and_sglang_decodes_what_it_rotates(rotated: Cross) -> None:
    for length in LENGTHS:
        _, given, taken = rotated.to_sglang("sixteen", "d64", prompt(length, seed=100 + length))
        assert_converted(given, "fp32", taken, "bf16")
    assert_idle(rotated.sglang, "d64")
    rotated.vllm["sixteen"].wait_empty()


def test_sglang_prefills_what_it_rotates_and_vllm_decodes(rotated: Cross) -> None:
    for length in LENGTHS:
        _, cached, given, taken = rotated.to_vllm("p64", "sixteen", prompt(length, seed=600 + length))
        assert cached == length - 1
        assert_converted(given, "bf16", taken, "fp32")
    assert_idle(rotated.sglang, "p64")


def assert_converted(given: SavedRows, ours: str, taken: SavedRows, theirs: str) -> None:
    """Index keys are what the oracle makes of those that were given, byte for byte."""
    expected = dict(given.rows)
    for layer in INDEXED:
        keys, scales = given.rows[layer, "index_key"], given.rows[layer, "index_key_scale"]
        keys, scales = index_keys.received(keys, scales, "pow2_fp32", "pow2_fp32", rotates=True)
        assert not np.array_equal(keys, given.rows[layer, "index_key"])
        expected[layer, "index_key"], expected[layer, "index_key_scale"] = keys, scales
    assert_came(SavedRows(expected, given.codec), ours, taken, theirs)


def assert_came(given: SavedRows, ours: str, taken: SavedRows, theirs: str) -> None:
    """Latents are converted, index keys and their scales come byte for byte."""
    assert {layer for layer, part in taken.rows if part == "index_key"} == set(INDEXED)
    for is_latent, codecs in ((True, (ours, theirs)), (False, ("bytes", "bytes"))):
        sides = [
            SavedRows({key: rows for key, rows in side.rows.items() if (key[1] == "latent") == is_latent}, codec)
            for side, codec in zip((given, taken), codecs, strict=True)
        ]
        assert_carried(*sides)
