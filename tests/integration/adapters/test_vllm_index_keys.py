"""Index keys of DeepSeek V3.2 and GLM-5 in vLLM: every byte lies where the planes say, by vLLM's own writers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from kvbridge_proto.pool import Plane, Pool, Shard
from vllm.utils import deep_gemm
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Convertible, Incompatible, Same, verdict
from testing.refusals import refused
from tests.integration.adapters.test_vllm_backends import functions
from tests.integration.adapters.test_vllm_pool import build

pytestmark = pytest.mark.vllm

PAGE, WIDTH, SCALE, BLOCKS = 64, 128, 4, 3  # a page of the kernels that read index keys on CUDA
COMMON: dict[str, Any] = {"num_kv_heads": 1}
ATTENTION, INDEX = "model.layers.{}.self_attn.attn", "model.layers.{}.self_attn.indexer.k_cache"


def specs(block: int, latent: torch.dtype = torch.bfloat16) -> tuple[MLAAttentionSpec, MLAAttentionSpec]:
    """As `DeepseekV32IndexerCache.get_kv_cache_spec` makes the second."""
    role = {"cache_role": SparseCacheRole.INDEXER}
    return (
        MLAAttentionSpec(**COMMON, block_size=block, head_size=576, dtype=latent),
        MLAAttentionSpec(**COMMON, block_size=block, head_size=WIDTH + SCALE, dtype=torch.uint8, **role),
    )


def caches(block: int, layers: int = 2, indexed: tuple[int, ...] = (0, 1), pad: int = 0) -> dict[str, torch.Tensor]:
    """The views that vLLM hands over: of pages of the kernel, several of which make a block."""
    pages = BLOCKS * block // PAGE
    page_bytes = PAGE * (WIDTH + SCALE)
    found = {
        ATTENTION.format(layer): torch.zeros(BLOCKS, 1, block, 576, dtype=torch.bfloat16) for layer in range(layers)
    }
    for layer in indexed:
        buffer = torch.zeros(pages, page_bytes + pad, dtype=torch.uint8)
        shape, strides = (pages, 1, PAGE, WIDTH + SCALE), (page_bytes + pad, page_bytes, WIDTH + SCALE, 1)
        found[INDEX.format(layer)] = torch.as_strided(buffer, shape, strides)
    return found


def pool_of(tensors: dict[str, torch.Tensor], block: int, latent: torch.dtype = torch.bfloat16, **more: Any) -> Pool:
    beside, index = specs(block, latent)
    return build(
        tensors,
        specs={name: index if name.endswith("k_cache") else beside for name in tensors},
        backends={name: "DEEPSEEK_V32_INDEXER" if name.endswith("k_cache") else "FLASHMLA_SPARSE" for name in tensors},
        blocks=BLOCKS,
        total_layers=2,
        **more,
    )


def byte_of(plane: Plane, block: int, token: int) -> int:
    """Where the row of a token begins, by the definition of a plane."""
    at, rest = plane.offset + block * plane.block_stride, token
    for step in reversed(plane.token_axis):
        rest, digit = divmod(rest, step.count)
        at += digit * step.stride
    return at


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("pad", [0, 192])
def test_a_page_has_all_keys_and_then_their_scales(block: int, pad: int) -> None:
    """`indexer_k_quant_and_cache_kernel`: key at token * 128 of the page, scale at page * 128 + token * 4."""
    tensors = caches(block, pad=pad)
    pool = pool_of(tensors, block)
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    assert set(planes) == {(layer, part) for layer in (0, 1) for part in ("latent", "index_key", "index_key_scale")}
    step = PAGE * (WIDTH + SCALE) + pad
    for number, token in np.ndindex(BLOCKS, block):
        page, place = number * (block // PAGE) + token // PAGE, token % PAGE
        assert byte_of(planes[0, "index_key"], number, token) == page * step + place * WIDTH
        assert byte_of(planes[0, "index_key_scale"], number, token) == page * step + PAGE * WIDTH + place * SCALE
    key, scale = planes[0, "index_key"], planes[0, "index_key_scale"]
    assert (key.codec.name, key.codec.row_bytes, key.codec.scale_codec) == ("fp8_row_scale", WIDTH, "pow2_fp32")
    assert (scale.codec.name, scale.codec.row_bytes) == ("pow2_fp32", SCALE)


# kv_cache_dtype: what vLLM allocates for a latent, and what its rows are.
LATENTS = {
    "auto": (torch.bfloat16, 576, "bf16"),
    "fp8": (torch.uint8, 576, "fp8_e4m3"),
    "fp8_ds_mla": (torch.uint8, 656, "fp8_ds_mla"),
}


@pytest.mark.parametrize("ours", LATENTS)
@pytest.mark.parametrize("theirs", LATENTS)
def test_latents_beside_them_may_have_any_dtype(ours: str, theirs: str) -> None:
    pools = []
    for said in (ours, theirs):
        dtype, width, codec = LATENTS[said]
        tensors = caches(64)
        for layer in range(2):
            tensors[ATTENTION.format(layer)] = torch.zeros(BLOCKS, 1, 64, width, dtype=dtype)
        pools.append(pool_of(tensors, 64, latent=dtype, kv_cache_dtype=said))
        found = {plane.part: plane.codec.name for plane in pools[-1].planes if plane.layer == 0}
        assert found == {"latent": codec, "index_key": "fp8_row_scale", "index_key_scale": "pow2_fp32"}
    judged = verdict(*pools)
    assert isinstance(judged, Same if ours == theirs else Convertible), judged


def test_vllms_writer_of_index_keys_is_as_we_read_it() -> None:
    writer = functions("models/deepseek_v32/common/kernels.py")["_fp8_quant_and_cache_write"]
    for expected in (
        "value_off = block_offset * HEAD_DIM + offsets",
        "scale_byte_off = block_start + cache_block_size * HEAD_DIM + block_offset * 4",
        "k_fp8, scale = _fp8_ue8m0_quantize(",
    ):
        assert expected in writer
    scale = functions("models/deepseek_v32/common/kernels.py")["_fp8_ue8m0_quantize"]
    assert "scale = tl.math.exp2(tl.math.ceil(tl.math.log2(scale)))" in scale, "a power of two"
    assert "scale = tl.div_rn(tl.maximum(amax, 0.0001), FP8_MAX)" in scale, "as codecs_ref.LEAST_IN_ROW"


def test_every_rank_has_them_whole_and_layers_that_share_a_choice_have_none() -> None:
    ranks = [
        pool_of(caches(64, indexed=(1,)), 64, shard=Shard(tp_rank=rank, tp_size=8), total_heads=1) for rank in range(8)
    ]
    for pool in ranks:
        assert {(plane.first_head, plane.heads, plane.total_heads) for plane in pool.planes} == {(0, 1, 1)}
        assert [plane.layer for plane in pool.planes if plane.part == "index_key"] == [1]
        assert [layer and layer.kind for layer in pool.model.layers] == ["mla", "mla"]
    assert isinstance(verdict(ranks[0], pool_of(caches(128, indexed=(1,)), 128)), Convertible)
    missing = verdict(ranks[0], pool_of(caches(64), 64))
    assert isinstance(missing, Incompatible)
    assert missing.reasons[0].startswith("parts: sender latent, receiver index_key latent (layer 0)")


def test_index_keys_of_a_draft_have_its_number() -> None:
    tensors = caches(64) | {
        name.replace("model.layers.1", "draft.layers.0"): tensor for name, tensor in caches(64).items() if ".1." in name
    }
    pool = pool_of(tensors, 64)
    assert [plane.layer for plane in pool.planes if plane.part == "index_key"] == [0, 1, 2]
    del tensors["draft.layers.0.self_attn.attn"]
    with refused(
        OperatorError,
        "layer_unsupported",
        "draft.+k_cache: index_key, and no attention layer",
    ):
        pool_of(tensors, 64)


@pytest.mark.parametrize(("width", "dtype"), [(72, torch.uint8), (132, torch.int8), (128, torch.bfloat16)])
def test_an_index_cache_of_another_width_is_refused_by_name(width: int, dtype: torch.dtype) -> None:
    latent, _ = specs(64)
    tensors = caches(64, layers=1, indexed=())
    tensors[INDEX.format(0)] = torch.zeros(BLOCKS, 1, 64, width, dtype=dtype)
    index = MLAAttentionSpec(**COMMON, block_size=64, head_size=width, dtype=dtype)
    with refused(OperatorError, "codec_unknown", f"indexer.k_cache: index cache of {width} x {dtype} a token"):
        build(
            tensors,
            specs={ATTENTION.format(0): latent, INDEX.format(0): index},
            backends={ATTENTION.format(0): "FLASHMLA_SPARSE", INDEX.format(0): "DEEPSEEK_V32_INDEXER"},
            blocks=BLOCKS,
        )


def test_values_in_another_order_are_refused() -> None:
    """ROCm's tiles of 16 tokens."""
    with refused(OperatorError, "codec_unknown", "in order"):
        pool_of(caches(64), 64, layer={"uses_shuffled_layout": True})


def test_where_scales_are_four_exponents_the_codec_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """SM100 from 0.33 on: nothing in the tensor shows it, so vLLM is asked. The other form is not taken for it."""
    ours = pool_of(caches(64), 64)
    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: True, raising=False)
    theirs = pool_of(caches(64), 64)
    codecs = {plane.part: plane.codec for plane in theirs.planes}
    assert (codecs["index_key"].scale_codec, codecs["index_key_scale"].name) == ("ue8m0_x4", "ue8m0_x4")
    assert verdict(theirs, theirs) == Same()
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        found = verdict(sender, receiver)
        assert isinstance(found, Convertible) and found.conversion == "codec"
        assert found.changes[0].startswith("scale_codec: sender ") and "layer 0 index_key" in found.changes[0]
