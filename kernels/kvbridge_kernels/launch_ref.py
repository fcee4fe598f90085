"""Moves rows on a CPU, in plain torch: the reference for the kernel, and what runs without a GPU.

Without a slot, a tile of rows at a time is read, summed and written, while it is in a cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .codecs_ref import Cast, Number, RowScale, cast, cast_rows, read_scales
from .digest_ref import as_int64, sum64, sum_of, word_bytes
from .field import Field, Scratch
from .prepared import Pair, Placed, planes_of
from .segment import End, Places, Route, Segment, Span, flat, views
from .segment_layout import Offsets
from .tables import Work

# Bytes of a tile on the wire. With half as much, the calls made 64 MiB take 1.4 times as long (2 cores, AMD EPYC,
# 2026-11).
TILE_BYTES = 1 << 20
# For runs of at least this many bytes numpy's assignment, a memcpy per run, beats torch's loop over words: 21 against
# 12 GB/s for 16 KiB at random places (one EPYC core of family 26, 2026-11). torch reads every line before it writes it.
LONG_RUN = 2048
# Between a slot and memory, runs of at least this many bytes are copied by a memmove each, as are whole blocks of equal
# pools: by indexed copies a gather or a scatter of 4 MiB took 1.5 times as long (2-core Xeon, 2026-11).
MEMMOVE_RUN = 8192


class Runs(NamedTuple):
    """Runs of `size_bytes` that are moved as they are: int64 [n], where each begins in memory and in the slot."""

    memory: Offsets
    slot: Offsets
    size_bytes: int


class Cut(NamedTuple):
    """Consecutive places of a pair, from number `first` on."""

    first: int
    source: Places | None
    target: Places | None


def move(placed: Placed, work: Work, slot: Span | None = None, sums: torch.Tensor | None = None) -> None:
    """Write the target's rows from the source's. Adds the sum64 of the chunk's slot to `sums`, int64 [1].

    As `move` of launch.py, but with all memory on the CPU.
    """
    placed.check(slot, sums is not None)
    if slot is not None and (runs := _long_runs(placed, slot)) is not None:
        _move_runs(runs, is_gather=placed.prepared.ends[1] is None)
        _clear_gaps(placed, slot.on_cpu())
        if sums is not None:
            sums.add_(sum64(placed.segments, slot.on_cpu()))
        return
    whole = None if slot is None else slot.on_cpu()
    total = 0
    known: dict[object, list[Cut]] = {}
    for pair in placed.pairs():
        segment = pair.in_memory
        if not segment.plane_bytes:
            continue
        planes, most = _tile_of(segment) if whole is None else (segment.field.planes.count, segment.places.count)
        key = *((id(end.places), end.field.block_tokens) for end in pair if end is not None), most
        if key not in known:
            known[key] = list(_cuts(pair, most))
        for first in range(0, segment.field.planes.count, planes):
            count = min(planes, segment.field.planes.count - first)
            some = Pair(*(end and planes_of(end, first, count) for end in pair))
            total += sum(_move_tile(some, cut, whole, sums is not None, work.scratch) for cut in known[key])
    if whole is not None:
        _clear_gaps(placed, whole)
    if sums is not None:
        sums.add_(as_int64(total))


def _clear_gaps(placed: Placed, slot: torch.Tensor) -> None:
    """Zero what no row covers, if the slot is the target."""
    if placed.prepared.ends[1] is None:
        for start, end in placed.prepared.gaps.reshape(-1, 2).tolist():
            slot[start:end].zero_()


def _long_runs(placed: Placed, slot: Span) -> list[Runs] | None:
    """The addresses of all rows, None unless all of them lie in long runs and are moved as they are."""
    found: list[Runs] = []
    known: dict[object, list[Runs] | None] = {}
    for segment, places in placed.in_memory():
        field = segment.field
        assert isinstance(field.memory, torch.Tensor)
        key = id(places), field.shape, segment.slot_pitch, segment.cast is None
        if key not in known:
            known[key] = (
                None if segment.cast is not None else _runs(places.routes(field, segment.slot_pitch), field.row_bytes)
            )
        if (runs := known[key]) is None:
            return None
        memory, start = field.memory.data_ptr() + field.offset, slot.address + segment.slot_offset
        found += [Runs(memory + each.memory, start + each.slot, each.size_bytes) for each in runs]
    return found


def _runs(routes: Sequence[Route], row_bytes: int) -> list[Runs] | None:
    """Where the runs of these routes begin, from the start of the field and of its rows in the slot."""
    if any(route.direct[-1].count < MEMMOVE_RUN for route in routes):
        return None
    found = []
    for route in routes:
        index, (*outer, run) = route.piece.index.numpy(), route.direct
        memory = route.piece.start + index * route.piece.step
        slot = route.piece.first * row_bytes + np.arange(len(index)) * route.pitch
        for axis in outer:
            steps = np.arange(axis.count)
            memory = np.add.outer(memory, steps * axis.near).ravel()
            slot = np.add.outer(slot, steps * axis.far).ravel()
        found.append(Runs(memory, slot, run.count))
    return found


def _move_runs(runs: Sequence[Runs], is_gather: bool) -> None:
    for each in runs:
        sources, targets = (each.memory, each.slot) if is_gather else (each.slot, each.memory)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, each.size_bytes)


def _tile_of(segment: Segment) -> tuple[int, int]:
    """How many planes and how many places one tile has."""
    if segment.plane_bytes <= TILE_BYTES:
        return TILE_BYTES // segment.plane_bytes, segment.places.count
    return 1, max(1, TILE_BYTES * segment.places.count // segment.plane_bytes)


def _cuts(pair: Pair, most: int) -> Iterator[Cut]:
    """The places in parts of about `most`, each from the start of a block, at the end with longer blocks."""
    longer = max((end for end in pair if end is not None), key=lambda end: end.field.block_tokens)
    count, block = longer.places.count, longer.field.block_tokens
    if count <= most:
        yield Cut(0, *(None if end is None else end.places for end in pair))
        return
    first, step = 0, max(block, most // block * block)
    stop = step - int(longer.places.index[0]) % block
    while first < count:
        stop = min(stop, count)
        yield Cut(first, *(None if end is None else Places(end.places.index[first:stop]) for end in pair))
        first, stop = stop, stop + step


def _move_tile(pair: Pair, cut: Cut, slot: torch.Tensor | None, has_sums: bool, scratch: Scratch) -> int:
    """Move one tile. Returns the sum over its rows if `has_sums`, else 0."""
    segment = pair.in_memory
    places = cut.source or cut.target
    assert places is not None
    planes, heads, row = segment.field.planes.count, segment.field.heads.count, segment.wire_row_bytes
    head_bytes = places.count * row
    if slot is not None:
        rows = slot.as_strided([planes, heads * head_bytes], [segment.slot_pitch, 1], segment.slot_offset)
    else:
        rows = scratch.take("tile", planes * heads * head_bytes, torch.device("cpu")).view(planes, -1)
    if pair.source is not None and cut.source is not None:
        gather_rows(pair.source.field, cut.source, rows, pair.source.cast, scratch)
    total = 0
    for line in range(planes * heads if has_sums else 0):
        plane, head = divmod(line, heads)
        start = segment.slot_offset + plane * segment.slot_pitch + (head * segment.places.count + cut.first) * row
        total += sum_of(rows[plane, head * head_bytes : (head + 1) * head_bytes], start, word_bytes(row))
    if pair.target is not None and cut.target is not None:
        scatter_rows(pair.target.field, cut.target, rows, pair.target.cast, scratch)
    return total


def gather_rows(field: Field, places: Places, slot: torch.Tensor, conversion: Cast | None, scratch: Scratch) -> None:
    """Fill `slot`, uint8 [planes, bytes], with the rows at `places`, each plane's densely as [head][place][row].

    Without a conversion the bytes are moved as they are. Reads nothing outside the field.
    """
    rows = slot if conversion is None else _rows_of(field, places, slot, scratch)
    for route in places.routes(field, rows.stride(0)):
        _carry(field, route, rows, scratch, is_read=True)
    if conversion is not None:
        lines, old, new = field.heads.count, conversion.memory, conversion.wire
        if isinstance(old.scale, RowScale):
            lines, scales = lines * places.count, _row_scales(field, places, slot.device, scratch)
            gather_rows(old.scale.of(field), places, scales.view(torch.uint8), None, scratch)
            old, new = Number(old.name, read_scales(scales, old.scale.form)), _by_row(new, places)
        cast(_by_line(rows, lines), _by_line(slot, lines), old, new, scratch)


def scatter_rows(field: Field, places: Places, slot: torch.Tensor, conversion: Cast | None, scratch: Scratch) -> None:
    """Write the rows in `slot`, laid out as `gather_rows` does, to `places`. Nothing else in the field changes."""
    rows = slot
    if conversion is not None:
        rows = _rows_of(field, places, slot, scratch)
        lines, old, new = field.heads.count, conversion.wire, conversion.memory
        if isinstance(new.scale, RowScale):
            lines, scales = lines * places.count, _row_scales(field, places, slot.device, scratch)
            old, rotates = _by_row(old, places), conversion.rotates
            cast_rows(_by_line(slot, lines), _by_line(rows, lines), scales, old, new, scratch, rotates)
            scatter_rows(new.scale.of(field), places, scales.view(torch.uint8), None, scratch)
        elif conversion.rotates:
            lines, old, new = lines * places.count, _by_row(old, places), _by_row(new, places)
            cast(_by_line(slot, lines), _by_line(rows, lines), old, new, scratch, rotates=True)
        else:
            cast(_by_line(slot, lines), _by_line(rows, lines), old, new, scratch)
    for route in places.routes(field, rows.stride(0)):
        _carry(field, route, rows, scratch, is_read=False)


def _carry(field: Field, route: Route, slot: torch.Tensor, scratch: Scratch, is_read: bool) -> None:
    """Copy the rows of a route from memory to the slot, or from the slot to memory."""
    piece, detour = route.piece, route.detour
    index = piece.index
    assert isinstance(field.memory, torch.Tensor)
    memory = End(field.memory, field.offset + piece.start, route.reach, piece.step)
    rows = End(flat(slot), piece.first * field.row_bytes, index.numel(), route.pitch)
    if detour is None:
        near, far = views(memory, rows, route.direct)
    else:
        between = scratch.take("order", detour.size_bytes * index.numel(), slot.device)
        dense = End(between, 0, index.numel(), detour.size_bytes)
        near, far = views(memory, dense, detour.to_scratch)
        ordered, there = views(dense, rows, detour.to_slot)
        if not is_read:
            ordered.copy_(there)
    if is_read:
        torch.index_select(near, 0, index, out=far)
        if detour is not None:
            there.copy_(ordered)
    elif near.shape[-1] * near.element_size() >= LONG_RUN:
        near.numpy()[index.numpy()] = far.numpy()
    else:
        near.index_copy_(0, index, far)


def _rows_of(field: Field, places: Places, slot: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Scratch for the rows in the memory's codec: uint8 [planes, bytes]."""
    planes, size_bytes = field.planes.count, field.plane_bytes(places.count)
    return scratch.take("cast", planes * size_bytes, slot.device).view(planes, size_bytes)


def _row_scales(field: Field, places: Places, device: torch.device, scratch: Scratch) -> torch.Tensor:
    """Scratch for a scale per row: int32 [planes, heads * places], in the order of the rows in a slot."""
    planes, rows = field.planes.count, field.heads.count * places.count
    return scratch.take("row_scales", 4 * planes * rows, device).view(torch.int32).view(planes, rows)


def _by_row(number: Number, places: Places) -> Number:
    """The same number for rows as [planes, heads * places, bytes]: scales per head become scales per row."""
    scale = number.table
    if scale is None or scale.shape[1] == 1:
        return number
    return Number(number.name, scale.repeat_interleave(places.count, 1))


def _by_line(rows: torch.Tensor, lines: int) -> torch.Tensor:
    """[planes, bytes] as [planes, lines, bytes]. A line is a head, or one row of it."""
    size_bytes = rows.shape[1] // lines
    return rows.as_strided([rows.shape[0], lines, size_bytes], [rows.stride(0), size_bytes, 1])
