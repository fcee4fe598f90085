"""Finds the longest runs and the widest words in which a CPU can copy a piece of a move. Pure.

Every axis has a stride at the near end and one at the far end. Axes that are dense at both ends fold into one longer
run. The result is a pair of strided views, copied by one indexed copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from operator import attrgetter

import torch

from .field import Field
from .pieces import Piece

# complex128 is the widest element that torch copies. Nothing computes with these words.
WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Walk:
    """An axis of `count` positions: `near` bytes apart at one end, `far` bytes apart at the other."""

    count: int
    near: int
    far: int


@dataclass(frozen=True, slots=True)
class End:
    """One end of a copy: `count` index positions, `stride` bytes apart, from byte `offset` of a tensor."""

    memory: torch.Tensor
    offset: int
    count: int
    stride: int


def walks(field: Field, piece: Piece, places: int, plane_pitch: int) -> list[Walk]:
    """The axes of a piece inside its index, from the outermost in memory. Memory is near, the slot is far."""
    row = field.row_bytes
    found = [
        Walk(field.planes.count, field.planes.stride, plane_pitch),
        Walk(field.heads.count, field.heads.stride, places * row),
        Walk(field.element_bytes, 1, 1),
    ]
    far = field.element_bytes
    for axis in (*reversed(field.elements), *reversed(piece.tokens)):
        found.append(Walk(axis.count, axis.stride, far))
        far *= axis.count
    found = [walk for walk in found if walk.count > 1]
    found.sort(key=attrgetter("near"), reverse=True)
    return found


def fold(axes: Sequence[Walk]) -> list[Walk]:
    """The same bytes with as few axes as possible. The last one counts bytes, dense at both ends."""
    kept = [Walk(1, 1, 1)]
    for axis in reversed(axes):
        inner = kept[-1]
        if (axis.near, axis.far) == (inner.count * inner.near, inner.count * inner.far):
            kept[-1] = Walk(axis.count * inner.count, inner.near, inner.far)
        else:
            kept.append(axis)
    return kept[::-1]


def through_scratch(axes: Sequence[Walk]) -> tuple[list[Walk], list[Walk], int]:
    """The axes of two copies, memory to scratch and scratch to slot, and the scratch's bytes.

    The scratch is dense, in memory's order.
    """
    first, second, size = [], [], 1
    for axis in reversed(axes):
        first.append(Walk(axis.count, axis.near, size))
        second.append(Walk(axis.count, size, axis.far))
        size *= axis.count
    return first[::-1], second[::-1], size


def views(near: End, far: End, axes: Sequence[Walk]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends as [index, axes..., words], in the widest word that divides every stride and address."""
    *outer, run = axes
    word = gcd(16, run.count)
    for end in (near, far):
        word = gcd(word, end.offset, end.stride, end.memory.data_ptr())
    for axis in outer:
        word = gcd(word, axis.near, axis.far)
    counts, near_steps, far_steps = [], [], []
    for axis in outer:
        counts.append(axis.count)
        near_steps.append(axis.near // word)
        far_steps.append(axis.far // word)
    counts.append(run.count // word)
    return _strided(near, word, counts, near_steps), _strided(far, word, counts, far_steps)


def flat(slot: torch.Tensor) -> torch.Tensor:
    """The bytes of a [planes, bytes] slot as one axis, gaps included."""
    if not slot.numel():
        return slot.new_empty(0)
    return slot.as_strided([(slot.shape[0] - 1) * slot.stride(0) + slot.shape[1]], [1])


def _strided(end: End, word: int, counts: list[int], steps: list[int]) -> torch.Tensor:
    words = end.memory[: end.memory.numel() // word * word].view(WORDS[word])
    start = words.storage_offset() + end.offset // word
    return words.as_strided([end.count, *counts], [end.stride // word, *steps, 1], start)
