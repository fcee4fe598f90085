"""vLLM's tensors as planes: other backends' layouts, shards, refusals. The tensors are real, the engine is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import numpy as np
import torch
from kvbridge_proto.pool import Pool, Shard, Step
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.vllm import worker
from kvbridge.adapters.vllm.connector import KVBridgeConnector
from kvbridge.adapters.vllm.pool import describe
from kvbridge.errors import OperatorError
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps
from testing.oracle import take_rows
from testing.refusals import refused
from tests.integration.adapters.small import held, memory_of
from tests.integration.adapters.world import World

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 16, 8


def spec(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **({"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.bfloat16} | changes)
    )


def tensors(
    order: str, layers: int, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, is_apart: bool = False
) -> dict[str, Any]:
    """Each layer's [B, H, N, 2D] view of one buffer with its dimensions in `order`: LBNH is NHD, BLHN cross-layer.

    `is_apart` gives each a buffer of its own.
    """
    sizes = {"L": layers, "B": BLOCKS, "H": HEADS, "N": tokens}
    buffer = torch.zeros(*(sizes[name] for name in order), 2 * WIDTH, dtype=dtype)
    views = buffer.permute(*(order.index(name) for name in "LBHN"), 4)
    if is_apart:
        views = [view.clone() for view in views]
    return {f"model.layers.{layer}.self_attn.attn": views[layer] for layer in range(layers)}


def allocated(made: dict[str, Any], layout: str, blocks: int, kernel: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The groups that vLLM's own planner makes of these specs, and its allocator's tensors, in pages of the kernels."""
    order = KVCacheLayout[layout]
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: order,
            num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )
    planned = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, made), 1 << 40)
    return planned.kv_cache_groups, allocate_kv_cache(planned, torch.device("cpu"), order, [kernel])


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
    blocks: int = BLOCKS,
    specs: dict[str, Any] | None = None,
    drafts: Any = None,
    backends: dict[str, str] | None = None,
    groups: list[KVCacheGroupSpec] | None = None,
    **parallel: int,
) -> Pool:
    """`layer`, `model` and `cache` add to what vLLM's objects of those names say; `older` is the cache of 0.26.

    `specs` are those of several groups, by a layer's name: layers of equal specs make a group, unless `groups` are
    vLLM's own. `backends` likewise.
    """

    def attention(name: str) -> Any:
        own = (backends or {}).get(name, backend)
        return SimpleNamespace(
            attn_backend=SimpleNamespace(get_name=lambda: own),
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
            **{"hf_text_config": SimpleNamespace(num_hidden_layers=total_layers or len(caches), qk_rope_head_dim=64)}
            | (model or {}),
        ),
        cache_config=SimpleNamespace(**{"cache_dtype": kv_cache_dtype, "enable_prefix_caching": True} | (cache or {})),
        kv_transfer_config=SimpleNamespace(kv_connector="KVBridgeConnector"),
        compilation_config=SimpleNamespace(static_forward_context={name: attention(name) for name in caches}),
        speculative_config=drafts,
    )
    named = specs or dict.fromkeys(caches, kv_spec or spec())
    groups = groups or [
        KVCacheGroupSpec([name for name in caches if named[name] == one], one) for one in dict.fromkeys(named.values())
    ]
    found: Any = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    if older:
        found = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    pool = describe(caches, config, found, shard or Shard(), model_name="m", engine_id="e").pool
    assert check_pool(pool) == () == overlaps(pool)
    return pool


@pytest.mark.parametrize("is_apart", [False, True], ids=["one buffer", "a buffer each"])
@pytest.mark.parametrize("order", ["LBHN", "LBNH", "BLHN", "BLNH", "BHLN", "LHBN"])
def test_every_layout_of_vllm_is_a_matter_of_strides(order: str, is_apart: bool) -> None:
    """How vLLM's older backends pad and split their blocks is in test_vllm_shapes.py."""
    caches = tensors(order, 3, is_apart=is_apart)
    numbers = torch.arange(3 * BLOCKS * HEADS * TOKENS * 2 * WIDTH, dtype=torch.int16)
    for layer, view in enumerate(caches.values()):
        view.view(torch.int16).copy_(numbers.view(3, BLOCKS, HEADS, TOKENS, 2 * WIDTH)[layer])
    pool = build(caches)
    assert len(pool.planes) == 6 and len(pool.regions) == (3 if is_apart else 1)
    storages = list({view.untyped_storage().data_ptr(): view.untyped_storage() for view in caches.values()}.values())
    assert [region.size_bytes for region in pool.regions] == [storage.nbytes() for storage in storages]
    for plane in pool.planes:
        cells = numbers.view(3, BLOCKS, HEADS, TOKENS, 2, WIDTH)[plane.layer]
        slots = cells[..., "kv".index(plane.part), :].transpose(1, 2).flatten(0, 1).contiguous()
        found = take_rows(held(Memory(pool, tuple(storages))), plane, np.arange(len(slots)))
        assert np.array_equal(found, slots.view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("backend", "dtype", "said"),
    [("FLASH_ATTN", torch.uint8, "fp8"), ("FLASHINFER", torch.float8_e4m3fn, "fp8_e4m3")],
)
def test_fp8_carries_the_layers_scales(backend: str, dtype: torch.dtype, said: str) -> None:
    k, v = build(tensors("LBHN", 1, dtype=dtype), backend=backend, kv_cache_dtype=said).planes
    assert (k.codec.name, k.codec.scales, v.codec.scales) == ("fp8_e4m3", (0.5,), (0.25,))


