"""Segments that are checked and packed once, then moved many times with other places.

Most chunks differ from an earlier one only in their places. Preparing a copy for each chunk would cost 4.3 us a plane
(bench/results/kernels.json).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .codecs_ref import Cast, Number, RowScale
from .field import Axis
from .places import Places
from .scales import Scaled, Steps, scaled
from .segment import Segment, Span, check, check_cast, gaps
from .segment_layout import Offsets, SegmentLayout, layout_of

UNSCALED = Scaled(np.empty(0, np.int64), Steps())
RECORD = 5  # words of a plane's record: see tiles.py
LISTS_AT = 3  # in a record


class Numbers(NamedTuple):
    """The numbers of a segment's lists of offsets: to its rows and to their scales. One list if these lie alike."""

    rows: int
    scales: int


@dataclass(slots=True)
class LaunchGroup:
    """Planes of one layout with equally many places: one launch, or a few, moves them."""

    layout: SegmentLayout
    places: int
    near_bits: int = 0
    far_bits: int = 0
    rows: list[int] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    scaled: dict[bool, Scaled] = field(default_factory=dict)

    @property
    def planes(self) -> int:
        return len(self.rows) // RECORD

    @property
    def plane_bytes(self) -> int:
        """How many bytes the rows of one plane take in the slot."""
        return self.layout.heads * self.places * self.layout.wire_row_bytes

    def add(self, segment: Segment, numbers: Numbers) -> None:
        """Add a segment of this layout."""
        memory, offset, pitch = segment.field, segment.slot_offset, segment.slot_pitch
        planes, stride = memory.planes
        base = memory.memory.data_ptr() + memory.offset
        self.near_bits |= base | (stride if planes > 1 else 0)
        self.far_bits |= offset | (pitch if planes > 1 else 0)
        if not self.plane_bytes:
            return
        for plane in range(planes):
            self.rows += (base + plane * stride, offset + plane * pitch, self.layout.head_stride, *numbers)
        if segment.cast is not None:
            self.casts.append(segment.cast)

    def pack(self) -> Packed:
        records = np.array(self.rows, dtype=np.int64).reshape(-1, RECORD)
        return Packed(self, records)

    def scales(self, is_gather: bool, known: dict[object, Steps]) -> Scaled:
        """The scales for reading memory (`is_gather`) or for writing it."""
        if self.layout.codecs is None:
            return UNSCALED
        if is_gather not in self.scaled:
            self.scaled[is_gather] = scaled(self.layout, self.casts, self.planes, is_gather, known)
        return self.scaled[is_gather]


class Packed(NamedTuple):
    """Records, int64 [planes, RECORD], with Numbers where kernels read addresses."""

    group: LaunchGroup
    records: Offsets


class Lists:
    """The lists of places of one pool's segments, each once, and the layouts of these segments."""

    def __init__(self) -> None:
        self.places: list[Places] = []
        self.limits: list[int] = []  # for each: the places of the smallest field that uses it
        self.offsets: dict[tuple[int, int, tuple[Axis, ...]], int] = {}  # (which places, block stride, tokens)
        self.device: object = None  # index of the GPU
        self._seen: dict[int, int] = {}
        self._layouts: dict[object, SegmentLayout] = {}

    def add(self, segment: Segment, span: Span) -> tuple[SegmentLayout, Numbers]:
        """The segment's layout, and its lists of offsets. ValueError if it does not fit."""
        memory, places = segment.field, segment.places
        layout = _layout(segment, self._layouts)
        planes, stride = memory.planes
        offset, pitch, size = (
            segment.slot_offset,
            segment.slot_pitch,
            layout.heads * places.count * layout.wire_row_bytes,
        )
        if (
            memory.offset < 0
            or memory.offset + (planes - 1) * stride + layout.reach > memory.memory.numel()
            or places.lowest < 0
            or places.highest >= layout.places
            or min(stride, offset, pitch) < 0
            or offset + (planes - 1) * pitch + size > span.size_bytes
            or layout.row_scale is not None
        ):
            check(segment, span)
        device = memory.memory.get_device()
        if self.device not in (None, device):
            raise ValueError(f"fields are on devices {self.device} and {device}")
        self.device = device
        which = self._seen.get(id(places))
        if which is None:
            which = self._seen[id(places)] = len(self.places)
            self.places.append(places)
            self.limits.append(layout.places)
        self.limits[which] = min(self.limits[which], layout.places)
        rows, scales = (
            self.offsets.setdefault((which, *key), len(self.offsets))
            for key in (layout.places_key, layout.scale_places_key)
        )
        return layout, Numbers(rows, scales)

    def check(self, places: Sequence[Places]) -> None:
        """ValueError unless `places` can replace `self.places`, one for one."""
        if len(places) != len(self.places):
            raise ValueError(f"{len(places)} lists of places, the copy was prepared with {len(self.places)}")
        for found, mine, limit in zip(places, self.places, self.limits, strict=True):
            if found.count != mine.count:
                raise ValueError(f"{found.count} places, the copy was prepared with {mine.count}")
            if found.lowest < 0 or found.highest >= limit:
                raise ValueError(f"places reach from {found.lowest} to {found.highest}, the field has {limit}")


class PlacedCopy(NamedTuple):
    """A prepared copy with its places: what gather and scatter move."""

    prepared: PreparedCopy
    places: Sequence[Places]


class PreparedCopy:
    """The segments of a slot of `slot_bytes`, without their places. ValueError if something does not fit."""

    def __init__(self, segments: Sequence[Segment], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.lists = Lists()
        groups: dict[object, LaunchGroup] = {}
        span = Span(0, slot_bytes)
        end = 0  # of the segments so far; -1 once one does not begin where the last ends
        for segment in segments:
            layout, numbers = self.lists.add(segment, span)
            key = layout, segment.places.count
            group = groups.get(key)
            if group is None:
                group = groups[key] = LaunchGroup(*key)
            group.add(segment, numbers)
            planes, size, offset = segment.field.planes.count, group.plane_bytes, segment.slot_offset
            if size:
                is_next = offset == end and (planes == 1 or segment.slot_pitch == size)
                end = offset + planes * size if is_next else -1
        self.groups = [group.pack() for group in groups.values() if group.rows]
        found = gaps(segments, slot_bytes) if end != slot_bytes else []
        self.gaps = np.array(found, dtype=np.int64).reshape(-1)  # the start and end of each

    @property
    def places(self) -> Sequence[Places]:
        """The lists of places that the segments had, each once."""
        return self.lists.places

    def at(self, places: Sequence[Places]) -> PlacedCopy:
        """The copy with `places` instead of `self.places`: as many lists, each as long. ValueError if they differ."""
        self.lists.check(places)
        return PlacedCopy(self, places)


def _layout(segment: Segment, layouts: dict[object, SegmentLayout]) -> SegmentLayout:
    memory, cast = segment.field, segment.cast
    key: tuple[object, ...] = (memory.blocks, memory.tokens, memory.heads, memory.elements, memory.element_bytes)
    if cast is not None:
        inner, outer = cast.memory, cast.wire
        key = (
            *key,
            memory.planes.count,
            inner.name,
            outer.name,
            _scale_key(inner),
            _scale_key(outer),
            cast.rotates,
        )
    layout = layouts.get(key)
    if layout is None:
        if cast is not None:
            check_cast(cast, memory)
        layout = layouts[key] = layout_of(memory, cast)
    return layout


def _scale_key(number: Number) -> object:
    scale = number.scale
    return scale if scale is None or isinstance(scale, RowScale) else scale.shape
