"""vLLM's tensors as planes: other backends' layouts, shards, refusals. Tensors are real, the engine is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.pool import Pool, Shard, Step
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from kvbridge.adapters.vllm_pool import Heads, describe
from kvbridge.errors import OperatorError

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 16, 8


def spec(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **({"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.bfloat16} | changes)
    )


def tensors(order: str, layers: int, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Each layer's [B, H, N, 2D] view of one buffer with its dimensions in `order` (LBNH is NHD, BLHN cross-layer)."""
    sizes = {"L": layers, "B": BLOCKS, "H": HEADS, "N": tokens}
    buffer = torch.zeros(*(sizes[name] for name in order), 2 * WIDTH, dtype=dtype)
    views = buffer.permute(*(order.index(name) for name in "LBHN"), 4)
    return {f"model.layers.{layer}.self_attn.attn": views[layer] for layer in range(layers)}


def build(
    caches: dict[str, Any],
    *,
    backend: str = "FLASH_ATTN",
    kv_spec: Any = None,
    shard: Shard | None = None,
    total_heads: int = HEADS,
    total_layers: int | None = None,
    kv_cache_dtype: str = "auto",
    layer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    older: bool = False,
    **parallel: int,
) -> Pool:
    """`layer`, `model` and `cache` add to what vLLM's objects of those names say; `older` is the cache of 0.26."""
    attention = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_dtype=kv_cache_dtype,
        kv_sharing_target_layer_name=None,
        isa="vec",
        _k_scale_float=0.5,
        _v_scale_float=0.25,
        **(layer or {}),
    )
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: total_heads,
            hf_text_config=SimpleNamespace(num_hidden_layers=total_layers or len(caches)),
            **(model or {}),
        ),
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype, **(cache or {})),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(caches, attention)),
    )
    groups = [KVCacheGroupSpec(list(caches), kv_spec or spec())]
    found: Any = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    if older:
        found = SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    return describe(caches, config, found, shard or Shard(), model_name="m", engine_id="e").pool


def places(axis: tuple[Step, ...]) -> torch.Tensor:
    total = torch.zeros(1, dtype=torch.int64)
    for step in axis:
        total = (total[:, None] + torch.arange(step.count) * step.stride).flatten()
    return total


@pytest.mark.parametrize("order", ["LBHN", "LBNH", "BLHN", "BLNH", "BHLN", "LHBN"])
def test_every_layout_of_vllm_is_a_matter_of_strides(order: str) -> None:
    caches = tensors(order, 3)
    numbers = torch.arange(3 * BLOCKS * HEADS * TOKENS * 2 * WIDTH, dtype=torch.int16)
    for layer, view in enumerate(caches.values()):
        view.view(torch.int16).copy_(numbers.view(3, BLOCKS, HEADS, TOKENS, 2 * WIDTH)[layer])
    flat = torch.empty(0, dtype=torch.uint8).set_(next(iter(caches.values())).untyped_storage())
    pool = build(caches)
    assert len(pool.planes) == 6 and len(pool.regions) == 1
    for plane in pool.planes:
        where = (
            plane.offset
            + (torch.arange(BLOCKS) * plane.block_stride)[:, None, None, None]
            + (torch.arange(HEADS) * plane.head_stride)[:, None, None]
            + places(plane.token_axis)[:, None]
            + places(plane.element_axis)
        )
        found = flat[where[..., None] + torch.arange(2)].view(torch.int16)[..., 0]
        half = slice(0, WIDTH) if plane.part == "k" else slice(WIDTH, 2 * WIDTH)
        assert torch.equal(found, numbers.view(3, BLOCKS, HEADS, TOKENS, 2 * WIDTH)[plane.layer][..., half])


def test_a_block_of_several_kernel_blocks_is_one_block() -> None:
    pool = build(tensors("LBHN", 1, tokens=TOKENS // 2))
    (group,) = pool.groups
    assert (group.block_tokens, group.blocks) == (TOKENS, BLOCKS // 2)
    kernel_block = HEADS * (TOKENS // 2) * 2 * WIDTH * 2
    assert pool.planes[0].token_axis == (Step(2, kernel_block), Step(TOKENS // 2, 2 * WIDTH * 2))
    assert pool.planes[0].block_stride == 2 * kernel_block


def test_fp8_carries_the_layers_scales() -> None:
    pool = build(tensors("LBHN", 1, dtype=torch.uint8), kv_cache_dtype="fp8")
    k, v = pool.planes
    assert (k.codec.name, k.codec.scales, v.codec.scales) == ("fp8_e4m3", (0.5,), (0.25,))


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_follow_vllms_rule_of_replication(total: int, size: int, expected: list[tuple[int, int]]) -> None:
    found = [Heads.of(total, rank, size) for rank in range(size)]
    assert [(heads.first, heads.count) for heads in found] == expected


def test_every_pipeline_rank_names_the_same_model() -> None:
    caches = dict(zip(["model.layers.2.attn", "model.layers.3.attn"], tensors("LBHN", 2).values(), strict=True))
    last = build(caches, shard=Shard(pp_rank=1, pp_size=2), total_layers=4)
    first = build(tensors("LBHN", 2), shard=Shard(pp_rank=0, pp_size=2), total_layers=4)
    assert last.model == first.model and len(last.model.layers) == 4
    assert sorted({plane.layer for plane in last.planes}) == [2, 3]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"backend": "FLEX_ATTENTION"}, "attention backend FLEX_ATTENTION, supported are CPU_ATTN, FLASH_ATTN"),
        ({"kv_cache_dtype": "nvfp4", "dtype": torch.uint8}, "kv_cache_dtype nvfp4 in torch.uint8"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size: 2, must be 1"),
        ({"backend": "CPU_ATTN", "order": "LBNH"}, "CPU attention needs dense cells"),
        ({"kv_spec": spec(num_kv_heads=4), "total_heads": 4}, "expected 4 heads of 8"),
        (
            {"kv_spec": MLAAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)},
            "MLAAttentionSpec is not supported",
        ),
    ],
)
def test_refuses_by_name_what_it_cannot_describe(change: dict[str, Any], text: str) -> None:
    dtype, order = change.pop("dtype", torch.bfloat16), change.pop("order", "LBHN")
    with pytest.raises(OperatorError, match=text):
        build(tensors(order, 1, dtype=dtype), **change)
