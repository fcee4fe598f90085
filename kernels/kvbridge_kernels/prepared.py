"""Moves that are checked and packed once, then made many times with other places.

A move has a source and a target. Each is segments of engine memory, or None: the slot. Both sides of a chunk describe
where their rows lie in its slot. A pull has none: rows go from memory to memory. But equal positions in the slot pair
the planes, and the position of a row decides how it counts in the digest.

Most chunks differ from an earlier one only in their places. Preparing a copy for each chunk would cost 4.3 us a plane
(bench/results/kernels.json).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .codecs_ref import DTYPES, Cast, Number, RowScale
from .field import Axis
from .scales import Scaled, Steps, scaled
from .segment import Places, Segment, Span, check, check_cast, gaps
from .segment_layout import Offsets, SegmentLayout, layout_of

UNSCALED = Scaled(np.empty(0, np.int64), Steps())
RECORD = 5  # words of a plane's record: see tiles.py
LISTS_AT = 3  # in a record


class Pair(NamedTuple):
    """The same rows at both ends: equally many planes, heads and places, at equal positions in the slot."""

    source: Segment | None
    target: Segment | None

    @property
    def in_memory(self) -> Segment:
        """The source's, which says where its rows lie in the slot; the target's if the source is the slot."""
        found = self.source or self.target
        assert found is not None
        return found


class Placed(NamedTuple):
    """A prepared move with its places: of one chunk, or of several that differ in nothing else."""

    prepared: Prepared
    places: Sequence[Sequence[Places]]  # the lists of each of `prepared.memories`
    chunks: int = 1  # each list has their places one behind the other

    @property
    def segments(self) -> list[Segment]:
        """Those that say where the rows lie in the slot. Their places are not the move's, only as many."""
        return [pair.in_memory for pair in self.prepared.pairs]

    def check(self, slot: Span | None, has_sums: bool) -> None:
        """ValueError for another slot, or if the rows of several chunks would be added to one digest."""
        prepared = self.prepared
        if slot is not None and slot.size_bytes != prepared.slot_bytes:
            raise ValueError(f"slot: {slot.size_bytes} bytes, the copy was prepared for {prepared.slot_bytes}")
        if has_sums and self.chunks > 1:
            raise ValueError(f"sums: one for {self.chunks} chunks, each needs its own")

    def list_target(self) -> None:
        """Work out the target's offsets, which launches will find."""
        for which, block_stride, tokens in self.prepared.memories[-1].offsets:
            self.places[-1][which].list_offsets(block_stride, tokens)

    def pairs(self) -> Iterator[Pair]:
        """The pairs of segments with these places."""
        of = self._places
        for source, target in self.prepared.pairs:
            yield Pair(
                source and replace(source, places=of[id(source.places)]),
                target and replace(target, places=of[id(target.places)]),
            )

    def in_memory(self) -> Iterator[tuple[Segment, Places]]:
        """The segments of a move with a slot, beside their places in this chunk."""
        of = self._places
        for segment in self.segments:
            yield segment, of[id(segment.places)]

    @property
    def _places(self) -> dict[int, Places]:
        """These places by those that the move was prepared with."""
        return {
            id(old): new
            for memory, lists in zip(self.prepared.memories, self.places, strict=True)
            for old, new in zip(memory.places, lists, strict=True)
        }


