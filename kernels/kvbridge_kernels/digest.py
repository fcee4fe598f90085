"""sum64 on a GPU: joins the elements of a tile into words and mixes them. digest_ref.py defines sum64."""

from __future__ import annotations

import triton
import triton.language as tl

from . import digest_ref

K1 = tl.constexpr(digest_ref.K1)
K2 = tl.constexpr(digest_ref.K2)


@triton.jit
def sum_of(words, position, WORD: tl.constexpr):
    """The mixes of a tile's words, uint64 [R, W]. `words` is uint [R, W], zero where masked.

    `position`, int64 [R], is where the first word of each row is in the slot. The key of a word is a part per row plus
    a part per column, so it costs one addition.
    """
    k1 = tl.full([1], K1, tl.uint64)
    first = (2 * position.to(tl.uint64) + 1) * k1
    step = (2 * WORD * tl.arange(0, words.shape[1])).to(tl.uint64) * k1
    x = words.to(tl.uint64) * (first[:, None] + step[None, :])
    x ^= x >> 32
    x *= tl.full([1, 1], K2, tl.uint64)
    return x ^ (x >> 29)


@triton.jit
def words_of(elements, WORD: tl.constexpr):
    """uint [R, C] as uint [R, W] of WORD bytes: joins neighbours, which one thread holds, little-endian."""
    x = elements
    if WORD > 1 and x.dtype == tl.uint8:
        x = _pairs(x, tl.uint16, 8)
    if WORD > 2 and x.dtype == tl.uint16:
        x = _pairs(x, tl.uint32, 16)
    if WORD > 4 and x.dtype == tl.uint32:
        x = _pairs(x, tl.uint64, 32)
    return x


@triton.jit
def _pairs(x, WIDE: tl.constexpr, BITS: tl.constexpr):
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return low.to(WIDE) | (high.to(WIDE) << BITS)
