"""Slot -> blocks on a CPU, in plain torch: the reference for the scatter kernel, and what runs without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import segment as chunk
from .codecs_ref import Cast, RowScale, cast, cast_rows
from .digest_ref import sum64
from .field import Field
from .gather_ref import by_line, by_row, check, ends, row_scales, rows_in, rows_of
from .places import Places, Route
from .scratch import Scratch
from .segment import Segment, Span
from .tables import Work
from .walks import End, views

# For runs of at least this many bytes numpy's assignment, a memcpy per run, beats torch's loop over words: 21 against
# 12 GB/s for 16 KiB at random places (one EPYC core of family 26, 2026-11). torch reads every line before it writes it.
LONG_RUN = 2048


def scatter(segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work) -> None:
    """Write the rows in the slot to the places of all segments. Adds the slot's sum64 to `sums`, int64 [1].

    Raises ValueError, before any byte is written, if something does not fit.
    """
    for segment in segments:
        chunk.check(segment, slot)
    whole = slot.on_cpu()
    if sums is not None:
        sums.add_(sum64(segments, whole))
    for segment in segments:
        scatter_rows(segment.field, segment.places, rows_in(segment, whole), segment.cast, work.scratch)


def scatter_rows(
    field: Field,
    places: Places,
    slot: torch.Tensor,
    conversion: Cast | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Write the rows in `slot`, laid out as `gather_rows` does, to `places`. Nothing else in the field changes.

    Places must not repeat. Raises ValueError, before any byte is written, if something does not fit.
    """
    check(field, places, slot, conversion)
    if not places.count:
        return
    scratch = scratch or Scratch()
    rows = slot
    if conversion is not None:
        rows = rows_of(field, places, slot, scratch)
        lines, old, new = field.heads.count, conversion.wire, conversion.memory
        if isinstance(new.scale, RowScale):
            lines, scales = lines * places.count, row_scales(field, places, slot.device, scratch)
            old, rotates = by_row(old, places), conversion.rotates
            cast_rows(by_line(slot, lines), by_line(rows, lines), scales, old, new, scratch, rotates)
            scatter_rows(new.scale.of(field), places, scales.view(torch.uint8), None, scratch)
        elif conversion.rotates:
            lines, old, new = lines * places.count, by_row(old, places), by_row(new, places)
            cast(by_line(slot, lines), by_line(rows, lines), old, new, scratch, rotates=True)
        else:
            cast(by_line(slot, lines), by_line(rows, lines), old, new, scratch)
    for route in places.routes(field, rows.stride(0)):
        _scatter_route(field, route, rows, scratch)


def _scatter_route(field: Field, route: Route, slot: torch.Tensor, scratch: Scratch) -> None:
    memory, rows = ends(field, route, slot)
    index, detour = route.piece.index, route.detour
    if detour is None:
        target, source = views(memory, rows, route.direct)
        _put(target, index, source)
        return
    between = scratch.take("order", detour.size_bytes * index.numel(), slot.device)
    dense = End(between, 0, index.numel(), detour.size_bytes)
    target, source = views(dense, rows, detour.to_slot)
    target.copy_(source)
    target, source = views(memory, dense, detour.to_scratch)
    _put(target, index, source)


def _put(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """target[index] = source, both [index, axes..., words]."""
    if target.shape[-1] * target.element_size() >= LONG_RUN:
        target.numpy()[index.numpy()] = source.numpy()
    else:
        target.index_copy_(0, index, source)
