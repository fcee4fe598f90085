"""Writes zeros to the bytes of a slot that no segment covers: padding is sent too, and must not carry old contents."""

from __future__ import annotations

import triton
import triton.language as tl

from .segment import Span

# How many programs share one gap. Most gaps are a few bytes between two rows.
PROGRAMS = 8


def start(gaps: int, count: int, slot: Span) -> None:
    """Clear `count` gaps on the current stream. `gaps` is the address of their starts and ends, int64 [count, 2]."""
    clear_gaps[(count, PROGRAMS)](gaps, slot.address, TILE=1024, num_warps=4)


def warm() -> None:
    """Compile the kernel for the current device, by launching it for no gaps."""
    start(0, 0, Span(0, 0))


@triton.jit(do_not_specialize=["gaps", "slot"])
def clear_gaps(gaps: tl.int64, slot: tl.int64, TILE: tl.constexpr):
    record = (gaps + tl.program_id(0).to(tl.int64) * 16).to(tl.pointer_type(tl.int64))
    first, end = tl.load(record), tl.load(record + 1)
    tile = first + tl.program_id(1) * TILE
    while tile < end:
        i_byte = tile + tl.arange(0, TILE)
        tl.store((slot + i_byte).to(tl.pointer_type(tl.uint8)), tl.zeros([TILE], tl.uint8), mask=i_byte < end)
        tile += tl.num_programs(1) * TILE
