"""The caches of vLLM's GPU backends, built as vLLM builds them: every number is where the planes say it is.

Shapes, stride orders and views follow vLLM 0.26.0 (`get_kv_cache_shape` and `get_kv_cache_stride_order` of FLASH_ATTN,
TRITON_ATTN and FLASHINFER, `_reshape_attention_kv_cache` of its model runners), and K and V are found as its kernels
find them. vLLM 0.32 has the same views, allocated in other orders (tests/integration/adapters/test_vllm_pool.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.pool import Pool, Shard

from kvbridge.errors import OperatorError
from tests.integration.adapters.test_vllm_pool import HEADS, WIDTH, build, places, spec

pytestmark = pytest.mark.vllm

BLOCKS = 6  # of the block table
STRIDE_ORDERS = {  # of all three backends; with layers: of a cache that holds them together
    ("NHD", False): (0, 2, 1, 3),
    ("HND", False): (0, 1, 2, 3),
    ("NHD", True): (1, 0, 3, 2, 4),
    ("HND", True): (1, 2, 0, 3, 4),
}


@dataclass(frozen=True)
class Case:
    """`tokens` of a block in the block table, `kernel` of one in the tensor. `padding` is behind each block's page."""

    backend: str
    layout: str
    tokens: int = 16
    kernel: int = 16
    dtype: torch.dtype = torch.bfloat16
    said: str = "auto"
    together: bool = False
    padding: int = 0
    packed: bool = False

    def __str__(self) -> str:
        parts = [self.backend, self.layout, f"{self.tokens}of{self.kernel}", str(self.dtype).removeprefix("torch.")]
        return "-".join([*parts, *(name for name in ("together", "padding", "packed") if getattr(self, name))])


CASES = [
    Case(backend, layout, **more)
    for backend in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
    for layout in ("NHD", "HND")
    for more in (
        {},
        {"tokens": 64, "kernel": 64},
        {"tokens": 64, "kernel": 16},  # the table's blocks are split for the kernel (prepare_kernel_block_sizes)
        {"tokens": 128, "kernel": 64, "dtype": torch.uint8, "said": "fp8"},
        {"dtype": torch.float8_e4m3fn, "said": "fp8_e4m3"},
        {"dtype": torch.float16},
        {"padding": 96},
        {"together": True},
        {"packed": True},
    )
]


