"""Conversions between codecs that hold one number per element, in fp32 arithmetic and plain torch.

value = stored * scale; stored = round to nearest even(value / scale). Numbers that are too large, and infinities,
become an infinity in fp16, bf16 and fp32, as in torch's casts (from 65520 in fp16). In 8 bits they become the codec's
largest number. NaN stays NaN, but is 0 in int8. Equal codecs with equal scales are never cast; their bytes are moved.

In 8 bits each row may have its own scale in memory. Reading a row reads its scale. Writing a row computes it:
amax / largest, where amax is the row's largest absolute value. NaN does not count, and infinities count as bf16's
largest number. Where a scale is a power of two, amax is at least LEAST_IN_ROW, and the scale is rounded up: as both
engines write index keys.

A cast may also rotate its rows on their way into memory: between decoding and encoding they are multiplied by the
orthonormal Walsh-Hadamard matrix in Sylvester's order, which is its own inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from .field import Axis, Field, Scratch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
LARGEST = {
    "bf16": torch.finfo(torch.bfloat16).max,
    "fp16": 65504.0,
    "fp32": torch.finfo(torch.float32).max,
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "int8": 127.0,
}
# In fp32, 448 times this is finite and 480 times this is infinite.
TO_INFINITY = torch.finfo(torch.float32).max / 464.0
# amax is limited to this, so that the row's scale times the codec's largest number is finite in fp32.
MOST_IN_ROW = LARGEST["bf16"]
# The scale of a row of zeros. What it loses, only bf16 and fp32 could hold.
SMALLEST_SCALE = 2.0**-100
# amax is at least this for scales that are powers of two (`_fp8_ue8m0_quantize` of vLLM, `act_quant` of SGLang).
LEAST_IN_ROW = 1e-4
# How the scale of a row lies in its four bytes: any fp32, a power of two as an fp32, or its exponent in each byte.
SCALE_FORMS = ("fp32", "pow2_fp32", "ue8m0_x4")
MANTISSA = (1 << 23) - 1  # the bits of an fp32 below its exponent
FOUR_TIMES = 0x01010101  # a byte, as each of four
# Size of the fp32 working tile: 256 KiB, which stays in a core's L2 (1 MiB on the machines measured) with its source.
TILE_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class RowScale:
    """Each row has its own scale in the field's memory, for the first row `at` bytes from its start.

    The strides are those from one head's, block's and token's scale to the next. `form` is one of SCALE_FORMS.
    """

    at: int
    head_stride: int
    block_stride: int
    tokens: tuple[Axis, ...]
    form: str = "fp32"

    def of(self, field: Field) -> Field:
        """The scales of a field's rows, as a field."""
        return replace(
            field,
            offset=field.offset + self.at,
            blocks=Axis(field.blocks.count, self.block_stride),
            tokens=self.tokens,
            heads=Axis(field.heads.count, self.head_stride),
            elements=(Axis(1, 4),),
            element_bytes=4,
        )


@dataclass(frozen=True, slots=True)
class Number:
    """How one number is stored. `scale` is None (1), fp32 [planes or 1, heads or 1], or one for each row in memory."""

    name: str
    scale: torch.Tensor | RowScale | None = None

    @property
    def table(self) -> torch.Tensor | None:
        """The scales, or None if rows have their own or there are none."""
        return None if isinstance(self.scale, RowScale) else self.scale

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


@dataclass(frozen=True, slots=True)
class Cast:
    """The two ends of a conversion: the engine's memory and the wire. `rotates`: rows are rotated when written."""

    memory: Number
    wire: Number
    rotates: bool = False

    def wire_bytes(self, memory_bytes: int) -> int:
        return memory_bytes // self.memory.dtype.itemsize * self.wire.dtype.itemsize


def cast(
    source: torch.Tensor,
    target: torch.Tensor,
    old: Number,
    new: Number,
    scratch: Scratch | None = None,
    rotates: bool = False,
) -> None:
    """Convert `source` into `target`: both uint8 [planes, heads, bytes], dense in the last two axes.

    With `rotates` the second axis are rows.
    """
    scratch = scratch or Scratch()
    old_table, new_table = old.table, new.table
    is_by_head = any(table is not None and table.shape[1] > 1 for table in (old_table, new_table))
    if not rotates and not is_by_head:
        source, target = source.flatten(1).unsqueeze(1), target.flatten(1).unsqueeze(1)
    stored, wanted = source.view(old.dtype), target.view(new.dtype)
    for tile in _tiles(*stored.shape):
        old_scale, new_scale = _of_tile(old_table, tile), _of_tile(new_table, tile)
        values = _work("values", torch.float32, stored[tile], scratch)
        decode(stored[tile], old.name, old_scale, values, scratch)
        if rotates:
            rotate(values, scratch)
        encode(values, new.name, new_scale, wanted[tile])


def cast_rows(
    source: torch.Tensor,
    target: torch.Tensor,
    scales: torch.Tensor,
    old: Number,
    new: Number,
    scratch: Scratch,
    rotates: bool = False,
) -> None:
    """Convert uint8 [planes, rows, bytes] as `cast` does, but compute a scale for each row of `target`.

    The scales are written to `scales`, int32 [planes, rows], in the form of `new`, which has a RowScale.
    """
    assert isinstance(new.scale, RowScale)
    name, form = new.name, new.scale.form
    stored, wanted = source.view(old.dtype), target.view(DTYPES[name])
    assert stored.shape[2] <= TILE_ELEMENTS
    for tile in _tiles(*stored.shape):
        old_scale = _of_tile(old.table, tile)
        values = _work("values", torch.float32, stored[tile], scratch)
        decode(stored[tile], old.name, old_scale, values, scratch)
        if rotates:
            rotate(values, scratch)
        sizes = torch.abs(values, out=_work("sizes", torch.float32, values, scratch))
        largest = sizes.nan_to_num_(0.0, MOST_IN_ROW).amax(2, keepdim=True).clamp_(max=MOST_IN_ROW)
        scale = _scale_of(largest, name, form)
        scales[tile[:2]] = _stored_scale(scale[:, :, 0], form)
        encode(values, name, scale, wanted[tile])