def fp8_with(**changes: Any) -> Pool:
    return build(
        tensors("LBNH", 1, dtype=torch.uint8), kv_cache_dtype="fp8", kv_spec=spec(dtype=torch.uint8), **changes
    )


def test_a_scale_for_each_head_is_kept_for_each_head() -> None:
    k, v = fp8_with(layer={"_k_scale": torch.tensor([0.5, 0.125]), "_v_scale": torch.tensor(0.25)}).planes
    assert (k.codec.scales, v.codec.scales) == ((0.5, 0.125), (0.25, 0.25))


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"layer": {"_k_scale": torch.ones(3)}}, "scales_unknown", "3 scales of k for 2 heads"),
        ({"model": {"enable_sleep_mode": True}}, "sleep_mode_unsupported", "sleep"),
    ],
)
def test_refuses_scales_that_fit_no_head_and_sleep_mode(change: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(OperatorError, match=text) as error:
        fp8_with(**change)
    assert error.value.code == code


def test_rows_in_host_memory_are_refused_by_name() -> None:
    """vLLM's HiSparse (0.32)."""
    caches = tensors("LBNH", 3)
    group = KVCacheGroupSpec(list(caches), spec(), host_resident=True)
    with refused(OperatorError, "layer_unsupported", "hisparse: .+ host memory yet; needs an --attention-config with"):
        build(caches, groups=[group])


def test_scales_that_are_not_stored_do_not_matter() -> None:
    assert build(tensors("LBNH", 3), cache={"calculate_kv_scales": True}).planes


def test_refuses_a_cache_on_two_devices() -> None:
    caches = tensors("LBNH", 3, is_apart=True)
    caches["model.layers.1.self_attn.attn"] = caches["model.layers.1.self_attn.attn"].to("meta")
    with pytest.raises(OperatorError, match="on cpu, meta, must be on one device"):
        build(caches)


def test_groups_of_an_older_vllm_all_travel() -> None:
    pool = build(tensors("LBNH", 3), older=True)
    assert len(pool.groups) == 1 and len(pool.planes) == 6
    half = build(tensors("LBNH", 3), older=True, shard=Shard(tp_rank=1, tp_size=2), total_heads=2 * HEADS)
    assert {(plane.first_head, plane.heads, plane.total_heads) for plane in half.planes} == {(HEADS, HEADS, 2 * HEADS)}


def draft(heads: int = HEADS, model: str = "/models/eagle") -> Any:
    return SimpleNamespace(
        draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads, model=model), method="eagle3"
    )


def test_every_layer_has_the_heads_that_it_has_and_not_the_models() -> None:
    two, one = tensors("LBHN", 1), torch.zeros(BLOCKS, 1, TOKENS, 2 * WIDTH, dtype=torch.bfloat16)
    caches = two | {"model.layers.1.self_attn.attn": one}
    specs = dict(zip(caches, (spec(), spec(num_kv_heads=1)), strict=True))
    pool = build(caches, specs=specs)
    assert [(plane.layer, plane.heads, plane.total_heads) for plane in pool.planes] == 2 * [(0, 2, 2)] + 2 * [(1, 1, 1)]
    assert [layer.kv_heads for layer in pool.model.layers if layer] == [2, 1]
    ranks = [build(two, shard=Shard(tp_rank=rank, tp_size=2), total_heads=2) for rank in range(2)]
    assert [(pool.planes[0].first_head, pool.planes[0].total_heads) for pool in ranks] == [(0, 4), (2, 4)]


