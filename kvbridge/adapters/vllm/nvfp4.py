"""K and V of 4 bits in vLLM: a kernel's block has K's rows, then their scales, then V's rows, then their scales.

FlashInfer writes rows and scales in one order (`_nvfp4_kv_views` in v1/attention/backends/flashinfer.py), but on SM100,
where `reshape_and_cache_nvfp4_kernel` (csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu) interleaves V's scales of four
tokens. Before 0.32 it did so with K's, too, or the layer does not say which writer it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from kvbridge_proto.pool import SCALE_BLOCK, Plane
from msgspec.structs import replace

from ...errors import OperatorError
from ..engine.codecs import scaled_rows
from ..engine.memory import plane_of
from ..engine.unsupported import refusal
from .dtypes import member_scales

if TYPE_CHECKING:
    from .layers import KVLayer


def planes(member: KVLayer, blocks: int) -> Iterator[Plane]:
    """The planes of one layer. Raises OperatorError for rows in an order that is not known."""
    tensor, heads, (width, value) = member.tensor, member.heads, member.widths
    row, scales = width // 2, width // SCALE_BLOCK["nvfp4"]
    full, tokens, block_tokens = row + scales, tensor.shape[-2], int(member.spec.block_size)
    is_linear = getattr(getattr(member.attention, "impl", None), "nvfp4_fa2", None)
    if is_linear is None or value != width:
        found = f"{member.name}: nvfp4 of {width} + {value} numbers, by a writer that does not say how it orders scales"
        raise refusal("codec_unknown", "vllm", "packed", found)
    by_head, by_token = (tokens * full, full, 1), (full, 2 * heads * full, 1)
    expected = blocks * (block_tokens // tokens), 2 * heads, tokens, full
    order = tensor.stride()[1:]
    if tuple(tensor.shape) != expected or order not in ([by_head, by_token] if is_linear else [by_head]):
        raise OperatorError(
            "shape_unknown",
            f"{member.name}: KV cache {tuple(tensor.shape)} with strides {tensor.stride()}, expected {expected} with "
            f"strides {by_head}" + (f" or {by_token} but for the first" if is_linear else " but for the first"),
        )
    for side, part in enumerate("kv"):
        at = tensor.storage_offset() + side * heads * tokens * full
        rows, beside = scaled_rows("nvfp4", width)
        rows = replace(rows, scales=member_scales(member)[part])
        for name, codec, begin in ((part, rows, at), (f"{part}_scale", beside, at + heads * tokens * row)):
            size = codec.row_bytes
            inner = (tokens * size, size) if order == by_head else (size, heads * size)
            view = tensor.as_strided((len(tensor), heads, tokens, size), (tensor.stride(0), *inner, 1), begin)
            if is_turned := name == "v_scale" and not is_linear:
                view = _turned(view)
            yield plane_of(
                view,
                codec,
                member.held,
                member.layer,
                member.group,
                part=name,
                block_tokens=block_tokens,
                name=member.name,
                token_axes=1 + is_turned,
            )


def _turned(view: torch.Tensor) -> torch.Tensor:
    """Scales of which four tokens share four rows: [blocks, heads, tokens / 4, 4, 4, scales / 4].

    Scale s of token t is in row t // 4 * 4 + s // (scales / 4), at place s % (scales / 4) * 4 + t % 4.
    """
    blocks, heads, tokens, scales = view.shape
    block, head, row, _ = view.stride()
    shape, strides = (blocks, heads, tokens // 4, 4, 4, scales // 4), (block, head, 4 * row, 1, row, 4)
    return view.as_strided(shape, strides, int(view.storage_offset()))
