"""Conversions on a GPU, element for element what codecs_ref.py does; any NaN is as good as another.

fp8_e4m3 needs compute capability 8.9. Numbers are clamped by cvt.rn.satfinite where the result has 8 bits.
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
LARGEST_FP16 = tl.constexpr(codecs_ref.LARGEST["fp16"])
LARGEST_BF16 = tl.constexpr(codecs_ref.LARGEST["bf16"])


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
    OVERFLOW: tl.constexpr,
):
    """uint [R, C] of codec OLD -> uint [R, C] of codec NEW; row r belongs to head i_head[r] of `plane`.

    `scales`: fp32 [old | new | RN(1 / new), planes, heads]. MULTIPLY by the old one; DIVIDE by the new one, "exact" or
    "fast", or not, ""; OVERFLOW: a finite value may be too large for NEW.
    """
    values = stored.to(OLD, bitcast=True).to(tl.float32)
    table = scales.to(tl.pointer_type(tl.float32)) + plane.to(tl.int64) * heads
    if MULTIPLY:
        values *= tl.load(table + i_head)[:, None]
    table += planes * heads
    if DIVIDE == "exact":
        values = tl.math.div_rn(values, tl.load(table + i_head)[:, None] + tl.zeros_like(values))
    if DIVIDE == "fast":
        inverse = tl.load(table + planes * heads + i_head)
        values = _divide(values, tl.load(table + i_head)[:, None], inverse[:, None], OLD)
    return _encode(values, NEW, OVERFLOW)


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
def _encode(values, NEW: tl.constexpr, OVERFLOW: tl.constexpr):
    if NEW == tl.int8:
        values = tl.where(values != values, 0.0, values)
        values = tl.minimum(tl.maximum(values, -128.0), 127.0)
        return (values + ROUNDER - ROUNDER).to(tl.int8).to(tl.uint8, bitcast=True)
    elif NEW == tl.float32:
        return values.to(tl.uint32, bitcast=True)
    elif NEW.primitive_bitwidth == 8:
        return values.to(NEW).to(tl.uint8, bitcast=True)
    else:
        if OVERFLOW:
            largest: tl.constexpr = LARGEST_FP16 if NEW == tl.float16 else LARGEST_BF16
            finite = tl.clamp(values, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
            values = tl.where(tl.abs(values) == float("inf"), values, finite)
        return values.to(NEW).to(tl.uint16, bitcast=True)
