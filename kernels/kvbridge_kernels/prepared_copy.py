"""Segments worked out once, to be moved again and again with other places.

Most chunks differ from one before in their places only. What they have in common is checked and packed here; with it,
a chunk costs its lists of places, without it about a microsecond and a half a plane more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .codecs_ref import Cast, Number, RowScale
from .field import Axis
from .form import Form, Offsets, form_of
from .places import Places
from .scales import Scaled, Steps, scaled
from .segment import Segment, Span, check, check_cast, gaps

UNSCALED = Scaled(np.empty(0, np.int64), Steps())


@dataclass(slots=True)
class LaunchGroup:
    """Planes that one launch moves: of one form, with as many places each."""

    form: Form
    places: int
    near_bits: int = 0
    far_bits: int = 0
    rows: list[int] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    scaled: dict[bool, Scaled] = field(default_factory=dict)

    @property
    def planes(self) -> int:
        return len(self.rows) // 4

    @property
    def plane_bytes(self) -> int:
        """What the rows of one plane take in the slot."""
        return self.form.heads * self.places * self.form.wire_row_bytes

    def add(self, segment: Segment, number: int) -> None:
        """A segment of this form; `number` is that of its list of places."""
        memory, offset, pitch = segment.field, segment.slot_offset, segment.slot_pitch
        planes, stride = memory.planes
        base = memory.memory.data_ptr() + memory.offset
        self.near_bits |= base | (stride if planes > 1 else 0)
        self.far_bits |= offset | (pitch if planes > 1 else 0)
        if not self.plane_bytes:
            return
        for plane in range(planes):
            self.rows += (base + plane * stride, offset + plane * pitch, number, self.form.head_stride)
        if segment.cast is not None:
            self.casts.append(segment.cast)

    def pack(self) -> Packed:
        records = np.array(self.rows, dtype=np.int64).reshape(-1, 4)
        return Packed(self, records, records[:, 2].copy())

    def scales(self, is_gather: bool, known: dict[object, Steps]) -> Scaled:
        """What is to be multiplied and divided by on the way out of memory, or into it."""
        if self.form.codecs is None:
            return UNSCALED
        if is_gather not in self.scaled:
            self.scaled[is_gather] = scaled(self.form, self.casts, self.planes, is_gather, known)
        return self.scaled[is_gather]


class Packed(NamedTuple):
    """Records, int64 [planes, 4], with the number of a list of places instead of its address; and those numbers."""

    group: LaunchGroup
    records: Offsets
    numbers: Offsets


class Lists:
    """The lists of places of one pool's segments, each once, and the forms that these segments have."""

    def __init__(self) -> None:
        self.places: list[Places] = []
        self.limits: list[int] = []  # the places that the smallest field has, for each of them
        self.offsets: dict[tuple[int, int, tuple[Axis, ...]], int] = {}  # (which places, block stride, tokens)
        self.device: object = None  # index of the GPU
        self._seen: dict[int, int] = {}
        self._forms: dict[object, Form] = {}

    def add(self, segment: Segment, span: Span) -> tuple[Form, int]:
        """The segment's form, and the number of its list of offsets. ValueError where it does not fit."""
        memory, places = segment.field, segment.places
        form = _form(segment, self._forms)
        planes, stride = memory.planes
        offset, pitch, size = segment.slot_offset, segment.slot_pitch, form.heads * places.count * form.wire_row_bytes
        if (
            memory.offset < 0
            or memory.offset + (planes - 1) * stride + form.reach > memory.memory.numel()
            or places.lowest < 0
            or places.highest >= form.places
            or min(stride, offset, pitch) < 0
            or offset + (planes - 1) * pitch + size > span.size_bytes
            or form.row_scale is not None
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
            self.limits.append(form.places)
        self.limits[which] = min(self.limits[which], form.places)
        return form, self.offsets.setdefault((which, *form.places_key), len(self.offsets))

    def check(self, places: Sequence[Places]) -> None:
        """ValueError unless these may stand for those that are here, one for one."""
        if len(places) != len(self.places):
            raise ValueError(f"{len(places)} lists of places, the recipe has {len(self.places)}")
        for found, mine, limit in zip(places, self.places, self.limits, strict=True):
            if found.count != mine.count:
                raise ValueError(f"{found.count} places, the recipe is for {mine.count}")
            if found.lowest < 0 or found.highest >= limit:
                raise ValueError(f"places reach from {found.lowest} to {found.highest}, the field has {limit}")


class PlacedCopy(NamedTuple):
    """A recipe with places: what gather and scatter move."""

    recipe: PreparedCopy
    places: Sequence[Places]


class PreparedCopy:
    """Segments of a slot of `slot_bytes` but for their places. ValueError where something does not fit."""

    def __init__(self, segments: Sequence[Segment], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.lists = Lists()
        groups: dict[object, LaunchGroup] = {}
        span = Span(0, slot_bytes)
        end = 0  # of the segments, as long as each begins where the one before ends
        for segment in segments:
            form, number = self.lists.add(segment, span)
            key = form, segment.places.count
            group = groups.get(key)
            if group is None:
                group = groups[key] = LaunchGroup(*key)
            group.add(segment, number)
            planes, size, offset = segment.field.planes.count, group.plane_bytes, segment.slot_offset
            if size:
                is_next = offset == end and (planes == 1 or segment.slot_pitch == size)
                end = offset + planes * size if is_next else -1
        self.groups = [group.pack() for group in groups.values() if group.rows]
        found = gaps(segments, slot_bytes) if end != slot_bytes else []
        self.gaps = np.array(found, dtype=np.int64).reshape(-1)  # start and end of each

    @property
    def places(self) -> Sequence[Places]:
        """Those of the segments, each once."""
        return self.lists.places

    def at(self, places: Sequence[Places]) -> PlacedCopy:
        """With `places` instead of those in `self.places`, one for one and as many each."""
        self.lists.check(places)
        return PlacedCopy(self, places)


def _form(segment: Segment, forms: dict[object, Form]) -> Form:
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
        )
    form = forms.get(key)
    if form is None:
        if cast is not None:
            check_cast(cast, memory)
        form = forms[key] = form_of(memory, cast)
    return form


def _scale_key(number: Number) -> object:
    scale = number.scale
    return scale if scale is None or isinstance(scale, RowScale) else scale.shape
