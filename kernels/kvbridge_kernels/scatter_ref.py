"""Slot -> blocks on a CPU, in plain torch: the reference of the scatter kernel, and the one that runs without a GPU."""

from __future__ import annotations

import torch

from .codecs_ref import Cast, cast
from .field import Field
from .gather_ref import by_head, check, ends, rows_of, wants_scratch
from .layout import End, fold, through_scratch, views, walks
from .pieces import Piece, split
from .scratch import Scratch

# From here on numpy's assignment, a memcpy per run, beats torch's loop over words: 21 against 12 GB/s for 16 KiB at
# random places (one EPYC core of family 26, 2026-11); torch reads every line that it is about to write.
LONG_RUN = 2048


def scatter(
    field: Field,
    places: torch.Tensor,
    slot: torch.Tensor,
    conversion: Cast | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Write the rows in `slot`, laid out as gather left them, to `places`; nothing else of the field changes.

    ValueError before any byte is written when something does not fit. Places must not repeat.
    """
    check(field, places, slot, conversion)
    scratch = scratch or Scratch()
    rows = slot
    if conversion is not None:
        rows, heads = rows_of(field, places, slot, scratch), field.heads.count
        cast(by_head(slot, heads), by_head(rows, heads), conversion.wire, conversion.memory, scratch)
    for piece in split(field, places):
        _scatter_piece(field, piece, places.numel(), rows, scratch)


def _scatter_piece(field: Field, piece: Piece, places: int, slot: torch.Tensor, scratch: Scratch) -> None:
    axes = walks(field, piece, places, slot.stride(0))
    memory, rows = ends(field, piece, slot)
    if not wants_scratch(axes):
        target, source = views(memory, rows, fold(axes))
        _put(target, piece.index, source)
        return
    first, second, size = through_scratch(axes)
    between = scratch.take("order", size * piece.index.numel(), slot.device)
    dense = End(between, 0, piece.index.numel(), size)
    target, source = views(dense, rows, fold(second))
    target.copy_(source)
    target, source = views(memory, dense, fold(first))
    _put(target, piece.index, source)


def _put(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """target[index] = source, [index, axes..., words]."""
    if target.shape[-1] * target.element_size() >= LONG_RUN:
        target.numpy()[index.numpy()] = source.numpy()
    else:
        target.index_copy_(0, index, source)
