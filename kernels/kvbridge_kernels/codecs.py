"""Conversions on a GPU, equal to codecs_ref.py element for element. Only which NaN is stored may differ.

Where an end `is_native`, the processor rounds and clamps to fp8, two numbers at a time (cvt.rn.satfinite, compute
capability 8.9).
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
# Adding and then subtracting this rounds an fp32 below 2^22 to a whole number, ties to even.
ROUNDER = tl.constexpr(float(3 << 22))
LARGEST_E4M3 = tl.constexpr(codecs_ref.LARGEST["fp8_e4m3"])
LARGEST_E5M2 = tl.constexpr(codecs_ref.LARGEST["fp8_e5m2"])
LARGEST_INT8 = tl.constexpr(codecs_ref.LARGEST["int8"])
MOST_IN_ROW = tl.constexpr(codecs_ref.MOST_IN_ROW)
SMALLEST_SCALE = tl.constexpr(codecs_ref.SMALLEST_SCALE)
LEAST_IN_ROW = tl.constexpr(codecs_ref.LEAST_IN_ROW)
MANTISSA = tl.constexpr(codecs_ref.MANTISSA)
FOUR_TIMES = tl.constexpr(codecs_ref.FOUR_TIMES)


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
    own,
    m_row,
    END: tl.constexpr,
):
    """uint [R, C] of codec OLD -> uint [R, C] of codec NEW. Row r belongs to head i_head[r] of `plane`.

    `scales` is the address of fp32 [old | new | RN(1 / new), planes, heads]. `multiply` of END, the end in memory, says
    whether to multiply by the old scale. `divide` says how to divide by the new one: "exact", "fast", "inverse"
    (multiply by 1 / new), or "" for not at all. scales.py chooses.
    Either may be "own": then each row has its own scale in memory, in the form `scale`, at the addresses `own` [R]
    (valid where `m_row`). `multiply` reads it; `divide` computes and writes it. Unless `rotate` is 0, whole rows are
    multiplied by the Hadamard matrix and by `rotate`. With `is_native` the processor rounds to fp8.
    """
    values = stored.to(OLD, bitcast=True).to(tl.float32)
    table = scales.to(tl.pointer_type(tl.float32)) + plane.to(tl.int64) * heads
    if END.multiply == "own":
        values *= _read_scale(own, m_row, END)[:, None]
    elif END.multiply:
        values *= tl.load(table + i_head)[:, None]
    if END.rotate != 0.0:
        values = _rotate(values) * END.rotate
    table += planes * heads
    if END.divide == "exact":
        values = tl.math.div_rn(values, tl.load(table + i_head)[:, None] + tl.zeros_like(values))
    if END.divide == "inverse":
        values *= tl.load(table + planes * heads + i_head)[:, None]
    if END.divide == "fast":
        inverse = tl.load(table + planes * heads + i_head)
        values = _divide(values, tl.load(table + i_head)[:, None], inverse[:, None], OLD)
    if END.divide == "own":
        scale = _row_scale(values, NEW, END)
        stored = scale.to(tl.int32, bitcast=True)
        if END.scale == "ue8m0_x4":
            stored = (stored >> 23) * FOUR_TIMES
        tl.store(own.to(tl.pointer_type(tl.int32)), stored, mask=m_row)
        values = tl.math.div_rn(values, scale[:, None] + tl.zeros_like(values))
    return _encode(values, NEW, END.is_native)


@triton.jit
def _read_scale(own, m_row, END: tl.constexpr):
    """fp32 [R]: the scales of rows."""
    stored = tl.load(own.to(tl.pointer_type(tl.int32)), mask=m_row, other=0)
    if END.scale == "ue8m0_x4":
        stored = (stored & 0xFF) << 23
    return stored.to(tl.float32, bitcast=True)


@triton.jit
def _row_scale(values, NEW: tl.constexpr, END: tl.constexpr):
    """fp32 [R]: for each row, the smallest scale of its form with which NEW can hold the row's largest number."""
    largest = tl.max(tl.where(values != values, 0.0, tl.abs(values)), axis=1)
    largest = tl.minimum(largest, MOST_IN_ROW)
    tl.static_assert(NEW == tl.int8 or NEW == tl.float8e4nv, "no codec with a scale for each row")
    most: tl.constexpr = LARGEST_INT8 if NEW == tl.int8 else LARGEST_E4M3
    if END.scale != "fp32":
        largest = tl.maximum(largest, LEAST_IN_ROW)
    scale = tl.math.div_rn(largest, tl.zeros_like(largest) + most)
    if END.scale == "fp32":
        return tl.maximum(scale, SMALLEST_SCALE)
    else:
        return ((scale.to(tl.int32, bitcast=True) + MANTISSA) & ~MANTISSA).to(tl.float32, bitcast=True)


@triton.jit
def _rotate(values):
    """fp32 [R, C]: each row times the Hadamard matrix of C in Sylvester's order, but for a factor.

    C is a power of two. Each step adds and subtracts neighbours, and puts sums before differences. So it does to the
    numbers what `rotate` of codecs_ref.py does, in the same order, and after as many steps as C has bits they lie as
    there. The kernel must not fuse operations: a product and a sum round separately.
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    for i in tl.static_range(10):
        if (1 << i) < COLUMNS:
            first, second = tl.split(tl.reshape(values, [ROWS, COLUMNS // 2, 2]))
            both = tl.join(first + second, first - second)
            values = tl.reshape(tl.permute(both, (0, 2, 1)), [ROWS, COLUMNS])
    return values


@triton.jit
def _divide(values, scale, inverse, OLD: tl.constexpr):
    """RN(values / scale) in five operations, where div_rn takes a call: values * inverse, corrected twice (Markstein).

    For scales in [2^-50, 2^50] the error never reaches the 8 bits: a residual is inexact only if the quotient rounds to
    zero. Values that are far too large are clamped first, because infinity minus infinity is NaN. A residual of zero is
    +0, so subtracting it keeps the sign of a quotient of -0. `values * -1.0` is not `-values`, which Triton computes as
    0 - x.
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
        tl.static_assert(NEW == tl.float8e4nv or NEW == tl.float8e5, "no such codec of 8 bits")
        if NATIVE:
            return values.to(NEW).to(tl.uint8, bitcast=True)
        elif NEW == tl.float8e5:
            return _round_to_fp8(values, 2, 15, LARGEST_E5M2)
        else:
            return _round_to_fp8(values, 3, 7, LARGEST_E4M3)
    else:
        tl.static_assert(NEW == tl.float16 or NEW == tl.bfloat16, "no such codec")
        return values.to(NEW).to(tl.uint16, bitcast=True)


@triton.jit
def _round_to_fp8(values, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The same as cvt.rn.satfinite, in integer arithmetic. Every NaN becomes 0x7f."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)  # normal number
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
