"""Turns the moves of a chunk into what the kernels work on, everything checked before the first byte is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.places import Places
from kvbridge_kernels.segment import Segment
from kvbridge_proto.pool import Codec

from ..errors import EngineError
from ..geometry.check import places_of
from ..geometry.plan import Move
from ..geometry.wire import scales_of
from .batch import Batch, batches
from .memory import AttachedPool, Regions, check_plane


def segments_of(attached: AttachedPool, regions: Regions, moves: Sequence[Move], slot_bytes: int) -> list[Segment]:
    """The moves as segments of a slot of `slot_bytes`. EngineError when one of them is not right."""
    places = _places(moves)
    _check(attached, moves, places, slot_bytes)
    return [_segment(attached, regions, batch, places) for batch in batches(moves)]


def _places(moves: Sequence[Move]) -> dict[int, Places]:
    """The places by the identity of their array: moves of one chunk mostly share it."""
    arrays = {id(move.places): move.places for move in moves}
    return {key: Places(torch.from_numpy(array)) for key, array in arrays.items()}


def _check(attached: AttachedPool, moves: Sequence[Move], places: Mapping[int, Places], slot_bytes: int) -> None:
    for move in moves:
        plane = move.plane
        check_plane(attached.pool, plane)
        if not 0 <= move.first_head < move.first_head + move.heads <= plane.heads:
            raise EngineError(
                "heads_outside_plane",
                f"heads: {move.heads} from {move.first_head} on, layer {plane.layer} {plane.part} has {plane.heads}",
            )
        end = move.slot_offset + move.size_bytes
        if move.slot_offset < 0 or end > slot_bytes:
            raise EngineError("move_outside_slot", f"move: ends at byte {end}, the slot has {slot_bytes}")
        if not move.is_bitwise and not {plane.codec.name, move.wire.name} <= DTYPES.keys():
            raise EngineError("codec_not_convertible", f"codec: {plane.codec.name}, on the wire {move.wire.name}")
        wanted, count = places[id(move.places)], attached.pool.groups[plane.group].blocks * places_of(plane.token_axis)
        if wanted.lowest < 0 or wanted.highest >= count:
            raise EngineError(
                "place_outside_plane",
                f"places: from {wanted.lowest} to {wanted.highest}, layer {plane.layer} {plane.part} has {count}",
            )


def _segment(attached: AttachedPool, regions: Regions, batch: Batch, places: Mapping[int, Places]) -> Segment:
    move = batch.moves[0]
    plane = move.plane
    field = Field(
        memory=regions.memories[plane.region],
        offset=plane.offset + move.first_head * plane.head_stride,
        planes=Axis(len(batch.moves), batch.pitch),
        blocks=Axis(attached.pool.groups[plane.group].blocks, plane.block_stride),
        tokens=tuple(Axis(step.count, step.stride) for step in plane.token_axis),
        heads=Axis(move.heads, plane.head_stride),
        elements=tuple(Axis(step.count, step.stride) for step in plane.element_axis),
        element_bytes=plane.codec.element_bytes,
    )
    return Segment(field, places[id(move.places)], move.slot_offset, batch.slot_pitch, _conversion(batch))


def _conversion(batch: Batch) -> Cast | None:
    first = batch.moves[0]
    if first.is_bitwise:
        return None
    memory = [scales_of(move.plane.codec, move.first_head, move.heads) for move in batch.moves]
    wire = [move.wire.scales for move in batch.moves]
    return Cast(_number(first.plane.codec, memory), _number(first.wire, wire))


def _number(codec: Codec, scales: Sequence[tuple[float, ...]]) -> Number:
    """The codec with the scales of all planes: none if they are all 1, one where they are all equal."""
    distinct = {scale for each in scales for scale in each}
    if distinct <= {1.0}:
        return Number(codec.name)
    if len(distinct) == 1:
        scales = [(distinct.pop(),)]
    return Number(codec.name, torch.tensor(scales, dtype=torch.float32))
