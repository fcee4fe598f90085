"""How vLLM stores the numbers of a layer: which codec, how many bytes, under which scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kvbridge_proto.pool import Codec, CodecName
from msgspec.structs import replace

from ...cache_kinds import INDEX_KEY
from ...errors import OperatorError
from ..engine.codecs import (
    CODEC_PER_TOKEN_HEAD,
    INDEX_KEYS,
    INDEX_SCALE_BYTES,
    INDEX_SCALES,
    V4_FORMS,
    V4_ROWS,
    head_scaled_rows,
    plain_rows,
    scaled_rows,
)
from ..engine.memory import CODEC_OF
from ..engine.unsupported import refusal
from .backends import rows_of
from .shapes import Cell
from .versions import has_interleaved_rows

if TYPE_CHECKING:
    from .layers import KVLayer

FP8: dict[str, CodecName] = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
# Latent rows with their scales inside, by bytes per row.
LATENT: dict[int, CodecName] = {656: "fp8_ds_mla", 352: "nvfp4_ds_mla"}
# Those of DeepSeek V4 and V4.1, with their scales: behind all rows of a page or, as `versions` says, behind each row.
V4_LATENT = {sum(codec.row_bytes for codec in form): form for form in V4_FORMS.values()}


def cell_of(member: KVLayer) -> Cell:
    """What one (head, token) holds. Raises OperatorError for numbers that no codec of ours describes."""
    if member.is_index:
        is_plain = rows_of(member.attention) == "plain_index_key"
        return _plain_index_form(member) if is_plain else _index_form(member)
    tensor, said, part, heads = member.tensor, member.said, member.part, member.heads
    size, (key, value) = tensor.element_size(), member.widths
    if said in CODEC_PER_TOKEN_HEAD and size == 1 and key == value:
        rows, scales = head_scaled_rows(said, key)
        return Cell(heads, {"k": rows, "k_scale": scales, "v": rows, "v_scale": scales})
    if member.is_latent and "ds_mla" in said and size == 1:
        row = tensor.shape[-1]
        if row in V4_LATENT:
            rows, scales = V4_LATENT[row]
            is_apart = rows == V4_ROWS or not has_interleaved_rows()
            return Cell(heads, {part: rows, f"{part}_scale": scales}, is_apart, is_paged=True)
        if row in LATENT:
            return Cell(heads, {part: Codec(name=LATENT[row], width=key, element_bytes=1, row_bytes=row)})
    plain = FP8.get(said) if tensor.dtype == torch.uint8 else CODEC_OF.get(tensor.dtype)
    if plain is not None and member.quant_mode in ("NONE", "FP8_PER_TENSOR"):
        widths = {"k": key, "v": value} if value else {part: key}
        under = member_scales(member) if plain in FP8.values() else dict.fromkeys(widths, (1.0,))
        return Cell(heads, {each: plain_rows(plain, width, size, under[each]) for each, width in widths.items()})
    raise refusal(
        "codec_unknown",
        "vllm",
        "packed",
        f"{member.name}: kv_cache_dtype {said} in {tensor.dtype} ({member.quant_mode}, {key} + {value} numbers)",
    )


def _index_form(member: KVLayer) -> Cell:
    """Keys in fp8, each with one scale, which is a power of two: all writers have `scale_fmt` "ue8m0"; or in MXFP4.

    Where the kernels that read them want no fp32 (SM100, 0.33), writers store its exponent in each of the four bytes.
    Nothing in the tensor shows it (`pack_ue8m0_x4` in v1/attention/ops/common.py).
    """
    from vllm.utils import deep_gemm

    key, _ = member.widths
    width, (row, exponents) = key + INDEX_SCALE_BYTES, [each.row_bytes for each in scaled_rows("mxfp4", key)]
    found = member.tensor.dtype, int(member.spec.head_size), member.tensor.shape[-1]
    known = [(torch.uint8, size, size) for size in (width, row + exponents)]
    if found not in known or getattr(member.attention, "uses_shuffled_layout", False):
        raise OperatorError(
            "codec_unknown",
            f"{member.name}: index cache of {found[1]} x {found[0]} a token (its tensor has {found[2]}), must be "
            f"{width} x {torch.uint8} in order: {key} fp8 numbers and a scale, or {row + exponents} in MXFP4; "
            "no setting of the engine helps",
        )
    codecs = scaled_rows("mxfp4", key) if found == known[1] else (INDEX_KEYS, INDEX_SCALES)
    if codecs[0] == INDEX_KEYS and getattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False)():
        codecs = replace(INDEX_KEYS, scale_codec="ue8m0_x4"), replace(INDEX_SCALES, name="ue8m0_x4")
    parts = dict(zip((INDEX_KEY, f"{INDEX_KEY}_scale"), codecs, strict=True))
    return Cell(1, parts, is_apart=True, is_paged=True)


def _plain_index_form(member: KVLayer) -> Cell:
    """MiniMax M3's: a row of numbers for each token, in fp8 without a scale (`storeElemsFp8` of the writer).

    The writer counts slots over all blocks, where readers follow the tensor's strides: so these must be dense.
    """
    tensor, key = member.tensor, member.widths[0]
    name = CODEC_OF.get(tensor.dtype)
    found = tensor.dtype, int(member.spec.head_size), tensor.shape[-1]
    if name is None or found[1:] != (key, key):
        raise OperatorError(
            "codec_unknown",
            f"{member.name}: index cache of {found[1]} x {found[0]} a token (its tensor has {found[2]}), must be "
            f"{key} plain numbers; no setting of the engine helps",
        )
    tokens = tensor.shape[-2]
    if (tensor.stride(0), tensor.stride(-2), tensor.stride(-1)) != (tokens * key, key, 1):
        raise OperatorError(
            "layout_unknown",
            f"{member.name}: index cache {tuple(tensor.shape)} with strides {tensor.stride()}, vLLM writes its rows "
            "one after another; needs VLLM_KV_CACHE_LAYOUT LBNHC or LBHNC",
        )
    return Cell(1, {INDEX_KEY: plain_rows(name, key, tensor.element_size())})


def member_scales(member: KVLayer) -> dict[str, tuple[float, ...]]:
    """The scales of a layer's parts: one each, or one per head in both if the checkpoint has that in either."""
    if member.is_index or (member.is_latent and not hasattr(member.attention, "_k_scale_float")):
        return {member.part: (1.0,)}  # DeepSeek V4's backends for plain fp8 have constants
    if member.is_latent:
        return {"latent": _scales(member, "k")}
    k, v = _scales(member, "k"), _scales(member, "v")
    count = max(len(k), len(v))
    return {"k": k * (count // len(k)), "v": v * (count // len(v))}


def _scales(member: KVLayer, part: str) -> tuple[float, ...]:
    """One scale, or one per head: then vLLM's own float cannot be used."""
    scale = getattr(member.attention, f"_{part}_scale", None)
    if isinstance(scale, torch.Tensor) and scale.numel() > 1:
        scales = tuple(float(value) for value in scale.flatten().tolist())
        if len(scales) != member.heads:
            raise OperatorError(
                "scales_unknown", f"{member.name}: {len(scales)} scales of {part} for {member.heads} heads"
            )
        return scales
    return (float(getattr(member.attention, f"_{part}_scale_float")),)
