"""Turns a part of a plan into segments for the kernels, all checked before the first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number, RowScale
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.places import Places
from kvbridge_kernels.prepared_copy import PreparedCopy
from kvbridge_kernels.segment import Segment
from kvbridge_proto.pool import Codec, Plane, Pool

from ..errors import EngineError
from ..geometry.check import places_of
from ..geometry.plan import Move, Part
from ..geometry.wire import ROW_SCALED, ROW_SCALES, base_name, scales_of
from .batch import Batch, batches
from .memory import AttachedPool, Regions, check_plane


@dataclass(frozen=True, slots=True)
class _SegmentTemplate:
    """A segment without its places, which count units of `unit_tokens` in a group and are below `limit`."""

    field: Field
    slot_offset: int
    slot_pitch: int
    cast: Cast | None
    group: int
    unit_tokens: int
    limit: int

    def fill(self, places: Places) -> Segment:
        return Segment(self.field, places, self.slot_offset, self.slot_pitch, self.cast)

    def check(self, places: Places) -> None:
        if places.lowest < 0 or places.highest >= self.limit:
            raise EngineError(
                "place_outside_plane",
                f"places: from {places.lowest} to {places.highest}, a plane of group {self.group} has {self.limit}",
            )


class CopyTemplate:
    """What similar parts have in common: their segments, without the places. Compared by identity."""

    def __init__(self, attached: AttachedPool, pairs: object, segment_templates: Sequence[_SegmentTemplate]) -> None:
        self.attached = attached
        self.pairs = pairs
        self.prepared: PreparedCopy | None = None  # set by a copier that uses one
        self._segment_templates = segment_templates
        first: dict[tuple[int, int], _SegmentTemplate] = {}
        for segment_template in segment_templates:
            first.setdefault((segment_template.group, segment_template.unit_tokens), segment_template)
        self._first = list(first.values())

    def places(self, part: Part) -> list[Places]:
        """Where the part's rows are: each list once, in the order of the segments. EngineError if a row is outside."""
        found: list[Places] = []
        for segment_template in self._first:
            places = Places(part.places(segment_template.group, segment_template.unit_tokens))
            segment_template.check(places)
            found.append(places)
        return found

    def segments(self, places: Sequence[Places]) -> list[Segment]:
        """The segments with these places, as returned by `places`."""
        of = {
            (segment_template.group, segment_template.unit_tokens): each
            for segment_template, each in zip(self._first, places, strict=True)
        }
        return [
            segment_template.fill(of[segment_template.group, segment_template.unit_tokens])
            for segment_template in self._segment_templates
        ]


class CopyTemplates:
    """The copy templates of one copier, kept since most parts resemble an earlier one."""

    KEPT = 256

    def __init__(self) -> None:
        self._kept: dict[object, CopyTemplate] = {}

    def of(self, attached: AttachedPool, regions: Regions, part: Part, slot_bytes: int) -> CopyTemplate:
        """The template of a part in a slot of `slot_bytes`. EngineError if something in it is invalid."""
        key, pairs = (part.template_key, slot_bytes), part.plan.pairs
        template = self._kept.pop(key, None)
        if template is None or template.attached is not attached or template.pairs is not pairs:
            template = CopyTemplate(attached, pairs, _segment_templates(attached, regions, part.moves(), slot_bytes))
            if len(self._kept) == self.KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = template  # the newest last
        return template

    def forget(self, attached: AttachedPool) -> None:
        """Keep nothing of this pool."""
        self._kept = {key: template for key, template in self._kept.items() if template.attached is not attached}


def _segment_templates(
    attached: AttachedPool, regions: Regions, moves: Sequence[Move], slot_bytes: int
) -> list[_SegmentTemplate]:
    for move in moves:
        _check(attached.pool, move, slot_bytes)
    return [_segment_template(attached, regions, batch) for batch in batches(moves)]


