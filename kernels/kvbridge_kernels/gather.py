"""Blocks -> slot on a GPU: planes of one layout together, in short launches, converting and summing on the way.

`digest` runs the same kernel without a slot: it only sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import launch, tiles
from .codecs import cast
from .digest import sum_of, words_of
from .prepared_copy import PlacedCopy
from .segment import Segment, Span
from .tables import Work
from .tiles import ARGUMENTS


def gather(
    chunk: Sequence[Segment] | PlacedCopy,
    slot: Span,
    sums: torch.Tensor | None,
    work: Work,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Fill the slot with the rows of a chunk, and its gaps with zeros. Adds the sum64 to `sums`, int64 [1].

    Enqueued on `stream`, or on the current stream of `work.device`. Allocates nothing and waits for nothing. Places and
    scales are read before this returns; `work` is read until the launches have run. Raises ValueError if something does
    not fit, and NotCompiled unless `work.compiles`, both before anything is enqueued.
    """
    launch.run(gather_tiles, chunk, slot, sums, work, is_gather=True, stream=stream)


def digest(
    chunk: Sequence[Segment] | PlacedCopy,
    slot_bytes: int,
    sums: torch.Tensor,
    work: Work,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Add to `sums` the sum64 that `gather` would, for a slot of `slot_bytes`. Otherwise as `gather`."""
    launch.run(gather_tiles, chunk, Span(0, slot_bytes), sums, work, is_gather=True, stream=stream, is_stored=False)


def warm(chunk: Sequence[Segment] | PlacedCopy, slot: Span, has_sums: bool, work: Work) -> None:
    """Compile what `gather` would launch; NotCompiled unless `work.compiles`. The number of places does not matter."""
    launch.warm(gather_tiles, chunk, slot, has_sums, work, is_gather=True)


def warm_digest(chunk: Sequence[Segment] | PlacedCopy, slot_bytes: int, work: Work) -> None:
    """As `warm`, for `digest`."""
    launch.warm(gather_tiles, chunk, Span(0, slot_bytes), True, work, is_gather=True, is_stored=False)


@triton.jit(do_not_specialize=ARGUMENTS)
def gather_tiles(
    records: tl.int64,
    columns: tl.int64,
    scales: tl.int64,
    slot: tl.int64,
    sums: tl.int64,
    planes: tl.int32,
    places: tl.int32,
    heads: tl.int32,
    row: tl.int32,
    first_tile: tl.int32,
    end_tile: tl.int32,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEMORY: tl.constexpr,
    WIRE: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    MULTIPLY: tl.constexpr,
    DIVIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_HEAD: tl.constexpr,
    ROTATE: tl.constexpr,
    NATIVE: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    DENSE: tl.constexpr,
    MANY_HEADS: tl.constexpr,
    MANY_COLUMNS: tl.constexpr,
):
    SIZE: tl.constexpr = WIRE.primitive_bitwidth // 8
    if WORD:  # 0 without a digest; FAR is 0 without a slot
        total = tl.zeros([PLACES * HEADS, COLUMNS * SIZE // WORD], tl.uint64)
    tile = first_tile + tl.program_id(0)
    while tile < end_tile:  # a `for` over tensors stops the interpreter under numpy 2.4
        first_column, first_head, first_place, plane = tiles.split(
            tile, places, heads, row, PLACES, HEADS, COLUMNS, MANY_HEADS, MANY_COLUMNS
        )
        near, i_row, i_head, m_row = tiles.rows(records, plane, first_head, first_place, places, PLACES, HEADS)
        i_column, m_column = tiles.columns_of(first_column, row, COLUMNS, STEP)
        o_column = tiles.in_memory(columns, i_column, m_column, MEMORY, NEAR, DENSE)
        mask = m_row[:, None] & m_column[None, :]
        elements = tiles.read(near, o_column, mask, MEMORY, NEAR, RUN)
        if OLD is not None:
            own = m_row
            if SCALE != "":
                own = tiles.scales(records, plane, first_head, first_place, places, PLACES, HEADS, SCALE_AT, SCALE_HEAD)
            elements = cast(
                elements, OLD, NEW, scales, planes, plane, heads, i_head, MULTIPLY, DIVIDE, NATIVE, own, m_row,
                SCALE, ROTATE,
            )  # fmt: skip
        position = tiles.start(records, plane) + i_row * row * SIZE
        if WORD:
            words = words_of(elements, WORD)
            if FAR:
                tiles.write_words(slot + position, words, first_column, row, m_row, WORD // SIZE, STEP, FAR)
            total += sum_of(words, position + first_column * SIZE, WORD)
        else:
            o_slot = tiles.in_slot(i_column, WIRE, FAR)
            tiles.write(slot + position, o_slot, elements, mask, FAR, COLUMNS)
        tile += tl.num_programs(0)
    if WORD:
        tl.atomic_add(sums.to(tl.pointer_type(tl.int64)), tl.sum(total.to(tl.int64)), sem="relaxed")
