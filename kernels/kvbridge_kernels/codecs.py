"""Conversions on a GPU, element for element what codecs_ref.py does; any NaN is as good as another.

NATIVE: the processor rounds and clamps to fp8 itself (cvt.rn.satfinite, compute capability 8.9), two numbers at a time.
"""

# ruff: noqa: SIM300 (capitals are constants to Triton, not to ruff)
from __future__ import annotations

import triton
import triton.language as tl

from . import codecs_ref

TYPES = {
    "bf16": tl.bfloat16,
    "fp16": tl.float16,
    "fp32": tl.float32,
    "fp8_e4m3": tl.float8e4nv,
    "fp8_e5m2": tl.float8e5,
    "int8": tl.int8,
}
# Adding and subtracting it rounds an fp32 below 2^22 to the nearest even whole number.
ROUNDER = tl.constexpr(float(3 << 22))
LARGEST_E4M3 = tl.constexpr(codecs_ref.LARGEST["fp8_e4m3"])
LARGEST_E5M2 = tl.constexpr(codecs_ref.LARGEST["fp8_e5m2"])
LARGEST_INT8 = tl.constexpr(codecs_ref.LARGEST["int8"])
MOST_IN_ROW = tl.constexpr(codecs_ref.MOST_IN_ROW)
SMALLEST_SCALE = tl.constexpr(codecs_ref.SMALLEST_SCALE)


@triton.jit
def cast(
    stored,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    scales,
    planes,
    plane,
    heads,
    i_head,
    MULTIPLY: tl.constexpr,
    DIVIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    own,
    m_row,
):
    """uint [R, C] of codec OLD -> uint [R, C] of codec NEW; row r belongs to head i_head[r] of `plane`.

    `scales`: fp32 [old | new | RN(1 / new), planes, heads]. MULTIPLY by the old one; DIVIDE by the new one, "exact" or
    "fast", by its "inverse" (scales.py says when), or not, "".
    Either may be "own": each row has a scale in memory, fp32 at the addresses `own` [R] where `m_row`, which is read to
    multiply by, and is worked out and written to divide by.
    """
    values = stored.to(OLD, bitcast=True).to(tl.float32)
    table = scales.to(tl.pointer_type(tl.float32)) + plane.to(tl.int64) * heads
    if MULTIPLY == "own":
        values *= tl.load(own.to(tl.pointer_type(tl.float32)), mask=m_row, other=1.0)[:, None]
    elif MULTIPLY:
        values *= tl.load(table + i_head)[:, None]
    table += planes * heads
    if DIVIDE == "exact":
        values = tl.math.div_rn(values, tl.load(table + i_head)[:, None] + tl.zeros_like(values))
    if DIVIDE == "inverse":
        values *= tl.load(table + planes * heads + i_head)[:, None]
    if DIVIDE == "fast":
        inverse = tl.load(table + planes * heads + i_head)
        values = _divide(values, tl.load(table + i_head)[:, None], inverse[:, None], OLD)
    if DIVIDE == "own":
        scale = _row_scale(values, NEW)
        tl.store(own.to(tl.pointer_type(tl.float32)), scale, mask=m_row)
        values = tl.math.div_rn(values, scale[:, None] + tl.zeros_like(values))
    return _encode(values, NEW, NATIVE)


@triton.jit
def _row_scale(values, NEW: tl.constexpr):
    """fp32 [R]: the least scale under which NEW holds the largest number of each row."""
    largest = tl.max(tl.where(values != values, 0.0, tl.abs(values)), axis=1)
    largest = tl.minimum(largest, MOST_IN_ROW)
    most: tl.constexpr = LARGEST_INT8 if NEW == tl.int8 else LARGEST_E4M3
    scale = tl.math.div_rn(largest, tl.zeros_like(largest) + most)
    return tl.maximum(scale, SMALLEST_SCALE)


@triton.jit
def _divide(values, scale, inverse, OLD: tl.constexpr):
    """RN(values / scale) in five operations where div_rn takes a call: Markstein's two corrections of values * inverse.

    Exact for scales in [2^-50, 2^50] as far as 8 bits can tell: a residual is inexact only where the quotient is too
    small to be anything but a zero. What is far too large is clamped first, because infinity minus infinity is NaN.
    A residual of zero is +0, and subtracting it keeps the sign of a quotient of -0. (A minus is 0 - x to Triton.)
    """
    if OLD.primitive_bitwidth > 8 or OLD == tl.float8e5:
        bound = scale * (2.0 * 57344.0)
        values = tl.clamp(values, bound * -1.0, bound, propagate_nan=tl.PropagateNan.ALL)
    quotient = values * inverse
    quotient = tl.fma(tl.fma(quotient, scale, values * -1.0), inverse * -1.0, quotient)
    return tl.fma(tl.fma(quotient, scale, values * -1.0), inverse * -1.0, quotient)


@triton.jit
def _encode(values, NEW: tl.constexpr, NATIVE: tl.constexpr):
    if NEW == tl.int8:
        values = tl.where(values != values, 0.0, values)
        values = tl.minimum(tl.maximum(values, -128.0), 127.0)
        return (values + ROUNDER - ROUNDER).to(tl.int8).to(tl.uint8, bitcast=True)
    elif NEW == tl.float32:
        return values.to(tl.uint32, bitcast=True)
    elif NEW.primitive_bitwidth == 8:
        if NATIVE:
            return values.to(NEW).to(tl.uint8, bitcast=True)
        elif NEW == tl.float8e5:
            return _round_to_fp8(values, 2, 15, LARGEST_E5M2)
        else:
            return _round_to_fp8(values, 3, 7, LARGEST_E4M3)
    else:
        return values.to(NEW).to(tl.uint16, bitcast=True)


@triton.jit
def _round_to_fp8(values, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """What cvt.rn.satfinite does, in whole numbers; every NaN becomes 0x7f."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)  # of those with an exponent
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size < LARGEST, size, LARGEST)
    kept = size.to(tl.uint32, bitcast=True)
    kept = (kept + ((1 << (DROPPED - 1)) - 1) + ((kept >> DROPPED) & 1)) >> DROPPED
    normal = kept - ((127 - BIAS) << MANTISSA)
    small = (size * (2.0**MANTISSA / SMALLEST) + ROUNDER - ROUNDER).to(tl.uint32)
    code = tl.where(values != values, 0x7F, sign | tl.where(size < SMALLEST, small, normal))
    return code.to(tl.uint8)
