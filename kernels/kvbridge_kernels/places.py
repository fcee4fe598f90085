"""Lists of places, and how a CPU copies their rows: in whole blocks, the longest runs and the widest words.

A list is split into whole blocks and runs of tokens, which copy faster than single tokens. Every axis of such a piece
has a stride in memory and one in the slot. Axes that are dense at both ends fold into one longer run. What is left is a
pair of strided views, copied by one indexed copy. All of this is worked out once for all fields of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from operator import attrgetter

import numpy as np
import torch

from .field import Axis, Field
from .segment_layout import Offsets

# complex128 is the widest element that torch copies. Nothing computes with these words.
WIDE_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# Runs shorter than this are copied element by element, which is cheaper from a dense scratch than from memory.
SHORT_RUN = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Places from number `first` on: the `tokens` at each of `start + index * step` bytes from the field's offset."""

    first: int
    start: int
    index: torch.Tensor
    step: int
    tokens: tuple[Axis, ...]
    rows: int  # at each index: the product of the tokens' counts


@dataclass(frozen=True, slots=True)
class Walk:
    """An axis of `count` positions: `near` bytes apart at one end, `far` bytes apart at the other."""

    count: int
    near: int
    far: int


@dataclass(frozen=True, slots=True)
class Detour:
    """Two copies, memory to scratch and scratch to slot, for memory whose own order has longer runs."""

    to_scratch: Sequence[Walk]
    to_slot: Sequence[Walk]
    size_bytes: int  # of the scratch, per index position


@dataclass(frozen=True, slots=True)
class Route:
    """How one piece is copied. `reach`: index positions in memory; `pitch`: bytes from one to the next in the slot."""

    piece: Piece
    reach: int
    pitch: int
    direct: Sequence[Walk]
    detour: Detour | None


class Places:
    """int64 [n]: which places of a field, in slot order. ValueError for any other array or tensor."""

    def __init__(self, places: torch.Tensor | Offsets) -> None:
        self.array: Offsets = places if isinstance(places, np.ndarray) else places.numpy()
        if self.array.dtype != np.int64 or self.array.ndim != 1:
            raise ValueError(f"places must be int64 [n], got {places.dtype} {list(places.shape)}")
        self.count = len(self.array)
        self.lowest = int(np.minimum.reduce(self.array)) if self.count else 0
        self.highest = int(np.maximum.reduce(self.array)) if self.count else -1
        self._routes: dict[object, Sequence[Route]] = {}

    @cached_property
    def index(self) -> torch.Tensor:
        """The same as a tensor, for copies on a CPU."""
        return torch.from_numpy(self.array)

    def routes(self, field: Field, plane_pitch: int) -> Sequence[Route]:
        """The pieces that make up the places, each with how it is copied between `field` and a slot."""
        key = (field.shape, plane_pitch)
        if key not in self._routes:
            self._routes[key] = [self._route(field, piece, plane_pitch) for piece in split(field, self.index)]
        return self._routes[key]

    def _route(self, field: Field, piece: Piece, plane_pitch: int) -> Route:
        axes = walks(field, piece, self.count, plane_pitch)
        direct = fold(axes)
        detour = None
        if direct[-1].count < SHORT_RUN:
            to_scratch, to_slot, size_bytes = through_scratch(axes)
            if fold(to_scratch)[-1].count > direct[-1].count:
                detour = Detour(fold(to_scratch), fold(to_slot), size_bytes)
        pitch = piece.rows * field.row_bytes
        return Route(piece, int(piece.index.max()) + 1, pitch, direct, detour)


def split(field: Field, places: torch.Tensor) -> list[Piece]:
    """A run up to the first block border, the whole blocks, and a run after them: the usual places of a request.

    Places in any other order are copied one by one.
    """
    count, block_tokens = places.numel(), field.block_tokens
    if count == 0:
        return []
    if block_tokens == 1:
        return [Piece(0, 0, places, field.blocks.stride, (), 1)]
    first = int(places[0])
    if not _runs_through_blocks(places, first, block_tokens):
        return [_singly(field, places, 0)]
    lead = min(-first % block_tokens, count)
    whole = (count - lead) // block_tokens * block_tokens
    pieces = []
    if lead:
        pieces.append(_run(field, places[:lead], 0))
    if whole:
        blocks = places[lead : lead + whole : block_tokens] // block_tokens
        pieces.append(Piece(lead, 0, blocks, field.blocks.stride, field.tokens, block_tokens))
    if lead + whole < count:
        pieces.append(_run(field, places[lead + whole :], lead + whole))
    return pieces


def _runs_through_blocks(places: torch.Tensor, first: int, block_tokens: int) -> bool:
    """Whether the places are of consecutive tokens in some block table."""
    offsets = torch.arange(first % block_tokens, first % block_tokens + places.numel()) % block_tokens
    steps = (places[1:] - places[:-1] == 1) | (offsets[1:] == 0)
    return bool(steps.all()) and bool((places % block_tokens == offsets).all())


def _run(field: Field, places: torch.Tensor, first: int) -> Piece:
    """The piece for consecutive tokens inside one block."""
    if len(field.tokens) > 1:
        return _singly(field, places, first)
    (axis,) = field.tokens
    block, token = divmod(int(places[0]), axis.count)
    start = block * field.blocks.stride + token * axis.stride
    index = torch.zeros(1, dtype=torch.int64)
    return Piece(first, start, index, 0, (Axis(places.numel(), axis.stride),), places.numel())


def _singly(field: Field, places: torch.Tensor, first: int) -> Piece:
    offsets = places // field.block_tokens * field.blocks.stride
    token = places % field.block_tokens
    for axis in reversed(field.tokens):
        offsets += token % axis.count * axis.stride
        token = token // axis.count
    step = gcd(field.blocks.stride, *(axis.stride for axis in field.tokens)) or 1
    return Piece(first, 0, offsets // step, step, (), 1)


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


@dataclass(frozen=True, slots=True)
class End:
    """One end of a copy: `count` index positions, `stride` bytes apart, from byte `offset` of a tensor."""

    memory: torch.Tensor
    offset: int
    count: int
    stride: int


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
    words = end.memory[: end.memory.numel() // word * word].view(WIDE_WORDS[word])
    start = words.storage_offset() + end.offset // word
    return words.as_strided([end.count, *counts], [end.stride // word, *steps, 1], start)
