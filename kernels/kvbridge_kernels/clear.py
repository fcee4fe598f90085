"""Zeros for the bytes of a slot that no segment covers: padding travels too, and must not carry older contents."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from .segment import Segment, Span, gaps
from .tables import Tables

# A gap is mostly a few bytes between two rows; a large one is shared by this many programs.
PROGRAMS = 8


def pack(segments: Sequence[Segment], slot: Span, tables: Tables) -> tuple[int, int] | None:
    """Address and number of the gaps, if there are any."""
    found = gaps(segments, slot.size_bytes)
    return (tables.put([edge for gap in found for edge in gap]), len(found)) if found else None


def start(packed: tuple[int, int], slot: Span) -> None:
    address, count = packed
    clear_gaps[(count, PROGRAMS)](address, slot.address, TILE=1024, num_warps=4)


@triton.jit(do_not_specialize=["gaps", "slot"])
def clear_gaps(gaps: tl.int64, slot: tl.int64, TILE: tl.constexpr):
    record = (gaps + tl.program_id(0).to(tl.int64) * 16).to(tl.pointer_type(tl.int64))
    first, end = tl.load(record), tl.load(record + 1)
    tile = first + tl.program_id(1) * TILE
    while tile < end:
        i_byte = tile + tl.arange(0, TILE)
        tl.store((slot + i_byte).to(tl.pointer_type(tl.uint8)), tl.zeros([TILE], tl.uint8), mask=i_byte < end)
        tile += tl.num_programs(1) * TILE
