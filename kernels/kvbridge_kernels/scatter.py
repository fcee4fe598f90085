"""Slot -> blocks on a GPU: planes of one layout together, in short launches, converting and summing on the way."""

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


def scatter(
    chunk: Sequence[Segment] | PlacedCopy,
    slot: Span,
    sums: torch.Tensor | None,
    work: Work,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Write the rows in the slot to the places of a chunk. Adds the slot's sum64 to `sums`, int64 [1].

    Enqueued on `stream`, or on the current stream of `work.device`. Allocates nothing and waits for nothing. Places and
    scales are read before this returns; `work` is read until the launches have run. Raises ValueError if something does
    not fit, and NotCompiled unless `work.compiles`, both before anything is enqueued.
    """
    launch.run(scatter_tiles, chunk, slot, sums, work, is_gather=False, stream=stream)


def warm(chunk: Sequence[Segment] | PlacedCopy, slot: Span, has_sums: bool, work: Work) -> None:
    """Compile what `scatter` would launch; NotCompiled unless `work.compiles`. The number of places does not matter."""
    launch.warm(scatter_tiles, chunk, slot, has_sums, work, is_gather=False)


@triton.jit(do_not_specialize=ARGUMENTS)
def scatter_tiles(
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
    if WORD:
        total = tl.zeros([PLACES * HEADS, COLUMNS * SIZE // WORD], tl.uint64)
    tile = first_tile + tl.program_id(0)
    while tile < end_tile:  # a `for` over tensors stops the interpreter under numpy 2.4
        first_column, first_head, first_place, plane = tiles.split(
            tile, places, heads, row, PLACES, HEADS, COLUMNS, MANY_HEADS, MANY_COLUMNS
        )
        near, i_row, i_head, m_row = tiles.rows(records, plane, first_head, first_place, places, PLACES, HEADS)
        i_column, m_column = tiles.columns_of(first_column, row, COLUMNS, STEP)
        o_column = tiles.in_memory(columns, i_column, m_column, MEMORY, NEAR, DENSE)
        o_slot = tiles.in_slot(i_column, WIRE, FAR)
        mask = m_row[:, None] & m_column[None, :]
        position = tiles.start(records, plane) + i_row * row * SIZE
        elements = tiles.read(slot + position, o_slot, mask, WIRE, FAR, COLUMNS)
        if WORD:
            total += sum_of(words_of(elements, WORD), position + first_column * SIZE, WORD)
        if OLD is not None:
            own = m_row
            if SCALE != "":
                own = tiles.scales(records, plane, first_head, first_place, places, PLACES, HEADS, SCALE_AT, SCALE_HEAD)
            elements = cast(
                elements, OLD, NEW, scales, planes, plane, heads, i_head, MULTIPLY, DIVIDE, NATIVE, own, m_row,
                SCALE, ROTATE,
            )  # fmt: skip
        tiles.write(near, o_column, elements, mask, NEAR, RUN)
        tile += tl.num_programs(0)
    if WORD:
        tl.atomic_add(sums.to(tl.pointer_type(tl.int64)), tl.sum(total.to(tl.int64)), sem="relaxed")