def _check(pool: Pool, move: Move, slot_bytes: int) -> None:
    plane = move.plane
    check_plane(pool, plane)
    if not 0 <= move.first_head < move.first_head + move.heads <= plane.heads:
        raise EngineError(
            "heads_outside_plane",
            f"heads: {move.heads} from {move.first_head} on, layer {plane.layer} {plane.part} has {plane.heads}",
        )
    end = move.slot_offset + move.size_bytes
    if move.slot_offset < 0 or end > slot_bytes:
        raise EngineError("move_outside_slot", f"move: ends at byte {end}, the slot has {slot_bytes}")
    if move.scale is not None:
        _check_scale(pool, plane, move.scale)
    elif move.is_bitwise:
        return
    name = plane.codec.name if move.scale is None else base_name(plane.codec)
    if not {name, move.wire.name} <= DTYPES.keys():
        raise EngineError("codec_not_convertible", f"codec: {plane.codec.name}, on the wire {move.wire.name}")


def _check_scale(pool: Pool, plane: Plane, scale: Plane) -> None:
    """A row and its scale must lie in one region and group, and the row's codec must have row scales."""
    check_plane(pool, scale)
    ours, theirs = ((each.region, each.group, places_of(each.token_axis)) for each in (plane, scale))
    is_one = scale.codec.name == plane.codec.scale_codec and scale.codec.width == 1 and ours == theirs
    if plane.codec.name not in ROW_SCALED or scale.codec.name not in ROW_SCALES or not is_one:
        raise EngineError(
            "bad_plane",
            f"layer {plane.layer} {plane.part}: {plane.codec.name} at {ours}, "
            f"its scales {scale.codec.name} of width {scale.codec.width} at {theirs}",
        )
    if scale.heads != plane.heads:
        raise EngineError("bad_plane", f"heads: {plane.heads} of {plane.part}, {scale.heads} of {scale.part}")


def _segment_template(attached: AttachedPool, regions: Regions, batch: Batch) -> _SegmentTemplate:
    move = batch.moves[0]
    plane = move.plane
    blocks = attached.pool.groups[plane.group].blocks
    field = Field(
        memory=regions.memories[plane.region],
        offset=plane.offset + move.first_head * plane.head_stride,
        planes=Axis(len(batch.moves), batch.pitch),
        blocks=Axis(blocks, plane.block_stride),
        tokens=tuple(Axis(step.count, step.stride) for step in plane.token_axis),
        heads=Axis(move.heads, plane.head_stride),
        elements=tuple(Axis(step.count, step.stride) for step in plane.element_axis),
        element_bytes=plane.codec.element_bytes,
    )
    return _SegmentTemplate(
        field,
        move.slot_offset,
        batch.slot_pitch,
        _conversion(batch),
        plane.group,
        move.unit_tokens,
        blocks * places_of(plane.token_axis),
    )


def _conversion(batch: Batch) -> Cast | None:
    first = batch.moves[0]
    if first.is_bitwise:
        return None
    wire = _number(first.wire, [move.wire.scales for move in batch.moves])
    if first.scale is not None:
        at, stride = first.scale.offset - first.plane.offset, first.scale.head_stride
        at += first.first_head * (stride - first.plane.head_stride)
        tokens = tuple(Axis(step.count, step.stride) for step in first.scale.token_axis)
        scale = RowScale(at, stride, first.scale.block_stride, tokens, first.scale.codec.name)
        return Cast(Number(base_name(first.plane.codec), scale), wire, first.rotates)
    memory = [scales_of(move.plane.codec, move.first_head, move.heads) for move in batch.moves]
    return Cast(_number(first.plane.codec, memory), wire, first.rotates)


def _number(codec: Codec, scales: Sequence[tuple[float, ...]]) -> Number:
    """The codec with the scales of all planes: none if all are 1, a single one if all are equal."""
    distinct = {scale for each in scales for scale in each}
    if distinct <= {1.0}:
        return Number(codec.name)
    if len(distinct) == 1:
        scales = [(distinct.pop(),)]
    return Number(codec.name, torch.tensor(scales, dtype=torch.float32))
