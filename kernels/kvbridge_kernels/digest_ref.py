"""The digests of a slot, 64 bits each, that two agents compare after a write.

`digest` is xxh3 over the bytes in order, for slots in host memory. `sum64` is for slots that a GPU fills in any order:
the sum of mix(word, position) over all words, mod 2^64. A word is little-endian and zero-extended. Its size is the
largest power of two, at most 8 bytes, that divides a segment's row on the wire. Its position is its byte offset in the
slot. The mix is

    x = word * ((2 * position + 1) * K1);  x ^= x >> 32;  x *= K2;  x ^= x >> 29

Every step is a bijection of the word, so one changed word always changes the sum. Zero words add nothing, so padding
costs nothing. The shifts carry the upper bits down, so that two flips of a top bit do not cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from .segment import Segment

K1 = 0x9E3779B97F4A7C15
K2 = 0xBF58476D1CE4E5B9
# Words per step. Four working arrays of this size stay in a core's L2.
TILE_WORDS = 1 << 14
WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(slot: torch.Tensor) -> int:
    """The 64 bits of a contiguous uint8 tensor, called "xxh3" on the wire. Reads in place and releases the GIL."""
    import xxhash  # an engine's environment has none

    return xxhash.xxh3_64_intdigest(slot.numpy().data)


def word_bytes(wire_row_bytes: int) -> int:
    """The size of sum64's words in rows of this size."""
    return gcd(8, wire_row_bytes)


def sum64(segments: Sequence[Segment], slot: torch.Tensor) -> int:
    """The sum over the rows of all segments in `slot`, a uint8 tensor on the CPU. Returned as by `as_int64`."""
    total = 0
    for segment in segments:
        width, size = word_bytes(segment.wire_row_bytes), segment.plane_bytes
        for plane in range(segment.field.planes.count):
            start = segment.slot_offset + plane * segment.slot_pitch
            total += sum_of(slot[start : start + size], start, width)
    return as_int64(total)


def as_int64(value: int) -> int:
    """The lowest 64 bits as a signed number, as torch holds them."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def sum_of(rows: torch.Tensor, position: int, width: int) -> int:
    """The sum over `rows`, in words of `width` bytes, the first of them at byte `position` of the slot."""
    total = 0
    for start in range(0, rows.numel(), TILE_WORDS * width):
        words = _words(rows[start : start + TILE_WORDS * width], width)
        total += int(_mixed(words, position + start, width).sum())
    return total


def _words(piece: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes as words in int64, zero-extended. They need not be aligned."""
    if piece.data_ptr() % width:
        piece = piece.clone()
    words = piece.view(WORD_DTYPES[width]).to(torch.int64)
    return words if width in (1, 8) else words & ((1 << (8 * width)) - 1)


def _mixed(words: torch.Tensor, position: int, width: int) -> torch.Tensor:
    first, step = as_int64((2 * position + 1) * K1), as_int64(2 * width * K1)
    keys = torch.arange(words.numel()).mul_(step).add_(first)
    mixed = keys.mul_(words)
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    mixed *= as_int64(K2)
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    return mixed
