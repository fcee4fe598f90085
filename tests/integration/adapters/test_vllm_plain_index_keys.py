"""MiniMax M3 in vLLM: K, V and plain index keys lie where the planes say, in memory that vLLM's own code lays out."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import numpy as np
import torch
from kvbridge_proto.pool import Pool, Shard
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.vllm.scales import changed_scales
from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Convertible, Incompatible, Same, verdict
from testing.oracle import take_rows
from testing.refusals import refused
from tests.integration.adapters.small import held
from tests.integration.adapters.test_vllm_backends import SOURCE, functions
from tests.integration.adapters.test_vllm_pool import allocated, build

pytestmark = pytest.mark.vllm

PAGE, WIDTH, HEADS, BLOCKS = 128, 128, 4, 3  # PAGE is that of all kernels of this model
LAYERS, DENSE = 3, 1  # the first layer has no index keys
ATTENTION, INDEX = "model.layers.{}.self_attn.attn", "model.layers.{}.self_attn.attn.index_cache"


def specs(
    tp_size: int = 1, block: int = PAGE, dtype: torch.dtype = torch.bfloat16, index: torch.dtype = torch.bfloat16
) -> dict[str, KVCacheSpec]:
    """As `MiniMaxM3SparseAttention` and `MiniMaxM3IndexerCache` make them (`get_kv_cache_spec`)."""
    found: dict[str, KVCacheSpec] = {}
    for layer in range(LAYERS):
        found[ATTENTION.format(layer)] = FullAttentionSpec(
            block_size=block,
            num_kv_heads=max(1, HEADS // tp_size),
            head_size=WIDTH,
            head_size_v=WIDTH,
            dtype=dtype,
        )
        if layer >= DENSE:
            found[INDEX.format(layer)] = MLAAttentionSpec(
                block_size=block, num_kv_heads=1, head_size=WIDTH, dtype=index, cache_role=SparseCacheRole.INDEXER
            )
    return found


Laid = tuple[list[KVCacheGroupSpec], dict[str, torch.Tensor]]


def laid_out(made: dict[str, KVCacheSpec], layout: str = "LBNHC") -> Laid:
    """vLLM's planner puts all layers into one group."""
    groups, caches = allocated(made, layout, BLOCKS, PAGE)
    (group,) = groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    return groups, caches


def pool_of(laid: Laid, shard: Shard | None = None, **more: Any) -> Pool:
    groups, caches = laid
    return build(
        caches,
        groups=groups,
        backends={
            name: "MINIMAX_M3_SPARSE_INDEXER" if name.endswith("index_cache") else "MINIMAX_M3_SPARSE"
            for name in caches
        }
        | {ATTENTION.format(layer): "FLASH_ATTN" for layer in range(DENSE)},
        blocks=BLOCKS,
        total_heads=HEADS,
        total_layers=LAYERS,
        shard=shard or Shard(),
        **more,
    )


def written(cache: torch.Tensor, index: torch.Tensor, block: int, head: int) -> dict[str, torch.Tensor]:
    """Rows of every slot as `fusedMiniMaxM3QNormRopeKVInsertKernel` places them: K and V by the strides of the cache.

    Index keys are at slot * 128 from the first one, whatever the strides.
    """
    cells = cache.view(torch.int16)
    flat = torch.as_strided(index.view(torch.int16), (BLOCKS * block, WIDTH), (WIDTH, 1))
    rows = {part: torch.randint(-(1 << 15), 1 << 15, (BLOCKS * block, WIDTH)) for part in ("k", "v", "index_key")}
    for slot in range(BLOCKS * block):
        page, place = slot // PAGE, slot % PAGE
        cells[page, head, place, :WIDTH], cells[page, head, place, WIDTH:] = rows["k"][slot], rows["v"][slot]
        flat[slot] = rows["index_key"][slot]
    return {part: each.to(torch.int16) for part, each in rows.items()}


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("block", [PAGE, 2 * PAGE])
def test_every_row_is_where_vllms_kernel_writes_it(layout: str, block: int) -> None:
    laid = laid_out(specs(block=block), layout)
    caches, pool = laid[1], pool_of(laid)
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    assert set(planes) == {
        *((layer, part) for layer in range(LAYERS) for part in "kv"),
        *((layer, "index_key") for layer in range(DENSE, LAYERS)),
    }
    assert [group.block_tokens for group in pool.groups] == [block], "one block table for all of them"
    memory = Memory(pool, (caches[ATTENTION.format(0)].untyped_storage(),))
    for head in (0, HEADS - 1):
        rows = written(caches[ATTENTION.format(2)], caches[INDEX.format(2)], block, head)
        for part, expected in rows.items():
            found = take_rows(held(memory), planes[2, part], np.arange(BLOCKS * block))
            own = found[:, 0 if part == "index_key" else head]
            assert np.array_equal(own, expected.view(torch.uint8).numpy()), part


