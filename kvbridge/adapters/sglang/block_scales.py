"""Rows of K and V in SGLang with a scale for every few numbers, in tensors of their own: MXFP8, NVFP4 and FP4."""

from __future__ import annotations

from typing import Any

import torch
from kvbridge_proto.pool import HALVES, Codec, CodecName

from ...errors import OperatorError
from ..engine.codecs import scaled_rows
from ..engine.unsupported import refusal

MXFP8 = "MHATokenToKVPoolMXFP8"
# By `quant_method.name` of a `MHATokenToKVPool`. All other methods but "unquantized" are refused.
METHODS: dict[str, CodecName] = {"nvfp4": "nvfp4", "fp4_mx_block16": "fp4_mx_block16"}


def codec_name(pool: Any) -> CodecName | None:
    """The codec of such a pool's rows; None if its numbers are plain."""
    if type(pool).__name__ == MXFP8:
        return "mxfp8_e4m3"
    return METHODS.get(_method(pool))


def check(pool: Any) -> None:
    """Raise OperatorError if the pool keeps its rows in a way that is not carried."""
    if (method := _method(pool)) not in ("unquantized", *METHODS):
        raise OperatorError("codec_unknown", f"KV pool: quantized by {method}, must hold plain numbers")
    if codec_name(pool) is None:
        return
    if getattr(pool, "native_k_scale_buffer", None) is not None:
        # Kept in addition, or instead: `needs_native_fp4_scales` of `NVFP4KVCacheMethod`, on SM100.
        raise refusal("codec_unknown", "sglang", "packed", "KV pool: nvfp4 with scales in the order of TRT-LLM")


def codecs_of(pool: Any, name: CodecName, part: str, row: int, attention: Any) -> tuple[Codec, Codec]:
    """The codecs of a layer's K or V, whose rows have so many bytes, and of their scales."""
    scale = pool.quant_method.get_bmm_scales(attention.layer_id)[part == "v"] if name == "nvfp4" else 1.0
    return scaled_rows(name, row * 2 if name in HALVES else row, float(scale))


def scales_of(pool: Any, part: str, place: int, many: int) -> torch.Tensor:
    """Scales of a layer, `many` of a row: [pages, heads, tokens / 32, 32, many] or [slots, heads, many].

    `place` is the layer's in the pool's lists. In pages of 128 MXFP8's have the order that FA4 reads
    (`store_sf_interleaved` in sglang/kernels/ops/kvcache/mxfp8_interleave_sf.py).
    """
    tensor: torch.Tensor = (pool.v_scale_buffer if part == "v" else pool.k_scale_buffer)[place]
    return tensor.transpose(2, 3) if tensor.dim() == 5 else tensor.view(len(tensor), -1, many)


def _method(pool: Any) -> str:
    return str(getattr(getattr(pool, "quant_method", None), "name", "unquantized"))