@pytest.mark.parametrize(
    ("model", "drafts", "expected"),
    [(2, None, {2}), (2, 2, {2}), (2, 8, {2}), (8, 2, {2}), (8, None, None), (2, 4, None)],
)
def test_one_head_on_each_of_several_ranks_is_of_the_model_that_fits(
    model: int, drafts: int | None, expected: set[int] | None
) -> None:
    def total() -> set[int]:
        caches = {"model.layers.0.attn": torch.zeros(BLOCKS, 1, TOKENS, 2 * WIDTH, dtype=torch.bfloat16)}
        more = {"drafts": draft(drafts)} if drafts else {}
        pool = build(caches, kv_spec=spec(num_kv_heads=1), shard=Shard(tp_rank=3, tp_size=4), total_heads=model, **more)
        return {plane.total_heads for plane in pool.planes}

    if expected is None:
        with pytest.raises(OperatorError, match="1 KV head on each of 4 tensor-parallel ranks, of"):
            total()
    else:
        assert total() == expected


def test_a_pipeline_rank_names_its_own_layers_and_counts_the_others() -> None:
    caches = dict(zip(["model.layers.2.attn", "model.layers.3.attn"], tensors("LBHN", 2).values(), strict=True))
    last = build(caches, shard=Shard(pp_rank=1, pp_size=2), total_layers=4).model.layers
    first = build(tensors("LBHN", 2), shard=Shard(pp_rank=0, pp_size=2), total_layers=4).model.layers
    assert [layer is None for layer in first] == [False, False, True, True]
    assert [layer is None for layer in last] == [True, True, False, False]
    assert first[0] == last[2]


def test_layers_without_kv_are_counted() -> None:
    caches = dict(zip(["model.layers.1.attn", "model.layers.3.attn"], tensors("LBHN", 2).values(), strict=True))
    assert [layer is None for layer in build(caches, total_layers=4).model.layers] == [True, False, True, False]


@pytest.mark.parametrize(
    ("names", "numbers", "drafts"),
    [
        (("model.layers.0.attn", "model.layers.1.attn", "draft_model.layers.0.attn"), (0, 1, 2), (2,)),
        # The model's layer 0 has no KV (as in Qwen3-Next), so the draft's number is free, and still not its own.
        (("model.layers.1.attn", "draft_model.layers.0.attn", "draft_model.layers.1.attn"), (1, 2, 3), (2, 3)),
        (("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"), (0, 1, 2), (2,)),  # EAGLE, MTP
        (("model.layers.0.attn", "model.layers.1.attn", "model.layers.3.attn"), (0, 1, 3), (3,)),
    ],
)
def test_a_draft_s_layers_come_after_the_model_s(
    names: tuple[str, ...], numbers: tuple[int, ...], drafts: tuple[int, ...]
) -> None:
    caches = dict(zip(names, tensors("LBHN", 3).values(), strict=True))
    own = {"model": "/models/llama"}
    pool = build(caches, total_layers=2, drafts=draft(), model=own)
    assert {plane.name: plane.layer for plane in pool.planes} == dict(zip(names, numbers, strict=True))
    assert (pool.model.depth, pool.model.drafts, pool.model.draft) == (2, drafts, "eagle")
    assert len(pool.model.layers) == numbers[-1] + 1
    same = build(caches, total_layers=2, drafts=draft(model="/models/llama/"), model=own).model
    assert (same.drafts, same.draft) == (drafts, "m")  # of the model itself, by what the operator calls that


def test_a_layer_that_is_there_twice_is_no_draft_if_nothing_drafts() -> None:
    """So it is refused by name if the prefill side lacks it. N-gram drafts have no layers, and no draft's name."""
    names = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.0.cross.attn"]
    caches = dict(zip(names, tensors("LBHN", 3).values(), strict=True))
    pool = build(caches, total_layers=2)
    assert {plane.name: plane.layer for plane in pool.planes} == dict(zip(names, (0, 1, 2), strict=True))
    assert (pool.model.drafts, pool.model.draft) == ((), "")
    ngram = build(tensors("LBHN", 2), drafts=SimpleNamespace(draft_model_config=None, method="ngram")).model
    assert (ngram.drafts, ngram.draft) == ((), "")


def latent(width: int, dtype: torch.dtype, dimensions: int = 4) -> dict[str, Any]:
    shape = (BLOCKS, TOKENS, width) if dimensions == 3 else (BLOCKS, 1, TOKENS, width)
    return {f"model.layers.{layer}.self_attn.attn": torch.zeros(shape, dtype=dtype) for layer in range(2)}


