"""How vLLM stores the numbers of a layer: which codec, how many bytes, under which scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from kvbridge_proto.pool import Codec, CodecName

from ...cache_kinds import INDEX_KEY
from ...errors import OperatorError
from ..engine.codecs import CODEC_PER_TOKEN_HEAD, INDEX_SCALE_BYTES, scaled_rows
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
# Rows of DeepSeek V4 and V4.1 with so many bytes of scales: behind all rows of a page or, as `versions` says, each row.
V4_LATENT: dict[int, tuple[CodecName, int]] = {584: ("fp8_ds_v4", 8), 528: ("mxfp8_e4m3", 16), 288: ("nvfp4", 32)}


def cell_of(member: KVLayer) -> Cell:
    """What one (head, token) holds. Raises OperatorError for numbers that no codec of ours describes."""
    if member.is_index:
        is_plain = rows_of(member.attention) == "plain_index_key"
        return _plain_index_form(member) if is_plain else _index_form(member)
    tensor, said = member.tensor, member.said
    size, (key, value), heads = tensor.element_size(), member.widths, member.heads
    if said in CODEC_PER_TOKEN_HEAD and size == 1 and key == value:
        name = CODEC_PER_TOKEN_HEAD[said]
        row = key // 2 if name == "int4_row_scale" else key
        return Cell(heads, row, row, scale_bytes=4, scale_unit=1 if name == "int4_row_scale" else 4, codec=name)
    if member.is_latent and "ds_mla" in said and size == 1:
        row = tensor.shape[-1]
        if row in V4_LATENT:
            codec, scales = V4_LATENT[row]
            is_apart = codec == "fp8_ds_v4" or not has_interleaved_rows()
            return Cell(heads, row - scales, 0, scales, 1, is_apart, is_paged=True, part=member.part, codec=codec)
        if row in LATENT:
            return Cell(heads, row, 0, codec=LATENT[row], part=member.part)
    plain = FP8.get(said) if tensor.dtype == torch.uint8 else CODEC_OF.get(tensor.dtype)
    if plain is not None and member.quant_mode in ("NONE", "FP8_PER_TENSOR"):
        return Cell(heads, key * size, value * size, codec=plain, part=member.part)
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
    if found == known[1]:
        return Cell(1, row, 0, exponents, 1, is_apart=True, is_paged=True, codec="mxfp4", part=INDEX_KEY)
    is_packed = getattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False)()
    scales: CodecName = "ue8m0_x4" if is_packed else "pow2_fp32"
    keys = Cell(1, key, 0, INDEX_SCALE_BYTES, codec="fp8_row_scale", scale_codec=scales, part=INDEX_KEY)
    return replace(keys, is_apart=True, is_paged=True)


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
    size = tensor.element_size()
    return Cell(1, key * size, 0, part="index_key", codec=name)


def codec_of(member: KVLayer, cell: Cell, part: str, row_bytes: int) -> Codec:
    """The codec of one plane of the layer."""
    if part.endswith("_scale"):
        unit = cell.scale_unit
        name: CodecName = cell.scale_codec if unit == 4 else "opaque"
        return Codec(name=name, width=row_bytes // unit, element_bytes=unit, row_bytes=row_bytes)
    key, value = member.widths
    scales = member_scales(member)[part] if cell.codec in ("fp8_e4m3", "fp8_e5m2") else ()
    return Codec(
        name=cell.codec,
        width=value if part == "v" else key,
        element_bytes=member.tensor.element_size(),
        row_bytes=row_bytes,
        scales=(1.0,) if cell.codec == "nvfp4" else scales,  # DeepSeek V4.1's have none for all rows
        scale_codec=cell.scale_codec,
    )


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
