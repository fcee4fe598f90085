"""Where the rows of a tile are: addresses in engine memory and positions in the slot, read from the tables.

A tile is PLACES places x HEADS heads x COLUMNS elements of one plane: [R, C] with R = PLACES * HEADS, head fastest. So
both a token's heads (NHD) and a head's tokens (the slot) are long runs. Tiles are numbered with columns fastest, then
heads, places, planes. A record, int64 [5], describes a plane: its address, its offset in the slot, its head stride, the
addresses of its place offsets and of those of its scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The run-time arguments of a kernel. No kernel is compiled for particular values of these.
ARGUMENTS = ["records", "columns", "scales", "slot", "sums", "planes", "places", "heads", "row"]
ARGUMENTS += ["first_tile", "end_tile"]


@triton.jit
def split(
    tile,
    places,
    heads,
    row,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY_HEADS: tl.constexpr,
    MANY_COLUMNS: tl.constexpr,
):
    """First column, head and place of a tile, and its plane. MANY_HEADS: one tile does not hold all heads."""
    first_column = 0
    first_head = 0
    if MANY_COLUMNS:
        tiles = tl.cdiv(row, COLUMNS)
        first_column = tile % tiles * COLUMNS
        tile = tile // tiles
    if MANY_HEADS:
        tiles = heads // HEADS
        first_head = tile % tiles * HEADS
        tile = tile // tiles
    tiles = tl.cdiv(places, PLACES)
    return first_column, first_head, tile % tiles * PLACES, tile // tiles


@triton.jit
def rows(records, plane, first_head, first_place, places, PLACES: tl.constexpr, HEADS: tl.constexpr):
    """For each row [R]: its address in memory, its number in the plane's part of the slot, its head, its mask."""
    record = (records + plane.to(tl.int64) * 40).to(tl.pointer_type(tl.int64))
    memory = tl.load(record)
    head_stride = tl.load(record + 2)
    offsets = tl.load(record + 3).to(tl.pointer_type(tl.int64))
    i_row = tl.arange(0, PLACES * HEADS)
    i_place = first_place + i_row // HEADS
    i_head = first_head + i_row % HEADS
    m_row = i_place < places
    o_place = tl.load(offsets + i_place, mask=m_row, other=0)
    return memory + o_place + i_head * head_stride, i_head.to(tl.int64) * places + i_place, i_head, m_row


@triton.jit
def scales(
    records,
    plane,
    first_head,
    first_place,
    places,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    AT: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """For each row [R]: the address of its own scale. That of the first row is AT bytes from the row."""
    record = (records + plane.to(tl.int64) * 40).to(tl.pointer_type(tl.int64))
    offsets = tl.load(record + 4).to(tl.pointer_type(tl.int64))
    i_row = tl.arange(0, PLACES * HEADS)
    i_place = first_place + i_row // HEADS
    o_place = tl.load(offsets + i_place, mask=i_place < places, other=0)
    return tl.load(record) + AT + o_place + (first_head + i_row % HEADS).to(tl.int64) * HEAD_STRIDE


@triton.jit
def start(records, plane):
    """Where a plane's rows begin in the slot."""
    return tl.load((records + plane.to(tl.int64) * 40 + 8).to(tl.pointer_type(tl.int64)))


@triton.jit
def columns_of(first_column, row, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """For each element [C] of a tile: its number in the row, and its mask.

    STEP divides the row. So STEP neighbours have equal masks and may be loaded as one word.
    """
    i_column = first_column + tl.arange(0, COLUMNS)
    return i_column, i_column < row // STEP * STEP


@triton.jit
def in_memory(columns, i_column, m_column, TYPE: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr):
    """Where elements are from the start of their row, in the units of `read` and `write`."""
    if DENSE:
        return in_slot(i_column, TYPE, ALIGN)
    else:
        return tl.load(columns.to(tl.pointer_type(tl.int64)) + i_column, mask=m_column, other=0)


@triton.jit
def in_slot(i_column, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """As `in_memory`, for dense rows."""
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
    o_word = in_slot(i_word, words.dtype, ALIGN)
    write(address, o_word, words, m_row[:, None] & m_word[None, :], ALIGN, COLUMNS)


@triton.jit
def _pointers(address, o_column, TYPE: tl.constexpr, ALIGN: tl.constexpr, RUN: tl.constexpr):
    """The hints are on the sum of pointers: Triton forgets what it knew of an integer that becomes a pointer."""
    pointers = address.to(tl.pointer_type(TYPE))[:, None] + o_column[None, :]
    return tl.max_contiguous(tl.multiple_of(pointers, [1, ALIGN]), [1, RUN])


@triton.jit
def _byte(address, o_column, i: tl.constexpr):
    return (address[:, None] + o_column[None, :] + i).to(tl.pointer_type(tl.uint8))
