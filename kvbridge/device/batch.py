"""Groups the similar moves of a chunk, so that each group takes one call. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..geometry.plan import Move


@dataclass(frozen=True, slots=True)
class Batch:
    """Moves that differ only in where they begin: `pitch` bytes apart in memory, `slot_pitch` in the slot.

    Most of a model's layers do. As one batch they cost one call.
    """

    moves: tuple[Move, ...]
    pitch: int
    slot_pitch: int


def batches(moves: Sequence[Move]) -> Iterator[Batch]:
    """The moves in groups that differ only in offsets, cut where the distance between moves changes."""
    alike: dict[object, list[Move]] = {}
    for move in moves:
        if len(move.places):
            alike.setdefault(_form(move), []).append(move)
    for group in alike.values():
        start = 0
        while start < len(group):
            end, pitch, slot_pitch = start + 1, 0, 0
            while end < len(group):
                step, slot_step = _distance(group[end - 1], group[end])
                if end == start + 1:
                    pitch, slot_pitch = step, slot_step
                if (step, slot_step) != (pitch, slot_pitch) or step <= 0 or slot_step <= 0:
                    break
                end += 1
            yield Batch(tuple(group[start:end]), pitch, slot_pitch)
            start = end


def _form(move: Move) -> object:
    """What the moves of a batch have in common."""
    plane = move.plane
    strides = (plane.block_stride, plane.token_axis, plane.head_stride, plane.element_axis)
    codecs = [
        (codec.name, codec.element_bytes, codec.row_bytes, len(codec.scales)) for codec in (plane.codec, move.wire)
    ]
    scale = None
    if (own := move.scale) is not None:
        scale = own.offset - plane.offset, own.head_stride, own.block_stride, own.token_axis, own.codec.name
    where = (plane.region, plane.group, move.first_head, move.heads, move.unit_tokens)
    return (*where, *strides, *codecs, scale, move.rotates, move.is_bitwise)


def _distance(one: Move, other: Move) -> tuple[int, int]:
    return other.plane.offset - one.plane.offset, other.slot_offset - one.slot_offset
