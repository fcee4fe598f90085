"""Blocks -> slot on a CPU, in plain torch: the reference for the gather kernel, and what runs without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import segment as chunk
from .codecs_ref import Cast, Number, RowScale, cast, read_scales
from .digest_ref import as_int64, sum64, sum_of, word_bytes
from .field import Field
from .places import Places, Route
from .scratch import Scratch
from .segment import Segment, Span, gaps
from .tables import Work
from .walks import End, flat, views


def gather(segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work) -> None:
    """Fill the slot with the rows of all segments, and its gaps with zeros. Adds the sum64 to `sums`, int64 [1].

    Raises ValueError, before any byte is written, if something does not fit.
    """
    for segment in segments:
        chunk.check(segment, slot)
    whole = slot.on_cpu()
    for segment in segments:
        gather_rows(segment.field, segment.places, rows_in(segment, whole), segment.cast, work.scratch)
    for start, end in gaps(segments, slot.size_bytes):
        whole[start:end].zero_()
    if sums is not None:
        sums.add_(sum64(segments, whole))


def digest(segments: Sequence[Segment], slot_bytes: int, sums: torch.Tensor, work: Work) -> None:
    """Add to `sums` the sum64 that `gather` would, for a slot of `slot_bytes`. Raises as `gather`.

    `work.scratch` holds the rows of one segment at a time.
    """
    for segment in segments:
        chunk.check(segment, Span(0, slot_bytes))
    total = 0
    for segment in segments:
        planes, size, word = segment.field.planes.count, segment.plane_bytes, word_bytes(segment.wire_row_bytes)
        rows = work.scratch.take("digest", planes * size, torch.device("cpu")).view(planes, size)
        gather_rows(segment.field, segment.places, rows, segment.cast, work.scratch)
        for plane in range(planes):
            total += sum_of(rows[plane], segment.slot_offset + plane * segment.slot_pitch, word)
    sums.add_(as_int64(total))


def rows_in(segment: Segment, slot: torch.Tensor) -> torch.Tensor:
    """The segment's part of a slot, [planes, bytes]."""
    shape = [segment.field.planes.count, segment.plane_bytes]
    return slot.as_strided(shape, [segment.slot_pitch, 1], segment.slot_offset)


def gather_rows(
    field: Field,
    places: Places,
    slot: torch.Tensor,
    conversion: Cast | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Fill `slot`, uint8 [planes, bytes], with the rows at `places`, each plane's densely as [head][place][row].

    Without a conversion the bytes are moved as they are. Raises ValueError, before any byte is written, if something
    does not fit. Reads nothing outside the field.
    """
    check(field, places, slot, conversion)
    if not places.count:
        return
    scratch = scratch or Scratch()
    rows = slot
    if conversion is not None:
        rows = rows_of(field, places, slot, scratch)
    for route in places.routes(field, rows.stride(0)):
        _gather_route(field, route, rows, scratch)
    if conversion is not None:
        lines, old, new = field.heads.count, conversion.memory, conversion.wire
        if isinstance(old.scale, RowScale):
            lines, scales = lines * places.count, row_scales(field, places, slot.device, scratch)
            gather_rows(old.scale.of(field), places, scales.view(torch.uint8), None, scratch)
            old, new = Number(old.name, read_scales(scales, old.scale.form)), by_row(new, places)
        cast(by_line(rows, lines), by_line(slot, lines), old, new, scratch)


def _gather_route(field: Field, route: Route, slot: torch.Tensor, scratch: Scratch) -> None:
    memory, rows = ends(field, route, slot)
    index, detour = route.piece.index, route.detour
    if detour is None:
        source, target = views(memory, rows, route.direct)
        torch.index_select(source, 0, index, out=target)
        return
    between = scratch.take("order", detour.size_bytes * index.numel(), slot.device)
    dense = End(between, 0, index.numel(), detour.size_bytes)
    source, target = views(memory, dense, detour.to_scratch)
    torch.index_select(source, 0, index, out=target)
    source, target = views(dense, rows, detour.to_slot)
    target.copy_(source)


def ends(field: Field, route: Route, slot: torch.Tensor) -> tuple[End, End]:
    """Memory and slot as the two ends of a route."""
    piece = route.piece
    assert isinstance(field.memory, torch.Tensor)
    memory = End(field.memory, field.offset + piece.start, route.reach, piece.step)
    return memory, End(flat(slot), piece.first * field.row_bytes, piece.index.numel(), route.pitch)


def check(field: Field, places: Places, slot: torch.Tensor, conversion: Cast | None) -> None:
    """ValueError with both values if field, places and slot do not fit each other."""
    if field.offset < 0 or field.end > field.memory.numel():
        raise ValueError(f"field ends at byte {field.end}, its memory has {field.memory.numel()}")
    if places.lowest < 0 or places.highest >= field.places:
        raise ValueError(f"places reach from {places.lowest} to {places.highest}, the field has {field.places}")
    if conversion is not None:
        chunk.check_cast(conversion, field)
    size_bytes = field.plane_bytes(places.count)
    shape = [field.planes.count, conversion.wire_bytes(size_bytes) if conversion else size_bytes]
    if slot.dtype != torch.uint8 or list(slot.shape) != shape or slot.stride(1) != 1:
        raise ValueError(f"slot must be uint8 {shape} of dense rows, got {slot.dtype} {list(slot.shape)}")


def rows_of(field: Field, places: Places, slot: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Scratch for the rows in the memory's codec: uint8 [planes, bytes]."""
    planes, size_bytes = field.planes.count, field.plane_bytes(places.count)
    return scratch.take("cast", planes * size_bytes, slot.device).view(planes, size_bytes)


def row_scales(field: Field, places: Places, device: torch.device, scratch: Scratch) -> torch.Tensor:
    """Scratch for a scale per row: int32 [planes, heads * places], in the order of the rows in a slot."""
    planes, rows = field.planes.count, field.heads.count * places.count
    return scratch.take("row_scales", 4 * planes * rows, device).view(torch.int32).view(planes, rows)


def by_row(number: Number, places: Places) -> Number:
    """The same number for rows as [planes, heads * places, bytes]: scales per head become scales per row."""
    scale = number.table
    return (
        number
        if scale is None or scale.shape[1] == 1
        else Number(number.name, scale.repeat_interleave(places.count, 1))
    )


def by_line(rows: torch.Tensor, lines: int) -> torch.Tensor:
    """[planes, bytes] as [planes, lines, bytes]. A line is a head, or one row of it."""
    size_bytes = rows.shape[1] // lines
    return rows.as_strided([rows.shape[0], lines, size_bytes], [rows.stride(0), size_bytes, 1])
