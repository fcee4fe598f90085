"""A chunk's segments: each is similar planes, moved between engine memory and one slot. Pure."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .codecs_ref import DTYPES, SCALE_FORMS, Cast, RowScale
from .field import Field
from .places import Places

# A kernel that computes a row's scale holds the whole row, so the row may have no more numbers than this.
MOST_NUMBERS = 1024


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
    if places.count and (places.lowest < 0 or places.highest >= field.places):
        raise ValueError(f"places reach from {places.lowest} to {places.highest}, the field has {field.places}")
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