def caches(case: Case, layers: int = 3) -> dict[str, torch.Tensor]:
    """One tensor a layer, as `register_kv_caches` gets them."""
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]
    shape = (BLOCKS * case.tokens // case.kernel, HEADS, case.kernel, 2 * WIDTH)
    order = STRIDE_ORDERS[case.layout, case.together]
    back = [order.index(dimension) for dimension in range(len(order))]
    if case.together:  # allocate_uniform_kv_caches
        shape = (layers, *shape)
        whole = torch.zeros(prod(shape), dtype=case.dtype).view(tuple(shape[i] for i in order)).permute(*back)
        return {name: whole[layer] for layer, name in enumerate(names)}
    inner = tuple(shape[i] for i in order)
    page = prod(shape[1:])
    if case.packed:  # one allocation, each block holds all layers' pages side by side
        raw = torch.zeros(shape[0], layers, page, dtype=case.dtype)
        strides = torch.empty(inner, device="meta").stride()
        views = (torch.as_strided(raw, inner, (layers * page, *strides[1:]), layer * page) for layer in range(layers))
        return {name: view.permute(*back) for name, view in zip(names, views, strict=True)}
    strides = list(torch.empty(inner, device="meta").stride())
    strides[back[0]] += case.padding
    raws = [torch.zeros(shape[0] * (page + case.padding), dtype=case.dtype) for _ in names]
    return {name: torch.as_strided(raw, inner, strides).permute(*back) for name, raw in zip(names, raws, strict=True)}


def kernels_view(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [block, token, head, number]: what `do_kv_cache_update` hands to the kernel."""
    k, v = cache.transpose(1, 2).split(WIDTH, dim=-1)
    return k, v


def numbers(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def found(pool: Pool, part: str, layer: int, region: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[block, token, head, number], by the planes' own arithmetic."""
    (plane,) = [plane for plane in pool.planes if (plane.layer, plane.part) == (layer, part)]
    where = (
        plane.offset
        + (torch.arange(pool.groups[0].blocks) * plane.block_stride)[:, None, None, None]
        + places(plane.token_axis)[:, None, None]
        + (torch.arange(plane.heads) * plane.head_stride)[:, None]
        + places(plane.element_axis)
    )
    whole = region[where[..., None] + torch.arange(dtype.itemsize)]
    return whole.view(numbers(dtype))[..., 0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_number_lies_where_the_planes_say(case: Case) -> None:
    tensors = caches(case)
    generator = torch.Generator().manual_seed(1)
    kind = numbers(case.dtype)
    written: dict[tuple[int, str], torch.Tensor] = {}
    tokens = BLOCKS * case.tokens
    for layer, cache in enumerate(tensors.values()):
        for part, view in zip("kv", kernels_view(cache), strict=True):
            values = torch.randint(0, torch.iinfo(kind).max, (tokens, HEADS, WIDTH), generator=generator).to(kind)
            written[layer, part] = values
            slots = torch.arange(tokens)  # slot = block of the kernel * its tokens + token, as vLLM numbers them
            view.view(kind)[slots // case.kernel, slots % case.kernel] = values
    pool = build(
        tensors, backend=case.backend, kv_spec=spec(block_size=case.tokens, dtype=case.dtype), kv_cache_dtype=case.said
    )
    assert (pool.groups[0].block_tokens, pool.groups[0].blocks) == (case.tokens, BLOCKS)
    assert len(pool.regions) == (1 if case.together or case.packed else 3)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
    regions = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
    assert [region.size_bytes for region in pool.regions] == [storage.nbytes() for storage in storages.values()]
    for (layer, part), values in written.items():
        (plane,) = [plane for plane in pool.planes if (plane.layer, plane.part) == (layer, part)]
        got = found(pool, part, layer, regions[plane.region], case.dtype)
        assert torch.equal(got.flatten(0, 1), values), f"layer {layer} {part}"


def layer_with(**changes: Any) -> Pool:
    case = Case("FLASH_ATTN", "NHD", dtype=torch.uint8, said="fp8")
    return build(caches(case, 1), kv_cache_dtype="fp8", kv_spec=spec(dtype=torch.uint8), **changes)


def test_a_scale_for_each_head_is_kept_for_each_head() -> None:
    pool = layer_with(layer={"_k_scale": torch.tensor([0.5, 0.125]), "_v_scale": torch.tensor(0.25)})
    k, v = pool.planes
    assert (k.codec.scales, v.codec.scales) == ((0.5, 0.125), (0.25, 0.25))


def test_refuses_scales_that_fit_no_head() -> None:
    with pytest.raises(OperatorError, match="3 scales of k for 2 heads") as error:
        layer_with(layer={"_k_scale": torch.ones(3)})
    assert error.value.code == "scales_unknown"


def test_refuses_sleep_mode() -> None:
    with pytest.raises(OperatorError) as error:
        layer_with(model={"enable_sleep_mode": True})
    assert error.value.code == "sleep_mode_unsupported"


def test_scales_that_are_not_stored_do_not_matter() -> None:
    assert build(caches(CASES[0]), cache={"calculate_kv_scales": True}).planes


def test_refuses_a_cache_on_two_devices() -> None:
    tensors = caches(CASES[0])
    tensors["model.layers.1.self_attn.attn"] = tensors["model.layers.1.self_attn.attn"].to("meta")
    with pytest.raises(OperatorError, match="on cpu, meta, must be on one device"):
        build(tensors)


def test_groups_of_an_older_vllm_all_travel() -> None:
    case = CASES[0]
    pool = build(caches(case), older=True)
    assert len(pool.groups) == 1 and len(pool.planes) == 6
    shard = Shard(tp_rank=1, tp_size=2)
    half = build(caches(case), older=True, shard=shard, total_heads=2 * HEADS)
    assert {(plane.first_head, plane.heads, plane.total_heads) for plane in half.planes} == {(HEADS, HEADS, 2 * HEADS)}
