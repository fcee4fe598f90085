"""One kernel that moves, converts and sums rows: from engine memory or a slot into engine memory or a slot.

A tile is some places x heads x columns of one plane: [R, C] with R = places * heads, head fastest. So both a token's
heads (NHD) and a head's tokens (the slot) are long runs. Tiles are numbered with columns fastest, then heads, places,
planes. A record, int64 [5], describes a plane in memory: its address, its offset in the slot, its head stride, the
addresses of its place offsets and of those of its scales.

Rows are rounded to the codec on the wire. That is the sender's or the receiver's codec wherever possible, so that a
conversion rounds once and equal codecs not at all. Between rows that have a scale each on both sides it is fp32. So
what one launch moves from memory to memory, and its digest, equal what two leave that move it through a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from .codecs import cast
from .digest import sum_of, words_of


@dataclass(frozen=True, slots=True)
class Tile:
    """How big a tile is, and what the kernel does between its two ends."""

    places: int
    heads: int
    columns: int
    has_more_heads: bool  # one tile does not hold all heads
    has_more_columns: bool
    step: int  # divides the row: so many neighbours have equal masks and may be loaded as one word
    wire: Any  # an unsigned integer as wide as an element on the wire
    wire_codec: Any
    word: int  # bytes that are summed at once; 0: no digest
    writes_words: bool  # the words that are summed are what is written: see `write_words`


@dataclass(frozen=True, slots=True)
class EndConstants:
    """What the kernel reads or writes. Without a codec its elements are those on the wire."""

    is_slot: bool
    element: Any  # an unsigned integer as wide as an element
    align: int  # bytes per access
    run: int  # so many neighbours are contiguous
    is_dense: bool = True
    codec: Any = None
    multiply: bool | str = False  # the arithmetic of a conversion: see `cast` in codecs.py
    divide: str = ""
    scale: str = ""
    scale_at: int = 0  # bytes from the first row to its own scale
    scale_head: int = 0
    rotate: float = 0.0
    is_native: bool = False


# The run-time arguments of the kernel. It is not compiled for particular values of these.
ARGUMENTS = [f"{end}{table}" for end in ("source", "target") for table in ("", "_columns", "_scales")]
ARGUMENTS += ["sums", "planes", "places", "heads", "row", "first_tile", "end_tile"]


@triton.jit(do_not_specialize=ARGUMENTS)
def move_tiles(
    source: tl.int64,  # the records of planes, or the address of a slot
    source_columns: tl.int64,
    source_scales: tl.int64,
    target: tl.int64,
    target_columns: tl.int64,
    target_scales: tl.int64,
    sums: tl.int64,
    planes: tl.int32,
    places: tl.int32,
    heads: tl.int32,
    row: tl.int32,
    first_tile: tl.int32,
    end_tile: tl.int32,
    TILE: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,  # None: nothing is written
):
    SIZE: tl.constexpr = TILE.wire.primitive_bitwidth // 8
    WORD: tl.constexpr = TILE.word
    if WORD:
        total = tl.zeros([TILE.places * TILE.heads, TILE.columns * SIZE // WORD], tl.uint64)
    tile = first_tile + tl.program_id(0)
    while tile < end_tile:  # a `for` over tensors stops the interpreter under numpy 2.4
        first_column, first_head, first_place, plane = split(tile, places, heads, row, TILE)
        i_place, i_head, m_row = rows_of(first_place, first_head, places, TILE.places, TILE.heads)
        if not SOURCE.is_slot:
            records = source
            at = addresses(source, plane, i_place, i_head, m_row)
        else:
            records = target
        if TARGET is not None and not TARGET.is_slot:
            to = addresses(target, plane, i_place, i_head, m_row)
        i_slot = i_head.to(tl.int64) * places + i_place  # the row's number in the plane's part of a slot
        i_column, m_column = columns_of(first_column, row, TILE.columns, TILE.step)
        o_column = in_row(source_columns, i_column, m_column, SOURCE.element, SOURCE.align, SOURCE.is_dense)
        mask = m_row[:, None] & m_column[None, :]
        if SOURCE.is_slot:
            position = start(records, plane) + i_slot * row * SIZE
            at = source + position
        elements = read(at, o_column, mask, SOURCE.element, SOURCE.align, SOURCE.run)
        if SOURCE.codec is not None:
            own = scales(source, plane, i_place, i_head, m_row, SOURCE)
            elements = cast(
                elements, SOURCE.codec, TILE.wire_codec, source_scales, planes, plane, heads, i_head, own, m_row, SOURCE
            )
        if not SOURCE.is_slot:  # no earlier: positions take registers
            position = start(records, plane) + i_slot * row * SIZE
            if TARGET is not None and TARGET.is_slot:
                to = target + position
        if WORD:
            words = words_of(elements, WORD)
        if TARGET is not None and TILE.writes_words:
            write_words(to, words, first_column, row, m_row, WORD // SIZE, TILE.step, TARGET.align)
        if WORD:
            total += sum_of(words, position + first_column * SIZE, WORD)
        if TARGET is not None and not TILE.writes_words:
            if TARGET.codec is not None:
                own = scales(target, plane, i_place, i_head, m_row, TARGET)
                elements = cast(
                    elements, TILE.wire_codec, TARGET.codec, target_scales, planes, plane, heads, i_head, own, m_row,
                    TARGET,
                )  # fmt: skip
            o_column = in_row(target_columns, i_column, m_column, TARGET.element, TARGET.align, TARGET.is_dense)
            write(to, o_column, elements, mask, TARGET.align, TARGET.run)
        tile += tl.num_programs(0)
    if WORD:
        tl.atomic_add(sums.to(tl.pointer_type(tl.int64)), tl.sum(total.to(tl.int64)), sem="relaxed")


@triton.jit
def split(tile, places, heads, row, TILE: tl.constexpr):
    """First column, head and place of a tile, and its plane."""
    first_column = 0
    first_head = 0
    if TILE.has_more_columns:
        tiles = tl.cdiv(row, TILE.columns)
        first_column = tile % tiles * TILE.columns
        tile = tile // tiles
    if TILE.has_more_heads:
        tiles = heads // TILE.heads
        first_head = tile % tiles * TILE.heads
        tile = tile // tiles
    tiles = tl.cdiv(places, TILE.places)
    return first_column, first_head, tile % tiles * TILE.places, tile // tiles


@triton.jit
def rows_of(first_place, first_head, places, PLACES: tl.constexpr, HEADS: tl.constexpr):
    """For each row [R] of a tile: its place, its head, its mask."""
    i_row = tl.arange(0, PLACES * HEADS)
    i_place = first_place + i_row // HEADS
    i_head = first_head + i_row % HEADS
    return i_place, i_head, i_place < places


@triton.jit
def addresses(records, plane, i_place, i_head, m_row):
    """The address in memory of each row [R]."""
    record = (records + plane.to(tl.int64) * 40).to(tl.pointer_type(tl.int64))
    memory = tl.load(record)
    head_stride = tl.load(record + 2)
    offsets = tl.load(record + 3).to(tl.pointer_type(tl.int64))
    o_place = tl.load(offsets + i_place, mask=m_row, other=0)
    return memory + o_place + i_head * head_stride


@triton.jit
def start(records, plane):
    """Where a plane's rows begin in the slot."""
    return tl.load((records + plane.to(tl.int64) * 40 + 8).to(tl.pointer_type(tl.int64)))


