"""The comparison of servers' rows sees every difference. Needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import OperatorError
from tests.system.sglang.rows import SavedRows, assert_carried, load
from tests.unit.kernels.slow_codecs import encode

TOKENS, HEADS, WIDTH = 7, 4, 8
WORDS = {"bf16": "<u2", "fp8_e4m3": "u1"}


def floats(seed: int, heads: int = HEADS) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 200, (TOKENS, heads, WIDTH)).astype("<f4")


def rows_of(values: np.ndarray, codec: str = "fp32") -> SavedRows:
    return SavedRows({(0, "k"): values.view(np.uint8)}, codec)


def put(folder: Path, side: str, rank: int, codec: str = "fp32", **rows: np.ndarray) -> None:
    named: dict[str, Any] = {f"0.{part}": values.view(np.uint8) for part, values in rows.items()}
    np.savez(folder / f"{side}-5-{rank}.npz", codec=np.array(codec), **named)


def test_heads_of_the_ranks_are_joined_in_their_order(tmp_path: Path) -> None:
    values = floats(1)
    for rank in (0, 1):
        put(tmp_path, "prefill", rank, k=np.ascontiguousarray(values[:, 2 * rank : 2 * rank + 2]))
    put(tmp_path, "decode", 0, k=values)
    given, taken = load(tmp_path, "prefill", 5, 2), load(tmp_path, "decode", 5, 1)
    assert_carried(given, taken)
    given.rows[0, "k"][3, 2, 9] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 28 rows differ, the first at token 3, head 2"):
        assert_carried(given, taken)


def test_a_latent_must_be_the_same_on_every_rank(tmp_path: Path) -> None:
    put(tmp_path, "decode", 0, latent=floats(1, 1))
    put(tmp_path, "decode", 1, latent=floats(1, 1))
    assert load(tmp_path, "decode", 5, 2).rows[0, "latent"].shape == (TOKENS, 1, 4 * WIDTH)
    put(tmp_path, "decode", 1, latent=floats(2, 1))
    with pytest.raises(OperatorError, match="ranks differ in layer 0"):
        load(tmp_path, "decode", 5, 2)


def test_rows_that_nobody_wrote_are_missed(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"no decode-5-0\.npz was written"):
        load(tmp_path, "decode", 5, 1, timeout_s=0.1)


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3"])
def test_converts_as_the_definition_of_the_codec_says(codec: str) -> None:
    values = floats(3)
    assert (np.abs(values) > 448).any()
    stored = encode(values, codec).astype(WORDS[codec])
    assert_carried(rows_of(values), rows_of(stored, codec))


def test_rows_of_zeros_prove_nothing() -> None:
    nothing = rows_of(np.zeros((TOKENS, HEADS, WIDTH), "<f4"))
    with pytest.raises(AssertionError, match="most rows are zeros"):
        assert_carried(nothing, nothing)