def latent_spec(**changes: Any) -> MLAAttentionSpec:
    common = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**(common | changes))


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "said", "codec"),
    [
        (torch.bfloat16, "auto", ("bf16", 2, 1152, ())),
        (torch.uint8, "fp8", ("fp8_e4m3", 1, 576, (0.5,))),
        (torch.uint8, "fp8_ds_mla", ("fp8_ds_mla", 1, 656, ())),
        (torch.uint8, "nvfp4_ds_mla", ("nvfp4_ds_mla", 1, 352, ())),
    ],
)
def test_a_latent_is_one_plane_for_every_rank(
    dtype: torch.dtype, said: str, codec: tuple[Any, ...], dimensions: int
) -> None:
    _, size, row_bytes, _ = codec
    found = [
        build(
            latent(row_bytes // size, dtype, dimensions),
            backend="FLASHMLA",
            kv_spec=latent_spec(dtype=dtype),
            kv_cache_dtype=said,
            shard=Shard(tp_rank=rank, tp_size=4),
            total_heads=1,
        )
        for rank in range(4)
    ]
    assert all(pool.planes == found[0].planes and pool.model == found[0].model for pool in found)
    pool = found[0]
    layer = pool.model.layers[0]
    assert layer is not None
    assert (layer.kind, layer.kv_heads, layer.key_width, layer.value_width, layer.rope_width) == ("mla", 1, 576, 0, 64)
    assert [(plane.layer, plane.part) for plane in pool.planes] == [(0, "latent"), (1, "latent")]
    plane = pool.planes[0]
    assert (plane.first_head, plane.heads, plane.total_heads) == (0, 1, 1)
    assert (plane.codec.name, plane.codec.element_bytes, plane.codec.row_bytes, plane.codec.scales) == codec
    assert plane.codec.width == 576 and plane.token_axis == (Step(TOKENS, row_bytes),)
    assert plane.block_stride == TOKENS * row_bytes and pool.groups[0].kind == "full"


def test_the_scales_of_the_v4_format_are_a_plane_of_their_own() -> None:
    padded = torch.zeros(BLOCKS, 17 * 576, dtype=torch.uint8)
    cache = torch.as_strided(padded, (BLOCKS, 1, TOKENS, 584), (17 * 576, TOKENS * 584, 584, 1))
    pool = build(
        {"model.layers.0.attn": cache},
        backend="DEEPSEEK_SPARSE_SWA",
        kv_spec=latent_spec(head_size=512, dtype=torch.uint8, state_content_bytes=584, alignment=576),
        kv_cache_dtype="fp8_ds_mla",
        total_heads=1,
    )
    rows, scales = pool.planes
    assert (rows.part, rows.codec.name, rows.codec.row_bytes) == ("latent", "fp8_ds_v4", 576)
    assert (scales.part, scales.codec.name, scales.codec.row_bytes) == ("latent_scale", "opaque", 8)
    assert (rows.token_axis, scales.token_axis) == ((Step(TOKENS, 576),), (Step(TOKENS, 8),))
    assert (rows.offset, scales.offset, scales.block_stride) == (0, TOKENS * 576, 17 * 576)


@pytest.mark.parametrize(
    ("said", "dtype", "name", "row_bytes", "scale"),
    [
        ("int8_per_token_head", torch.int8, "int8_row_scale", WIDTH, "fp32"),
        ("fp8_per_token_head", torch.uint8, "fp8_row_scale", WIDTH, "fp32"),
        ("int4_per_token_head", torch.uint8, "int4_row_scale", WIDTH // 2, "opaque"),
    ],
)
def test_scales_of_rows_are_planes(said: str, dtype: torch.dtype, name: str, row_bytes: int, scale: str) -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * (row_bytes + 4), dtype=dtype)
    pool = build({"model.layers.0.attn": cache}, backend="TRITON_ATTN", kv_cache_dtype=said, kv_spec=spec(dtype=dtype))
    planes = {plane.part: plane for plane in pool.planes}
    assert sorted(planes) == ["k", "k_scale", "v", "v_scale"]
    for part in "kv":
        rows, scales = planes[part], planes[f"{part}_scale"]
        assert (rows.codec.name, rows.codec.width, rows.codec.row_bytes) == (name, WIDTH, row_bytes)
        assert (scales.codec.name, scales.codec.row_bytes, scales.offset) == (scale, 4, rows.offset + row_bytes)
        assert (scales.token_axis, scales.head_stride) == (rows.token_axis, rows.head_stride)
    assert planes["v"].offset == row_bytes + 4


def test_groups_say_which_tokens_they_keep_and_layers_what_the_model_is() -> None:
    caches = tensors("BLHN", 3)
    window = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.bfloat16}
    sliding = SlidingWindowSpec(**window, sliding_window=24)
    chunked = ChunkedLocalAttentionSpec(**window, attention_chunk_size=32)
    named = dict(zip(caches, (spec(), sliding, chunked), strict=True))
    pool = build(caches, specs=named)
    assert [(group.kind, group.window) for group in pool.groups] == [("full", 0), ("sliding", 24), ("chunked", 32)]
    assert [(plane.layer, plane.group) for plane in pool.planes[::2]] == [(0, 0), (1, 1), (2, 2)]
    whole = build(caches, kv_spec=spec(sliding_window=24))  # without the hybrid manager
    assert (whole.groups[0].kind, whole.groups[0].window) == ("full", 0)
    assert whole.model.layers[1] == pool.model.layers[1]