def _scale_of(largest: torch.Tensor, name: str, form: str) -> torch.Tensor:
    """fp32: with which a row can be stored whose largest number is this. Overwrites `largest`."""
    if form == "fp32":
        return largest.div_(LARGEST[name]).clamp_(min=SMALLEST_SCALE)
    bits = largest.clamp_(min=LEAST_IN_ROW).div_(LARGEST[name]).view(torch.int32)
    return bits.add_(MANTISSA).bitwise_and_(~MANTISSA).view(torch.float32)


def _stored_scale(scale: torch.Tensor, form: str) -> torch.Tensor:
    """int32: a scale as its four bytes."""
    bits = scale.contiguous().view(torch.int32)
    return (bits >> 23) * FOUR_TIMES if form == "ue8m0_x4" else bits


def read_scales(stored: torch.Tensor, form: str) -> torch.Tensor:
    """fp32: the scales whose four bytes are those of `stored`, int32. Overwrites it."""
    return (stored.bitwise_and_(0xFF).mul_(1 << 23) if form == "ue8m0_x4" else stored).view(torch.float32)


def rotate(values: torch.Tensor, scratch: Scratch) -> None:
    """Multiply each row, the last axis of fp32 `values`, by the Hadamard matrix: sums of neighbours first.

    Every sum is rounded to fp32, in this order, and so is the last product. The kernels do the same.
    """
    count, half = values.shape[-1], 1
    while half < count:
        pairs = values.view(-1, count // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        sums = torch.add(first, second, out=_work("sums", torch.float32, first, scratch))
        torch.sub(first, second, out=second)
        first.copy_(sums)
        half *= 2
    values.mul_(unit_of(count))


def unit_of(width: int) -> float:
    """What the sums of a row of `width` numbers are multiplied with: an fp32."""
    return float(np.float32(width**-0.5))


def decode(stored: torch.Tensor, name: str, scale: torch.Tensor | None, values: torch.Tensor, scratch: Scratch) -> None:
    """values (fp32) = stored * scale. Only the multiplication rounds."""
    if name == "fp8_e4m3":
        _decode_e4m3(stored, values, scratch)
    elif name == "fp8_e5m2":  # the upper byte of an fp16
        halves = _work("halves", torch.int16, stored, scratch)
        values.copy_(halves.copy_(stored.view(torch.int8)).mul_(1 << 8).view(torch.float16))
    else:
        values.copy_(stored)
    if scale is not None:
        values.mul_(scale)


def _decode_e4m3(stored: torch.Tensor, values: torch.Tensor, scratch: Scratch) -> None:
    """Move sign, exponent and mantissa into an fp16, whose bias is 8 greater. torch's cast is ten times slower.

    0x7f and 0xff are NaN, but become 480. Only they are infinite when multiplied by TO_INFINITY, and infinity times
    zero is NaN. Comparing and masking would take longer than everything else here.
    """
    halves = _work("halves", torch.int16, stored, scratch)
    halves.copy_(stored.view(torch.int8)).mul_(1 << 7).bitwise_and_(~0x4000)
    values.copy_(halves.view(torch.float16)).mul_(256.0)
    infinite = torch.mul(values, TO_INFINITY, out=_work("infinite", torch.float32, stored, scratch))
    values.add_(infinite, alpha=0.0)


def encode(values: torch.Tensor, name: str, scale: torch.Tensor | None, stored: torch.Tensor) -> None:
    """stored = round(values / scale), clamped if the codec has 8 bits. Overwrites `values`."""
    largest = LARGEST[name]
    if scale is not None:
        values.div_(scale)
    if name == "int8":
        stored.copy_(values.nan_to_num_(0.0, torch.inf, -torch.inf).clamp_(-128.0, 127.0).round_())
        return
    if DTYPES[name].itemsize == 1:
        values.clamp_(-largest, largest)
    stored.copy_(values)


def _of_tile(scale: torch.Tensor | None, tile: tuple[slice, slice, slice]) -> torch.Tensor | None:
    """The part of the scales for a tile: [planes or 1, heads or 1, 1]. None if there are none."""
    if scale is None:
        return None
    planes, heads = (part if count > 1 else slice(None) for part, count in zip(tile[:2], scale.shape, strict=True))
    return scale[planes, heads].unsqueeze(2)


def _tiles(planes: int, heads: int, columns: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices into boxes of at most TILE_ELEMENTS, as long as possible in the last axis."""
    width = max(1, min(columns, TILE_ELEMENTS))
    height = max(1, min(heads, TILE_ELEMENTS // width))
    depth = max(1, min(planes, TILE_ELEMENTS // (width * height)))
    for i_plane in range(0, planes, depth):
        for i_head in range(0, heads, height):
            for i_column in range(0, columns, width):
                yield (
                    slice(i_plane, i_plane + depth),
                    slice(i_head, i_head + height),
                    slice(i_column, i_column + width),
                )


def _work(purpose: str, dtype: torch.dtype, like: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """An uninitialised tensor shaped as `like`."""
    kept = scratch.take(purpose, like.numel() * dtype.itemsize, like.device)
    return kept.view(dtype).view(like.shape)