class Prepared:
    """The segments of a chunk of `slot_bytes` at both ends, without their places.

    ValueError if something does not fit, in one memory or between the two.
    """

    def __init__(self, sources: Sequence[Segment] | None, targets: Sequence[Segment] | None, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.pairs = _pairs(sources, targets)
        self.ends = [None if segments is None else MemoryEnd() for segments in (sources, targets)]
        self.memories = [memory for memory in self.ends if memory is not None]
        self.packed: dict[object, object] = {}  # for launch.py
        groups: dict[object, PlaneGroup] = {}
        span = Span(0, slot_bytes)
        for pair in self.pairs:
            found = [
                None if memory is None or segment is None else (segment, *memory.add(segment, span))
                for memory, segment in zip(self.ends, pair, strict=True)
            ]
            count = pair.in_memory.places.count
            key = (*(None if each is None else each[1] for each in found), count)
            group = groups.get(key)
            if group is None:
                layouts = [None if each is None else each[1] for each in found]
                _check_pair(pair, *layouts)
                source, target = (None if layout is None else Planes(layout, count) for layout in layouts)
                group = groups[key] = PlaneGroup(source, target)
            for planes, each in zip(group, found, strict=True):
                if planes is not None and each is not None:
                    planes.add(each[0], each[2])
        self.groups = [group for group in groups.values() if group.in_memory.count]

    def at(self, *places: Sequence[Places]) -> Placed:
        """The move with these lists instead of each memory's: as many, each as long. ValueError if they differ."""
        for memory, lists in zip(self.memories, places, strict=True):
            memory.check(lists)
        return Placed(self, places)

    @property
    def chunk(self) -> Placed:
        """The move with the places that its segments had."""
        return Placed(self, [memory.places for memory in self.memories])

    @cached_property
    def gaps(self) -> Offsets:
        """The start and the end of each part of a slot that no segment covers."""
        return np.array(gaps([pair.in_memory for pair in self.pairs], self.slot_bytes), dtype=np.int64).reshape(-1)


class MemoryEnd:
    """The memory at one end of a move: lists of places, each once, and the layouts of its segments."""

    def __init__(self) -> None:
        self.places: list[Places] = []
        self.limits: list[int] = []  # for each: the places of the smallest field that uses it
        self.offsets: dict[tuple[int, int, tuple[Axis, ...]], int] = {}  # (which places, block stride, tokens)
        self.device: object = None  # index of the GPU
        self._seen: dict[int, int] = {}
        self._layouts: dict[object, SegmentLayout] = {}

    def add(self, segment: Segment, span: Span) -> tuple[SegmentLayout, tuple[int, int]]:
        """The segment's layout, and the numbers of its lists of offsets: to its rows and to their scales.

        It is one list if these lie alike. ValueError if the segment does not fit.
        """
        field, places = segment.field, segment.places
        layout = self._layout(segment)
        planes, stride = field.planes
        offset, pitch, size = (
            segment.slot_offset,
            segment.slot_pitch,
            layout.heads * places.count * layout.wire_row_bytes,
        )
        if (
            field.offset < 0
            or field.offset + (planes - 1) * stride + layout.reach > field.memory.numel()
            or places.highest >= layout.places
            or min(stride, offset, pitch) < 0
            or offset + (planes - 1) * pitch + size > span.size_bytes
            or layout.row_scale is not None
        ):
            check(segment, span)
        device = field.memory.get_device()
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
        return layout, (rows, scales)

    def check(self, places: Sequence[Places]) -> None:
        """ValueError unless `places` can replace `self.places`, one for one."""
        if len(places) != len(self.places):
            raise ValueError(f"{len(places)} lists of places, the copy was prepared with {len(self.places)}")
        for found, mine, limit in zip(places, self.places, self.limits, strict=True):
            if found.count != mine.count:
                raise ValueError(f"{found.count} places, the copy was prepared with {mine.count}")
            if found.highest >= limit:
                raise ValueError(f"places reach {found.reach}, the field has {limit}")

    def _layout(self, segment: Segment) -> SegmentLayout:
        field, cast = segment.field, segment.cast
        key: tuple[object, ...] = (field.blocks, field.tokens, field.heads, field.elements, field.element_bytes)
        if cast is not None:
            ends = (part for end in (cast.memory, cast.wire) for part in (end.name, _scale_key(end)))
            key = (*key, field.planes.count, *ends, cast.rotates)
        layout = self._layouts.get(key)
        if layout is None:
            if cast is not None:
                check_cast(cast, field)
            layout = self._layouts[key] = layout_of(field, cast)
        return layout


def _scale_key(number: Number) -> object:
    scale = number.scale
    return scale if scale is None or isinstance(scale, RowScale) else scale.shape


class Planes:
    """Planes in memory of one layout, with equally many places."""

    def __init__(self, layout: SegmentLayout, places: int) -> None:
        self.layout = layout
        self.places = places
        self.bits = layout.stride_bits | 16  # all addresses and strides or-ed
        self.slot_bits = layout.wire_row_bytes | 16
        self._words: list[int] = []
        self._casts: list[Cast] = []
        self._scaled: Scaled | None = None

    def add(self, segment: Segment, lists: tuple[int, int]) -> None:
        """Add a segment of this layout."""
        field, offset, pitch = segment.field, segment.slot_offset, segment.slot_pitch
        planes, stride = field.planes
        base = field.memory.data_ptr() + field.offset
        self.bits |= base | (stride if planes > 1 else 0)
        self.slot_bits |= offset | (pitch if planes > 1 else 0)
        if not self.layout.heads * self.places * self.layout.wire_row_bytes:
            return
        for plane in range(planes):
            self._words += (base + plane * stride, offset + plane * pitch, self.layout.head_stride, *lists)
        if segment.cast is not None:
            self._casts.append(segment.cast)

    @property
    def count(self) -> int:
        return len(self._words) // RECORD

    @cached_property
    def records(self) -> Offsets:
        """int64 [planes, RECORD], with the numbers of lists where kernels read their addresses."""
        return np.array(self._words, dtype=np.int64).reshape(-1, RECORD)

    def scales(self, is_read: bool, known: dict[object, Steps]) -> Scaled:
        """The scales for reading or for writing this memory, always the same one of the two."""
        if self.layout.codecs is None:
            return UNSCALED
        if self._scaled is None:
            self._scaled = scaled(self.layout, self._casts, self.count, is_read, known)
        return self._scaled


class PlaneGroup(NamedTuple):
    """Planes that one launch, or a few, move. At two ends in memory, their records match one for one."""

    source: Planes | None
    target: Planes | None

    @property
    def in_memory(self) -> Planes:
        """The source's; the target's if the source is the slot."""
        found = self.source or self.target
        assert found is not None
        return found


def joined(moves: Sequence[Placed]) -> Placed:
    """Moves of one `prepared`, as one that shares their launches. It has no digest: their rows would be one sum."""
    if len(moves) == 1:
        return moves[0]
    assert all(move.prepared is moves[0].prepared for move in moves)
    places = [
        [Places(np.concatenate([each.array for each in lists])) for lists in zip(*memory, strict=True)]
        for memory in zip(*(move.places for move in moves), strict=True)
    ]
    return Placed(moves[0].prepared, places, sum(move.chunks for move in moves))


def _pairs(sources: Sequence[Segment] | None, targets: Sequence[Segment] | None) -> list[Pair]:
    """Pairs of planes at equal positions in the slot, as many planes per pair as possible.

    ValueError if a plane has no counterpart.
    """
    if sources is None or targets is None:
        assert sources is not None or targets is not None, "a move from slot to slot"
        return [Pair(source, None) for source in sources or ()] + [Pair(None, target) for target in targets or ()]
    ends = {
        start: (number, plane) for number, target in enumerate(targets) for plane, start in enumerate(_starts(target))
    }
    found: list[Pair] = []
    for source in sources:
        starts, first = _starts(source), 0
        while first < len(starts):
            if starts[first] not in ends:
                raise ValueError(f"sender: a plane at byte {starts[first]} of the slot, the receiver has none there")
            number, plane = ends.pop(starts[first])
            count = 1
            while first + count < len(starts) and ends.get(starts[first + count]) == (number, plane + count):
                del ends[starts[first + count]]
                count += 1
            found.append(Pair(planes_of(source, first, count), planes_of(targets[number], plane, count)))
            first += count
    if ends:
        raise ValueError(f"receiver: a plane at byte {min(ends)} of the slot, the sender has none there")
    return found


def _starts(segment: Segment) -> list[int]:
    """Where each plane begins in the slot. Empty if the segment has no places."""
    if not segment.plane_bytes:
        return []
    return [segment.slot_offset + plane * segment.slot_pitch for plane in range(segment.field.planes.count)]


def _check_pair(pair: Pair, source: SegmentLayout | None, target: SegmentLayout | None) -> None:
    """ValueError with both values if the source's rows cannot become the target's."""
    if pair.source is None or pair.target is None or source is None or target is None:
        return
    ours, theirs = (
        (layout.heads, segment.places.count, layout.wire_row_bytes)
        for layout, segment in ((source, pair.source), (target, pair.target))
    )
    if ours != theirs:
        raise ValueError(f"heads, places, bytes per row: the sender has {ours}, the receiver {theirs}")
    names = {layout.codecs[1] for layout in (source, target) if layout.codecs is not None}
    if len(names) > 1:
        raise ValueError(f"codecs on the wire: {sorted(names)}, sender and receiver must have the same")
    for name in names:
        for layout in (source, target):
            if layout.codecs is None and layout.run_bytes % DTYPES[name].itemsize:
                raise ValueError(
                    f"codec on the wire: {name}, but a side that is not converted has runs of {layout.run_bytes} bytes"
                )


def planes_of(segment: Segment, first: int, count: int) -> Segment:
    """`count` planes of a segment, from number `first` on."""
    field, cast = segment.field, segment.cast
    if count == field.planes.count:
        return segment
    if cast is not None:
        memory, wire = (_number_of(number, first, count) for number in (cast.memory, cast.wire))
        cast = Cast(memory, wire, cast.rotates)
    return replace(
        segment,
        field=replace(
            field, offset=field.offset + first * field.planes.stride, planes=field.planes._replace(count=count)
        ),
        slot_offset=segment.slot_offset + first * segment.slot_pitch,
        cast=cast,
    )


def _number_of(number: Number, first: int, count: int) -> Number:
    table = number.table
    return number if table is None or table.shape[0] == 1 else Number(number.name, table[first : first + count])
