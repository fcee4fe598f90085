"""Every shape that vLLM has given its KV cache since 0.26, built as vLLM builds it: numbers are where our planes say.

Needs no engine. Each case repeats how that version allocates (`get_kv_cache_shape`, its stride orders, padding after a
page, blocks split for the kernel), and how its kernels find K and V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import pytest
import torch
from kvbridge_proto.pool import Codec, CodecName, Plane

from kvbridge.adapters.engine.codecs import V4_ROWS, V4_SCALES, head_scaled_rows
from kvbridge.adapters.engine.memory import plane_of
from kvbridge.adapters.engine.records import Heads
from kvbridge.adapters.vllm.shapes import Cell, views_of
from kvbridge.errors import OperatorError
from testing.refusals import refused
from tests.integration.adapters.small import places

BLOCKS, HEADS, TOKENS, WIDTH = 6, 3, 16, 32
Views = dict[str, "torch.Tensor"]


def packed(cache: torch.Tensor) -> Views:
    return dict(zip("kv", cache.transpose(1, 2).split(cache.shape[-1] // 2, dim=-1), strict=True))


def unequal(cache: torch.Tensor) -> Views:
    return dict(zip("kv", cache.transpose(1, 2).split([WIDTH, WIDTH // 2], dim=-1), strict=True))


def latent(cache: torch.Tensor) -> Views:
    return {"latent": (cache.squeeze(1) if cache.dim() == 4 else cache)[:, :, None]}


def row_scaled(cache: torch.Tensor) -> Views:
    """`TritonAttentionImpl._ensure_scale_caches`: [K | its scale | V | its scale]."""
    half = cache.shape[3] // 2
    strides = tuple(stride // 4 for stride in (cache.stride(0), cache.stride(2), cache.stride(1)))
    floats = torch.tensor([], dtype=torch.float32).set_(cache.untyped_storage())
    shape = (cache.shape[0], cache.shape[2], cache.shape[1])
    views = {}
    for index, part in enumerate("kv"):
        at = (cache.storage_offset() + index * half + half - 4) // 4
        views[f"{part}_scale"] = torch.as_strided(floats, shape, strides, at)[..., None]
        views[part] = cache[..., index * half : (index + 1) * half - 4].transpose(1, 2)
    return views


def v4(cache: torch.Tensor) -> Views:
    """`deepseek_v4/common/ops`: the rows of 576 bytes of a block, behind them its scales of 8."""
    flat = torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())
    blocks, _, tokens, _ = cache.shape
    page, start = cache.stride(0), cache.storage_offset()
    return {
        "latent": torch.as_strided(flat, (blocks, tokens, 1, 576), (page, 576, 0, 1), start),
        "latent_scale": torch.as_strided(flat, (blocks, tokens, 1, 8), (page, 8, 0, 1), start + tokens * 576),
    }


@dataclass(frozen=True)
class Case:
    """`order` is the physical order of the dimensions of `shape`; `kernel` tokens are a block of the tensor."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    views: Callable[[torch.Tensor], Views]
    cell: Cell
    dtype: torch.dtype = torch.bfloat16
    kernel: int = TOKENS
    padding: int = 0  # elements behind each page