@pytest.mark.parametrize(
    ("caching", "connector", "expected"),
    [(True, KVBridgeConnector, False), (False, KVBridgeConnector, True), (False, MultiConnector, False)],
)
def test_a_window_may_begin_inside_a_block_that_no_other_request_gets(
    caching: bool, connector: type[Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector beside ours may keep blocks for other requests, as a prefix cache does."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object.__new__(connector))
    caches = tensors("BLHN", 2)
    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16, sliding_window=24
    )
    named = dict(zip(caches, (spec(), window), strict=True))
    pool = build(caches, specs=named, cache={"enable_prefix_caching": caching})
    assert [group.begins_inside for group in pool.groups] == [False, expected]


def test_a_group_without_layers_on_this_rank_is_still_counted() -> None:
    caches = tensors("LBHN", 1)
    name = next(iter(caches))
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16, sliding_window=24
    )
    pool = build(caches, specs={name: spec(), "model.layers.1.attn": window})
    assert [(group.kind, group.block_tokens) for group in pool.groups] == [("full", TOKENS), ("sliding", 32)]


def test_a_rank_of_context_parallelism_holds_the_blocks_of_its_share() -> None:
    shard = Shard(tp_rank=3, tp_size=4, cp_rank=1, cp_size=2, cp_interleave=8)
    pool = build(tensors("LBHN", 1), shard=shard, total_heads=8, decode_context_parallel_size=2)
    assert pool.shard == shard and pool.groups[0].block_tokens == TOKENS


def test_ranks_of_prefill_context_parallelism_hold_the_same_heads() -> None:
    def first_heads(rank: int) -> set[int]:
        pool = build(
            tensors("LBHN", 1), shard=Shard(tp_rank=rank, tp_size=4), total_heads=4, prefill_context_parallel_size=2
        )
        return {plane.first_head for plane in pool.planes}

    assert [first_heads(rank) for rank in range(4)] == [{0}, {2}, {0}, {2}]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"backend": "B12X"}, "attention backend B12X, whose order of rows kvbridge does not know; needs --att"),
        ({"kv_cache_dtype": "nvfp4", "dtype": torch.uint8}, "kv_cache_dtype nvfp4 in torch.uint8"),
        (
            {"kv_spec": spec(dcp_sharded=False), "shard": Shard(cp_size=2)},
            "FullAttentionSpec, dcp_sharded False, decode_context_parallel_size 2",
        ),
        ({"backend": "CPU_ATTN", "order": "LBNH"}, "CPU attention needs dense cells"),
        ({"kv_spec": spec(num_kv_heads=4), "total_heads": 4}, r"expected \[B, 4, N, 16\]"),
        ({"kv_spec": spec(head_size_v=4)}, r"model.layers.0.self_attn.attn: KV cache .* expected \[B, 2, N, 12\]"),
        ({"kv_spec": latent_spec(), "backend": "FLASHMLA"}, r"expected \[B, N, 576\] or \[B, 1, N, 576\]"),
    ],
)
def test_refuses_by_name_what_it_cannot_describe(change: dict[str, Any], text: str) -> None:
    dtype, order = change.pop("dtype", torch.bfloat16), change.pop("order", "LBHN")
    with pytest.raises(OperatorError, match=text):
        build(tensors(order, 1, dtype=dtype), **change)


@pytest.mark.parametrize("tensors", [1, 2])
def test_says_so_where_vllm_has_not_made_the_one_tensor_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(worker.log, "warning", lambda text, *values: said.append(text % values))
    world = World(tmp_path, extra={"kvbridge_cross_layer": True})
    memory = memory_of(0, 1)
    pool = msgspec.structs.replace(memory.pool, regions=memory.pool.regions * tensors)
    world.workers[0].worker.attach(str(tmp_path / "nobody.sock"), Memory(pool, memory.storages * tensors))
    assert [each for each in said if each.startswith("kvbridge_cross_layer: 2 tensors")] == said[: tensors - 1]
