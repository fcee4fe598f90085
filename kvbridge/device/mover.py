"""Moves a chunk: engine memory -> slot and back, converting on the way.

Called on one thread; the copies release the GIL. Everything is checked before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.digest_ref import digest as digest
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.gather_ref import gather as gather_rows
from kvbridge_kernels.places import Places
from kvbridge_kernels.scatter_ref import scatter as scatter_rows
from kvbridge_proto.pool import Codec

from ..errors import EngineError
from ..geometry.check import places_of
from ..geometry.plan import Move
from ..geometry.wire import scales_of
from .batch import Batch, batches
from .memory import AttachedPool, Regions, check_plane


def gather(attached: AttachedPool, moves: Sequence[Move], slot: torch.Tensor) -> int:
    """Fill `slot` (uint8, exactly the chunk) from the engine's blocks and return its digest; gaps become zeros.

    EngineError when the engine is gone or a move is not right.
    """
    with attached.hold() as regions:
        places = _places(moves)
        _check(attached, moves, places, slot)
        for batch in batches(moves):
            field, rows = _field(attached, regions, batch), _rows(slot, batch)
            gather_rows(field, places[id(batch.moves[0].places)], rows, _conversion(batch), regions.scratch)
    _zero_gaps(moves, slot)
    return digest(slot)


def scatter(attached: AttachedPool, moves: Sequence[Move], slot: torch.Tensor) -> None:
    """Write the rows in `slot` to the engine's blocks; EngineError when the engine is gone or a move is not right."""
    with attached.hold() as regions:
        places = _places(moves)
        _check(attached, moves, places, slot)
        for batch in batches(moves):
            field, rows = _field(attached, regions, batch), _rows(slot, batch)
            scatter_rows(field, places[id(batch.moves[0].places)], rows, _conversion(batch), regions.scratch)


def _places(moves: Sequence[Move]) -> dict[int, Places]:
    """The places by the identity of their array: moves of one chunk mostly share it."""
    arrays = {id(move.places): move.places for move in moves}
    return {key: Places(torch.from_numpy(array)) for key, array in arrays.items()}


def _check(attached: AttachedPool, moves: Sequence[Move], places: Mapping[int, Places], slot: torch.Tensor) -> None:
    for move in moves:
        plane = move.plane
        check_plane(attached.pool, plane)
        if not 0 <= move.first_head < move.first_head + move.heads <= plane.heads:
            raise EngineError(
                "heads_outside_plane",
                f"heads: {move.heads} from {move.first_head} on, layer {plane.layer} {plane.part} has {plane.heads}",
            )
        end = move.slot_offset + move.size_bytes
        if move.slot_offset < 0 or end > slot.numel():
            raise EngineError("move_outside_slot", f"move: ends at byte {end}, the slot has {slot.numel()}")
        if not move.is_bitwise and not {plane.codec.name, move.wire.name} <= DTYPES.keys():
            raise EngineError("codec_not_convertible", f"codec: {plane.codec.name}, on the wire {move.wire.name}")
        wanted, count = places[id(move.places)], attached.pool.groups[plane.group].blocks * places_of(plane.token_axis)
        if wanted.lowest < 0 or wanted.highest >= count:
            raise EngineError(
                "place_outside_plane",
                f"places: from {wanted.lowest} to {wanted.highest}, layer {plane.layer} {plane.part} has {count}",
            )


def _field(attached: AttachedPool, regions: Regions, batch: Batch) -> Field:
    move = batch.moves[0]
    plane = move.plane
    return Field(
        memory=regions.memories[plane.region],
        offset=plane.offset + move.first_head * plane.head_stride,
        planes=Axis(len(batch.moves), batch.pitch),
        blocks=Axis(attached.pool.groups[plane.group].blocks, plane.block_stride),
        tokens=tuple(Axis(step.count, step.stride) for step in plane.token_axis),
        heads=Axis(move.heads, plane.head_stride),
        elements=tuple(Axis(step.count, step.stride) for step in plane.element_axis),
        element_bytes=plane.codec.element_bytes,
    )


def _rows(slot: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The batch's part of the slot, [planes, bytes]."""
    first = batch.moves[0]
    offset = slot.storage_offset() + first.slot_offset
    return slot.as_strided([len(batch.moves), first.size_bytes], [batch.slot_pitch, 1], offset)


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


def _zero_gaps(moves: Sequence[Move], slot: torch.Tensor) -> None:
    """Padding travels too; it must not carry what the slot held before."""
    end = 0
    for move in sorted(moves, key=lambda move: move.slot_offset):
        if move.slot_offset > end:
            slot[end : move.slot_offset].zero_()
        end = max(end, move.slot_offset + move.size_bytes)
    slot[end:].zero_()