def test_vllms_writer_and_readers_are_as_we_read_them() -> None:
    model = ast.parse((SOURCE / "models/minimax_m3/nvidia/model.py").read_text())
    (call,) = (
        ast.unparse(node)
        for node in ast.walk(model)
        if isinstance(node, ast.Call) and "self.indexer.index_cache.kv_cache" in map(ast.unparse, node.args)
    )
    assert call.startswith("ops.fused_minimax_m3_qknorm_rope_kv_insert(") and "self.kv_cache, " in call
    reader = functions("models/minimax_m3/common/ops/sparse_attn.py")["_gqa_sparse_fwd_kernel"]
    for expected in ("page * stride_kv_blk", "off_n[None, :] * stride_kv_pos", "(head_dim + off_d[None, :]) * stride"):
        assert expected in reader
    scored = functions("models/minimax_m3/common/ops/index_topk.py")["_index_block_score_kernel"]
    assert "stride_ik_blk" in scored and "stride_ik_pos" in scored


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_heads_are_cut_or_shared_and_index_keys_are_whole_on_every_rank(tp_size: int) -> None:
    laid, count = laid_out(specs(tp_size)), max(1, HEADS // tp_size)
    for rank in range(tp_size):
        pool = pool_of(laid, Shard(tp_rank=rank, tp_size=tp_size))
        cut = (rank * HEADS // tp_size, count, HEADS)
        heads = {plane.part: (plane.first_head, plane.heads, plane.total_heads) for plane in pool.planes}
        assert heads == {"k": cut, "v": cut, "index_key": (0, 1, 1)}
        layers = {layer and (layer.kind, layer.kv_heads, layer.value_width) for layer in pool.model.layers}
        assert layers == {("full", HEADS, WIDTH)}


def test_blocks_and_ranks_may_differ_but_not_which_layers_have_index_keys_or_how_wide_they_are() -> None:
    whole = pool_of(laid_out(specs()))
    half = pool_of(laid_out(specs(2, 2 * PAGE)), Shard(tp_size=2))
    assert isinstance(verdict(whole, half), Convertible) and isinstance(verdict(half, whole), Convertible)
    fewer = pool_of(laid_out({name: spec for name, spec in specs().items() if name != INDEX.format(2)}))
    found = verdict(fewer, whole)
    assert isinstance(found, Incompatible)
    assert found.reasons[0].startswith("parts: sender k v, receiver index_key k v (layer 2)")
    planes = []
    for plane in whole.planes:
        if plane.part == "index_key":
            codec = msgspec.structs.replace(plane.codec, width=64, row_bytes=128)
            axis = (msgspec.structs.replace(plane.element_axis[0], count=64),)
            plane = msgspec.structs.replace(plane, codec=codec, element_axis=axis)
        planes.append(plane)
    found = verdict(msgspec.structs.replace(whole, planes=tuple(planes)), whole)
    assert isinstance(found, Incompatible)
    assert found.reasons[0].startswith("width: sender 64, receiver 128 (layer 1 index_key")


def test_their_dtype_is_their_own_and_has_no_scale() -> None:
    """`--attention-config.indexer_kv_dtype`; an fp8 cache is `--kv-cache-dtype`."""
    fp8 = {"kv_cache_dtype": "fp8"}
    plain = pool_of(laid_out(specs(dtype=torch.uint8)), **fp8)
    small = pool_of(laid_out(specs(dtype=torch.uint8, index=torch.float8_e4m3fn)), **fp8)
    for pool, name, size in ((plain, "bf16", 2), (small, "fp8_e4m3", 1)):
        codecs = {plane.part: plane.codec for plane in pool.planes}
        assert (codecs["k"].name, codecs["k"].scales, codecs["v"].scales) == ("fp8_e4m3", (0.5,), (0.25,))
        assert (codecs["index_key"].name, codecs["index_key"].row_bytes) == (name, WIDTH * size)
        assert codecs["index_key"].scales == ((1.0,) if name == "fp8_e4m3" else ())
        layers = {plane.name: SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.25) for plane in pool.planes}
        assert changed_scales(pool, layers) == ()
    assert verdict(small, small) == Same() and isinstance(verdict(plain, small), Convertible)


def test_an_index_cache_that_vllm_would_not_write_where_it_reads_is_refused() -> None:
    """With blocks outermost, a block has a stride that the writer does not know of."""
    with refused(OperatorError, "layout_unknown", "one after another; needs VLLM_KV_CACHE_LAYOUT LBNHC or LBHNC"):
        pool_of(laid_out(specs(), "BLHNC"))


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (128, torch.uint8), (72, torch.uint8)])
def test_an_index_cache_of_another_form_is_refused_by_name(width: int, dtype: torch.dtype) -> None:
    made = specs()
    for name, spec in made.items():
        if isinstance(spec, MLAAttentionSpec):
            made[name] = replace(spec, head_size=width, dtype=dtype)
    reason = f"attn.index_cache: index cache of {width} x {dtype} a token .+ must be 128 plain numbers"
    with refused(OperatorError, "codec_unknown", reason):
        pool_of(laid_out(made))


def test_slots_of_a_block_that_are_not_its_heads_are_refused() -> None:
    """As AITER's kernels keep K and V: with two heads the tensor looks like an ordinary one."""
    made = specs(2)
    for name, spec in made.items():
        if not isinstance(spec, MLAAttentionSpec):
            made[name] = replace(spec, num_head_slots=2, state_content_bytes=2 * WIDTH * 2)
    with refused(OperatorError, "layout_unknown", "num_head_slots 2 for 2 heads"):
        pool_of(laid_out(made), Shard(tp_size=2))


def test_index_keys_without_their_attention_layer_are_refused() -> None:
    groups, caches = laid_out(specs())
    del caches[name := ATTENTION.format(2)]
    groups[0].layer_names.remove(name)
    with refused(
        OperatorError,
        "layer_unsupported",
        "model.layers.2.self_attn.attn.index_cache: index_key, and no attention layer beside",
    ):
        pool_of((groups, caches))
