"""sum64 on a GPU: words out of the elements of a tile, and their mix. digest_ref.py says what it is."""

from __future__ import annotations

import triton
import triton.language as tl

from . import digest_ref

K1 = tl.constexpr(digest_ref.K1)
K2 = tl.constexpr(digest_ref.K2)


@triton.jit
def sum_of(words, position, WORD: tl.constexpr):
    """uint64 [R, W] of a tile: `words` uint [R, W], zeros where masked; `position` int64 [R] of the first in each row.

    Keys are built from a part per row and a part per column: one addition a word.
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
    """uint [R, C] as uint [R, W] of WORD bytes: neighbours, which one thread holds, joined little-endian."""
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
