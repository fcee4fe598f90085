"""Blocks -> slot on a CPU, in plain torch: the reference of the gather kernel, and the one that runs without a GPU."""

from __future__ import annotations

from math import prod

import torch

from .codecs_ref import Cast, cast
from .field import Field
from .layout import End, Walk, flat, fold, through_scratch, views, walks
from .pieces import Piece, split
from .scratch import Scratch

# Runs shorter than this are copied element by element: cheaper out of a dense scratch than out of memory.
SHORT_RUN = 16


def gather(
    field: Field,
    places: torch.Tensor,
    slot: torch.Tensor,
    conversion: Cast | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Fill `slot`, uint8 [planes, bytes], with the rows at `places`: each plane's densely as [head][place][row].

    Without a conversion the bytes are moved as they are. ValueError before any byte is written when something
    does not fit; nothing is read outside the field.
    """
    check(field, places, slot, conversion)
    scratch = scratch or Scratch()
    rows = slot
    if conversion is not None:
        rows = rows_of(field, places, slot, scratch)
    for piece in split(field, places):
        _gather_piece(field, piece, places.numel(), rows, scratch)
    if conversion is not None:
        heads = field.heads.count
        cast(by_head(rows, heads), by_head(slot, heads), conversion.memory, conversion.wire, scratch)


def _gather_piece(field: Field, piece: Piece, places: int, slot: torch.Tensor, scratch: Scratch) -> None:
    axes = walks(field, piece, places, slot.stride(0))
    memory, rows = ends(field, piece, slot)
    if not wants_scratch(axes):
        source, target = views(memory, rows, fold(axes))
        torch.index_select(source, 0, piece.index, out=target)
        return
    first, second, size = through_scratch(axes)
    between = scratch.take("order", size * piece.index.numel(), slot.device)
    dense = End(between, 0, piece.index.numel(), size)
    source, target = views(memory, dense, fold(first))
    torch.index_select(source, 0, piece.index, out=target)
    source, target = views(dense, rows, fold(second))
    target.copy_(source)


def ends(field: Field, piece: Piece, slot: torch.Tensor) -> tuple[End, End]:
    """Memory and slot as the two ends of a piece."""
    tokens = prod(axis.count for axis in piece.tokens)
    memory = End(field.memory, field.offset + piece.start, int(piece.index.max()) + 1, piece.step)
    rows = End(flat(slot), piece.first * field.row_bytes, piece.index.numel(), tokens * field.row_bytes)
    return memory, rows


def wants_scratch(axes: list[Walk]) -> bool:
    """Whether memory's own order has longer runs than the slot's."""
    run = fold(axes)[-1].count
    return run < SHORT_RUN and fold(through_scratch(axes)[0])[-1].count > run


def check(field: Field, places: torch.Tensor, slot: torch.Tensor, conversion: Cast | None) -> None:
    """ValueError with both values where field, places and slot do not fit each other."""
    field.check(places)
    size_bytes = field.plane_bytes(places.numel())
    shape = [field.planes.count, conversion.wire_bytes(size_bytes) if conversion else size_bytes]
    if slot.dtype != torch.uint8 or list(slot.shape) != shape or slot.stride(1) != 1:
        raise ValueError(f"slot must be uint8 {shape} of dense rows, got {slot.dtype} {list(slot.shape)}")


def rows_of(field: Field, places: torch.Tensor, slot: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Room for the rows in the memory's codec: uint8 [planes, bytes]."""
    planes, size_bytes = field.planes.count, field.plane_bytes(places.numel())
    return scratch.take("cast", planes * size_bytes, slot.device).view(planes, size_bytes)


def by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[planes, bytes] as [planes, heads, bytes]."""
    size_bytes = rows.shape[1] // heads
    return rows.as_strided([rows.shape[0], heads, size_bytes], [rows.stride(0), size_bytes, 1])