def rows(name: CodecName, size: int, row_bytes: int) -> Codec:
    return Codec(name=name, width=row_bytes // size, element_bytes=size, row_bytes=row_bytes)


def cell(value: int = WIDTH) -> Cell:
    return Cell(HEADS, {"k": rows("bf16", 2, 2 * WIDTH), "v": rows("bf16", 2, 2 * value)})


def latents(row_bytes: int) -> Cell:
    return Cell(1, {"latent": rows("opaque", 1, row_bytes)})


ROWS, SCALES = head_scaled_rows("fp8_per_token_head", WIDTH)
HEAD_SCALED = Cell(HEADS, {"k": ROWS, "k_scale": SCALES, "v": ROWS, "v_scale": SCALES})
APART = Cell(1, {"latent": V4_ROWS, "latent_scale": V4_SCALES}, is_apart=True)


def cases() -> list[Case]:
    found = []
    for kernel in (TOKENS, TOKENS // 4):
        blocks = BLOCKS * TOKENS // kernel
        split = {"kernel": kernel}
        four = (blocks, HEADS, kernel, 2 * WIDTH)
        found += [
            Case("BHNC HND", four, (0, 1, 2, 3), packed, cell(), **split),
            Case("BHNC NHD", four, (0, 2, 1, 3), packed, cell(), **split),
            Case("BHNC LHBNC", four, (1, 0, 2, 3), packed, cell(), **split),
            Case("BHNC K and V unequal", (*four[:3], WIDTH + WIDTH // 2), (0, 2, 1, 3), unequal, cell(WIDTH // 2)),
            Case("BHNC padded", four, (0, 1, 2, 3), packed, cell(), padding=96),
        ][: 3 if kernel != TOKENS else None]
        for dtype, order in ((torch.int8, (0, 1, 2, 3)), (torch.uint8, (0, 2, 1, 3))):
            shape = (*four[:3], 2 * (WIDTH + 4))
            name = f"BHNC row scales {dtype}"
            found.append(Case(name, shape, order, row_scaled, HEAD_SCALED, dtype, **split))
        for row, dtype in ((576, torch.bfloat16), (576, torch.uint8), (656, torch.uint8), (528, torch.uint8)):
            size = dtype.itemsize
            shape = (blocks, kernel, row)
            found.append(Case(f"BNW {row}", shape, (0, 1, 2), latent, latents(row * size), dtype, **split))
            shape = (blocks, 1, kernel, row)
            found.append(Case(f"B1NW {row}", shape, (0, 2, 1, 3), latent, latents(row * size), dtype, **split))
    found.append(Case("B1NW 584", (BLOCKS, 1, TOKENS, 584), (0, 1, 2, 3), v4, APART, torch.uint8, padding=448))
    return found


def tensor_of(case: Case) -> torch.Tensor:
    """Four layers of which ours is the third, each block's pages side by side where the blocks are outermost."""
    inner = [case.shape[dimension] for dimension in case.order]
    page = prod(inner[1:]) + case.padding
    is_page = case.order[0] == 0
    if not is_page:
        whole = torch.zeros(prod(inner) + 64, dtype=case.dtype)
        view = torch.as_strided(whole, inner, torch.empty(inner, device="meta").stride(), 64)
    else:
        whole = torch.zeros(inner[0] * 4 * page, dtype=case.dtype)
        # Blocks that a kernel splits lie one after the other; the others may have other layers' pages between.
        pages = 1 if case.kernel != TOKENS else 4
        strides = (pages * page, *torch.empty(inner[1:], device="meta").stride())
        view = torch.as_strided(whole, inner, strides, (2 if pages == 4 else 0) * page)
    return view.permute(*(case.order.index(dimension) for dimension in range(len(inner))))


def read(storage: torch.Tensor, plane: Plane) -> torch.Tensor:
    """[token of the table, head, byte of the row], by the plane's own arithmetic."""
    where = (
        plane.offset
        + (torch.arange(BLOCKS) * plane.block_stride)[:, None, None, None]
        + places(plane.token_axis)[:, None, None]
        + (torch.arange(plane.heads) * plane.head_stride)[:, None]
        + places(plane.element_axis)
    )
    return storage[where[..., None] + torch.arange(plane.codec.element_bytes)].flatten(0, 1).flatten(2)


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.name} of {case.kernel}")
def test_every_number_lies_where_the_engine_puts_it(case: Case) -> None:
    cache = tensor_of(case)
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(BLOCKS * TOKENS)  # block of the kernel x its tokens + token, as block tables number them
    written = {}
    for part, view in case.views(cache).items():
        size, heads, width = view.element_size(), view.shape[2], view.shape[3]
        values = torch.randint(0, 256, (len(slots), heads, width * size), generator=generator, dtype=torch.uint8)
        view[slots // case.kernel, slots % case.kernel] = values.view(view.dtype)
        written[part] = values
    views = views_of("layer", cache, case.cell, TOKENS, BLOCKS)
    assert set(views) == set(written)
    storage = torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())
    heads = Heads(0, case.cell.heads, case.cell.heads)
    for part, view in views.items():
        assert case.cell.parts[part].row_bytes == written[part].shape[-1]
        plane = plane_of(view, case.cell.parts[part], heads, 0, 0, part=part, block_tokens=TOKENS, name=part)
        assert torch.equal(read(storage, plane), written[part]), part


@pytest.mark.parametrize(
    ("shape", "changed", "text"),
    [
        ((BLOCKS, HEADS, TOKENS, WIDTH), {}, r"expected \[B, 3, N, 64\]$"),
        ((BLOCKS, HEADS + 1, TOKENS, 2 * WIDTH), {}, r"\(6, 4, 16, 64\) with strides \(4096, 1024, 64, 1\) of 2-byte"),
        ((BLOCKS + 1, HEADS, TOKENS, 2 * WIDTH), {}, "for 6 blocks of 16 tokens"),
        ((BLOCKS, HEADS, 5, 2 * WIDTH), {}, "expected"),
        ((BLOCKS, TOKENS, 2 * WIDTH), {}, "expected"),
        ((BLOCKS, HEADS, TOKENS, 2, WIDTH), {}, "expected"),
        ((BLOCKS,), {}, "expected"),
        ((BLOCKS, TOKENS, 655), {"cell": latents(656), "size": 1}, r"expected \[B, N, 656\] or \[B, 1, N, 656\]"),
        ((BLOCKS, 2, TOKENS, 656), {"cell": latents(656), "size": 1}, "expected"),
        ((BLOCKS, HEADS, TOKENS, 2 * WIDTH), {"cell": HEAD_SCALED, "size": 1}, r"expected \[B, 3, N, 72\]$"),
        ((2, BLOCKS, TOKENS, HEADS, WIDTH), {}, "expected"),
        (
            (2 * BLOCKS, 1, TOKENS // 2, 584),
            {"cell": APART, "size": 1},
            "expected",
        ),
    ],
)
def test_names_what_it_does_not_know(shape: tuple[int, ...], changed: dict, text: str) -> None:
    dtype = torch.uint8 if changed.get("size") == 1 else torch.bfloat16
    with refused(OperatorError, "shape_unknown", text):
        views_of("layer", torch.empty(shape, dtype=dtype), changed.get("cell", cell()), TOKENS, BLOCKS)


def test_refuses_rows_with_scales_that_are_not_dense() -> None:
    cache = torch.empty(BLOCKS, HEADS, TOKENS, 4 * (WIDTH + 4), dtype=torch.uint8)[..., ::2]
    with refused(OperatorError, "shape_unknown", "must be dense"):
        views_of("layer", cache, HEAD_SCALED, TOKENS, BLOCKS)
