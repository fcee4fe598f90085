"""DeepSeek V4.1 between engines of vLLM: rings by position, and windows that no prefix cache has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvbridge.adapters.vllm import dtypes
from kvbridge.errors import OperatorError
from testing.refusals import refused
from tests.integration.adapters.compressed import MXFP4_KEY, Engine
from tests.integration.adapters.rings import BLOCK, v41
from tests.integration.adapters.test_vllm_compressed import (
    fetches_every_length,
    handed_over,
    pair,
    pool_of,
    preempts_all,
    prompt_of,
    settle,
)

pytestmark = pytest.mark.vllm

V41: dict[str, Any] = {"caches": v41, "block": BLOCK, "hashed": 32}
# The decode side fetches all but the last: around where rows of 2, laps of a ring of 8, blocks and the window end.
LENGTHS = (*range(2, 19), 33, 65, 66, 128, 129, 130, 161, 257, 300)


@pytest.mark.parametrize(
    ("ours", "theirs", "budget", "lengths"), [(1, 1, 100, LENGTHS), (2, 1, 2048, (130, 300)), (1, 2, 33, (9, 257))]
)
def test_every_length_is_fetched_and_goes_on(
    tmp_path: Path, ours: int, theirs: int, budget: int, lengths: Sequence[int]
) -> None:
    with pair(tmp_path, ours, theirs, budget=budget, **V41) as (prefill, decode):
        fetches_every_length(prefill, decode, lengths)
        assert len(decode.compared) == 5, decode.compared


@pytest.mark.parametrize(("ours", "theirs"), [(8, 16), (16, 8), (32, 16)])
def test_rings_of_other_lengths(tmp_path: Path, ours: int, theirs: int) -> None:
    """Each side's depends on how many tokens it drafts."""
    more = V41 | {"caches": partial(v41, ring=ours)}
    with pair(tmp_path, budget=50, of_theirs={"caches": partial(v41, ring=theirs)}, **more) as (prefill, decode):
        for length in range(2, 2 * max(ours, theirs) + 3):
            request = handed_over(prefill, decode, prompt_of(length, length))
            settle(prefill, decode)
            assert decode.computed[request.request_id] == 6, length
        assert decode.compared["ring"]


FORMS = [
    ("fp8_ds_mla", {"window_row": 528, "row": 528, "index": MXFP4_KEY}, ("mxfp8_e4m3", "mxfp8_e4m3")),
    ("fp8_ds_mla", {"window_row": 528, "row": 528, "together": True}, ("mxfp8_e4m3", "mxfp8_e4m3")),
    ("nvfp4_ds_mla", {"window_row": 528, "row": 288}, ("mxfp8_e4m3", "nvfp4")),
    ("bfloat16", {"window_row": 0, "row": 0, "replays": False}, ("bf16", "bf16")),
]


@pytest.mark.parametrize(("dtype", "rows", "codecs"), FORMS, ids=["v41", "v41 of 0.33", "nvfp4", "plain"])
def test_every_form_of_rows(
    tmp_path: Path, dtype: str, rows: dict[str, Any], codecs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SM100: 512 numbers and 16 exponents, which 0.33 has behind each row; NVFP4; without windows computed again."""
    monkeypatch.setattr(dtypes, "has_interleaved_rows", lambda: rows.get("together", False))
    more = V41 | {"caches": partial(v41, **rows), "dtype": dtype}
    with pair(tmp_path, budget=100, **more) as (prefill, decode):
        found = {plane.part: plane.codec.name for plane in pool_of(decode).planes if plane.layer == 1}
        assert (found["latent"], found["compressed_latent"]) == codecs
        for length in (5, 130):
            request = handed_over(prefill, decode, prompt_of(length, length))
            settle(prefill, decode)
            assert decode.computed[request.request_id] == 6, length


def test_a_ring_is_a_chunk_of_what_its_row_is_made_of(tmp_path: Path) -> None:
    groups = pool_of(Engine(tmp_path / "v41", [], **V41)).groups
    told = {(each.kind, each.window, each.block_tokens, each.never_cached) for each in groups}
    assert told == {("full", 0, BLOCK, False), ("sliding", 128, 32, True), ("chunked", 2, 8, True)}


def test_a_ring_whose_rows_are_of_unknown_tokens_is_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "v41", [], **V41)
    del engine.layers["model.layers.1.attn"].compress_ratio
    with refused(OperatorError, "layer_unsupported", "a ring of 8 tokens for rows of unknown, which must divide it"):
        pool_of(engine)


def test_requests_at_once_of_which_all_are_preempted(tmp_path: Path) -> None:
    with pair(tmp_path, budget=256, **V41) as (prefill, decode):
        preempts_all(prefill, decode, range(124, 144, 5))


def test_prefixes_that_either_side_has(tmp_path: Path) -> None:
    with pair(tmp_path, budget=512, async_scheduling=True, **V41) as (prefill, decode):
        prompt = prompt_of(900)
        first = handed_over(prefill, decode, prompt[:300])
        settle(prefill, decode)
        for length in (301, 320, 321, 322, 330, 513, 514, 640, 900):
            request = handed_over(prefill, decode, [*prompt[:length], length])
            settle(prefill, decode)
            assert decode.computed[request.request_id] == 6, length
        assert decode.computed[first.request_id] == 6