@triton.jit
def scales(records, plane, i_place, i_head, m_row, END: tl.constexpr):
    """The address of each row's own scale [R], where rows have one."""
    if END.scale != "":
        record = (records + plane.to(tl.int64) * 40).to(tl.pointer_type(tl.int64))
        offsets = tl.load(record + 4).to(tl.pointer_type(tl.int64))
        o_place = tl.load(offsets + i_place, mask=m_row, other=0)
        return tl.load(record) + END.scale_at + o_place + i_head.to(tl.int64) * END.scale_head
    else:
        return m_row


@triton.jit
def columns_of(first_column, row, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """For each element [C] of a tile: its number in the row, and its mask, which is that of STEP neighbours."""
    i_column = first_column + tl.arange(0, COLUMNS)
    return i_column, i_column < row // STEP * STEP


@triton.jit
def in_row(columns, i_column, m_column, TYPE: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr):
    """Where elements are from the start of their row, in the units of `read` and `write`."""
    if DENSE:
        return in_dense_row(i_column, TYPE, ALIGN)
    else:
        return tl.load(columns.to(tl.pointer_type(tl.int64)) + i_column, mask=m_column, other=0)


@triton.jit
def in_dense_row(i_column, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """As `in_row`, for dense rows."""
    if TYPE.primitive_bitwidth > ALIGN * 8:
        return i_column * (TYPE.primitive_bitwidth // 8)
    return i_column


@triton.jit
def read(address, o_column, mask, TYPE: tl.constexpr, ALIGN: tl.constexpr, RUN: tl.constexpr):
    """TYPE [R, C] at address [R] + o_column [C], zeros where masked.

    `o_column` counts elements, or bytes if ALIGN is smaller than an element. RUN neighbours are contiguous, and the
    first of them lies at a multiple of ALIGN bytes.
    """
    if TYPE.primitive_bitwidth <= ALIGN * 8:
        return tl.load(_pointers(address, o_column, TYPE, ALIGN, RUN), mask=mask, other=0)
    else:
        found = tl.zeros(mask.shape, TYPE)
        for i in tl.static_range(TYPE.primitive_bitwidth // 8):
            part = tl.load(_byte(address, o_column, i), mask=mask, other=0)
            found |= part.to(TYPE) << (8 * i)
        return found


@triton.jit
def write(address, o_column, elements, mask, ALIGN: tl.constexpr, RUN: tl.constexpr):
    """The reverse of read."""
    TYPE: tl.constexpr = elements.dtype
    if TYPE.primitive_bitwidth <= ALIGN * 8:
        tl.store(_pointers(address, o_column, TYPE, ALIGN, RUN), elements, mask=mask)
    else:
        for i in tl.static_range(TYPE.primitive_bitwidth // 8):
            tl.store(_byte(address, o_column, i), (elements >> (8 * i)).to(tl.uint8), mask=mask)


@triton.jit
def write_words(
    address,
    words,
    first_column,
    row,
    m_row,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write a tile's elements as the words that are summed, MANY elements each, to dense rows at address [R].

    Use it instead of `write` where elements were summed: ptxas 12.8 loses pairs of fp8 used both alone and packed.
    """
    COLUMNS: tl.constexpr = words.shape[1]
    i_word, m_word = columns_of(first_column // MANY, row // MANY, COLUMNS, STEP // MANY)
    o_word = in_dense_row(i_word, words.dtype, ALIGN)
    write(address, o_word, words, m_row[:, None] & m_word[None, :], ALIGN, COLUMNS)


@triton.jit
def _pointers(address, o_column, TYPE: tl.constexpr, ALIGN: tl.constexpr, RUN: tl.constexpr):
    """The hints are on the sum of pointers: Triton forgets what it knew of an integer that becomes a pointer."""
    pointers = address.to(tl.pointer_type(TYPE))[:, None] + o_column[None, :]
    return tl.max_contiguous(tl.multiple_of(pointers, [1, ALIGN]), [1, RUN])


@triton.jit
def _byte(address, o_column, i: tl.constexpr):
    return (address[:, None] + o_column[None, :] + i).to(tl.pointer_type(tl.uint8))
