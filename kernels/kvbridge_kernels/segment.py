"""A chunk's segments: each is similar planes, moved between engine memory and one slot. Pure.

And lists of places, and how a CPU copies their rows: in whole blocks, the longest runs and the widest words.
A list is split into whole blocks and runs of tokens, which copy faster than single tokens. Every axis of such a piece
has a stride in memory and one in the slot. Axes that are dense at both ends fold into one longer run. What is left is a
pair of strided views, copied by one indexed copy. All of this is worked out once for all fields of one shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from operator import attrgetter

import numpy as np
import torch

from .codecs_ref import DTYPES, SCALE_FORMS, Cast, RowScale
from .field import Axis, Field
from .segment_layout import Offsets, place_offsets

# A kernel that computes a row's scale holds the whole row, so the row may have no more numbers than this.
MOST_NUMBERS = 1024
# complex128 is the widest element that torch copies. Nothing computes with these words.
WIDE_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Runs shorter than this are copied element by element, which is cheaper from a dense scratch than from memory.
SHORT_RUN = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows at `places` of a field's planes. In the slot each plane's rows lie densely as [head][place][row].

    The first plane begins at byte `slot_offset` of the slot, and the next `slot_pitch` bytes further. Without a cast
    the bytes are moved as they are. The scales of a cast are on the CPU, or in the field's memory. Places that are
    written must not repeat. Most segments of a chunk share `places`.
    """

    field: Field
    places: Places
    slot_offset: int
    slot_pitch: int
    cast: Cast | None = None

    @property
    def wire_row_bytes(self) -> int:
        row = self.field.row_bytes
        return row if self.cast is None else self.cast.wire_bytes(row)

    @property
    def plane_bytes(self) -> int:
        """How many bytes the rows of one plane take in the slot."""
        return self.field.heads.count * self.places.count * self.wire_row_bytes

    @property
    def slot_end(self) -> int:
        """One past the segment's last byte in the slot."""
        return self.slot_offset + (self.field.planes.count - 1) * self.slot_pitch + self.plane_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A slot by its address. It may be memory of a peer GPU, which torch must never see as a tensor."""

    address: int
    size_bytes: int

    def on_cpu(self) -> torch.Tensor:
        """The bytes as a tensor that does not own them. The caller keeps them alive."""
        if not self.size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_uint8 * self.size_bytes).from_address(self.address), dtype=torch.uint8)


def check(segment: Segment, slot: Span) -> None:
    """ValueError with both values if a segment does not fit its memory, its places or the slot."""
    field, places = segment.field, segment.places
    if field.offset < 0 or field.end > field.memory.numel():
        raise ValueError(f"field ends at byte {field.end}, its memory has {field.memory.numel()}")
    if places.highest >= field.places:
        raise ValueError(f"places reach {places.reach}, the field has {field.places}")
    if segment.slot_offset < 0 or segment.slot_pitch < 0 or segment.slot_end > slot.size_bytes:
        raise ValueError(f"segment ends at byte {segment.slot_end}, the slot has {slot.size_bytes}")
    if segment.cast is not None:
        check_cast(segment.cast, field)


def check_cast(cast: Cast, field: Field) -> None:
    """ValueError if a cast does not fit the field: its element size, the shape of its scales, its row scales."""
    size = DTYPES[cast.memory.name].itemsize
    if size != field.element_bytes:
        raise ValueError(f"{cast.memory.name} takes {size} bytes, the field's elements {field.element_bytes}")
    planes, heads = field.planes.count, field.heads.count
    if isinstance(cast.memory.scale, RowScale):
        _check_row_scale(cast.memory.name, cast.memory.scale, field)
    if isinstance(cast.wire.scale, RowScale):
        raise ValueError("row scales are for memory, the wire has none")
    numbers = field.row_bytes // size
    if cast.rotates and (numbers & (numbers - 1) or numbers > MOST_NUMBERS):
        raise ValueError(f"row: {numbers} numbers, rotated ones have a power of two, at most {MOST_NUMBERS}")
    for number in (cast.memory, cast.wire):
        scale = number.table
        if scale is not None and (
            scale.dtype != torch.float32
            or scale.dim() != 2
            or scale.shape[0] not in (1, planes)
            or scale.shape[1] not in (1, heads)
        ):
            raise ValueError(
                f"scales must be fp32 [{planes} or 1, {heads} or 1], got {scale.dtype} {list(scale.shape)}"
            )


def _check_row_scale(name: str, scale: RowScale, field: Field) -> None:
    if name not in ("fp8_e4m3", "int8"):
        raise ValueError(f"row scales are for fp8_e4m3 and int8, not for {name}")
    if scale.form not in SCALE_FORMS:
        raise ValueError(f"row scales are {', '.join(SCALE_FORMS)}, not {scale.form}")
    numbers = field.row_bytes // field.element_bytes
    if numbers > MOST_NUMBERS:
        raise ValueError(f"row: {numbers} numbers, with row scales at most {MOST_NUMBERS}")
    scales = scale.of(field)
    if scales.block_tokens != field.block_tokens:
        raise ValueError(f"row scales: {scales.block_tokens} in a block of {field.block_tokens} rows")
    if scales.offset < 0 or scales.end > field.memory.numel():
        raise ValueError(
            f"row scales from byte {scales.offset} to {scales.end}, their memory has {field.memory.numel()}"
        )
    strides = [axis.stride for axis in (scales.planes, scales.blocks, *scales.tokens, scales.heads) if axis.count > 1]
    if any(each % 4 for each in (field.memory.data_ptr() + scales.offset, *strides)):
        raise ValueError(f"row scales must be at multiples of 4 bytes: offset {scales.offset}, strides {strides}")


def gaps(segments: Sequence[Segment], size_bytes: int) -> list[tuple[int, int]]:
    """[start, end) of each part of a slot that no segment covers."""
    found, end = [], 0
    for start, stop in sorted(_extents(segments)):
        if start > end:
            found.append((end, start))
        end = max(end, stop)
    return [*found, (end, size_bytes)] if end < size_bytes else found


def _extents(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    extents = []
    for segment in segments:
        size = segment.plane_bytes
        starts = [segment.slot_offset + plane * segment.slot_pitch for plane in range(segment.field.planes.count)]
        extents += [(start, start + size) for start in starts if size]
    return extents


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
        # As unsigned numbers: one that is negative is huge then.
        self.highest = int(np.maximum.reduce(self.array.view(np.uint64))) if self.count else -1
        self.offsets: dict[tuple[int, tuple[Axis, ...]], Offsets] = {}  # by block stride and tokens, once listed
        self._routes: dict[object, Sequence[Route]] = {}

    def list_offsets(self, block_stride: int, tokens: tuple[Axis, ...]) -> None:
        """Work out the bytes from a field's offset to each place, and keep them."""
        found = self.offsets[block_stride, tokens] = np.empty(self.count, np.int64)
        place_offsets(self.array, block_stride, tokens, found)

    @property
    def reach(self) -> str:
        """The lowest and the highest, for an error."""
        return f"from {self.array.min()} to {self.array.max()}"

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
