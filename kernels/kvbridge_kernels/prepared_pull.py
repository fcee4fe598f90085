"""Pairs the sender's segments of a chunk with the receiver's, once for many pulls with other places.

Both sides describe where their rows would lie in the chunk's slot. A pull has no slot: rows go from memory to memory.
But equal positions in the slot pair the planes, and the position of a row decides how it counts in the digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .codecs_ref import DTYPES, Cast, Number
from .places import Places
from .prepared_copy import LaunchGroup, Lists, Packed
from .segment import Segment, Span
from .segment_layout import SegmentLayout


class Pair(NamedTuple):
    """The same rows in both memories: equally many planes, heads and places, at equal positions in the slot."""

    sender: Segment
    receiver: Segment


class PulledGroup(NamedTuple):
    """Planes that one launch, or a few, pull. Records of the sender and of the receiver match one for one."""

    sender: Packed
    receiver: Packed


class PlacedPull(NamedTuple):
    """A prepared pull with its places: of one chunk, or of several that differ in nothing else."""

    prepared: PreparedPull
    senders: Sequence[Places]
    receivers: Sequence[Places]
    chunks: int = 1  # each list has their places one behind the other

    def check_digest(self, is_wanted: bool) -> None:
        """ValueError if the rows of several chunks would be added to one digest."""
        if is_wanted and self.chunks > 1:
            raise ValueError(f"sums: one for {self.chunks} chunks, each needs its own")

    def pairs(self) -> Iterator[Pair]:
        """The pairs of segments with these places."""
        prepared = self.prepared
        ours = dict(zip(map(id, prepared.sender.places), self.senders, strict=True))
        theirs = dict(zip(map(id, prepared.receiver.places), self.receivers, strict=True))
        for sender, receiver in prepared.pairs:
            yield Pair(
                replace(sender, places=ours[id(sender.places)]), replace(receiver, places=theirs[id(receiver.places)])
            )


class PreparedPull:
    """The segments of a chunk of `size_bytes`, as its sender and its receiver see them, without their places.

    ValueError if something does not fit, in one memory or between the two.
    """

    def __init__(self, senders: Sequence[Segment], receivers: Sequence[Segment], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.sender, self.receiver = Lists(), Lists()
        self.pairs = pairs(senders, receivers)
        groups: dict[object, tuple[LaunchGroup, LaunchGroup]] = {}
        span = Span(0, size_bytes)
        for pair in self.pairs:
            ours, our_numbers = self.sender.add(pair.sender, span)
            theirs, their_numbers = self.receiver.add(pair.receiver, span)
            places = pair.sender.places.count
            group = groups.get((ours, theirs, places))
            if group is None:
                check_pair(pair, ours, theirs)
                group = groups[ours, theirs, places] = LaunchGroup(ours, places), LaunchGroup(theirs, places)
            group[0].add(pair.sender, our_numbers)
            group[1].add(pair.receiver, their_numbers)
        self.groups = [PulledGroup(sender.pack(), receiver.pack()) for sender, receiver in groups.values()]

    def at(self, senders: Sequence[Places], receivers: Sequence[Places]) -> PlacedPull:
        """The pull with these lists instead of `sender.places` and `receiver.places`. ValueError if they do not fit."""
        self.sender.check(senders)
        self.receiver.check(receivers)
        return PlacedPull(self, senders, receivers)

    @property
    def chunk(self) -> PlacedPull:
        """The pull with the places that its segments had."""
        return PlacedPull(self, self.sender.places, self.receiver.places)


def joined(pulls: Sequence[PlacedPull]) -> PlacedPull:
    """Pulls of one `prepared`, as one that shares their launches. It has no digest: their rows would be one sum."""
    if len(pulls) == 1:
        return pulls[0]
    assert all(pull.prepared is pulls[0].prepared for pull in pulls)
    senders, receivers = (
        [Places(np.concatenate([places.array for places in lists])) for lists in zip(*sides, strict=True)]
        for sides in ([pull.senders for pull in pulls], [pull.receivers for pull in pulls])
    )
    return PlacedPull(pulls[0].prepared, senders, receivers, sum(pull.chunks for pull in pulls))


def pairs(senders: Sequence[Segment], receivers: Sequence[Segment]) -> list[Pair]:
    """Pairs of planes at equal positions in the slot, as many planes per pair as possible.

    ValueError if a plane has no counterpart.
    """
    ends = {
        start: (number, plane)
        for number, receiver in enumerate(receivers)
        for plane, start in enumerate(_starts(receiver))
    }
    found: list[Pair] = []
    for sender in senders:
        starts, first = _starts(sender), 0
        while first < len(starts):
            if starts[first] not in ends:
                raise ValueError(f"sender: a plane at byte {starts[first]} of the slot, the receiver has none there")
            number, plane = ends.pop(starts[first])
            count = 1
            while first + count < len(starts) and ends.get(starts[first + count]) == (number, plane + count):
                del ends[starts[first + count]]
                count += 1
            found.append(Pair(planes_of(sender, first, count), planes_of(receivers[number], plane, count)))
            first += count
    if ends:
        raise ValueError(f"receiver: a plane at byte {min(ends)} of the slot, the sender has none there")
    return found


def check_pair(pair: Pair, sender: SegmentLayout, receiver: SegmentLayout) -> None:
    """ValueError with both values if the sender's rows cannot become the receiver's."""
    ours, theirs = (
        (layout.heads, segment.places.count, layout.wire_row_bytes)
        for layout, segment in ((sender, pair.sender), (receiver, pair.receiver))
    )
    if ours != theirs:
        raise ValueError(f"heads, places, bytes per row: the sender has {ours}, the receiver {theirs}")
    names = {layout.codecs[1] for layout in (sender, receiver) if layout.codecs is not None}
    if len(names) > 1:
        raise ValueError(f"codecs on the wire: {sorted(names)}, sender and receiver must have the same")
    for name in names:
        for layout in (sender, receiver):
            if layout.codecs is None and layout.run_bytes % DTYPES[name].itemsize:
                raise ValueError(
                    f"codec on the wire: {name}, but a side that is not converted has runs of {layout.run_bytes} bytes"
                )


def planes_of(segment: Segment, first: int, count: int) -> Segment:
    """`count` planes of a segment, from number `first` on."""
    field = segment.field
    if count == field.planes.count:
        return segment
    return replace(
        segment,
        field=replace(
            field, offset=field.offset + first * field.planes.stride, planes=field.planes._replace(count=count)
        ),
        slot_offset=segment.slot_offset + first * segment.slot_pitch,
        cast=segment.cast and _cast_of(segment.cast, first, count),
    )


def _cast_of(cast: Cast, first: int, count: int) -> Cast:
    memory, wire = (_number_of(number, first, count) for number in (cast.memory, cast.wire))
    return Cast(memory, wire, cast.rotates)


def _number_of(number: Number, first: int, count: int) -> Number:
    table = number.table
    return number if table is None or table.shape[0] == 1 else Number(number.name, table[first : first + count])


def _starts(segment: Segment) -> list[int]:
    """Where each plane begins in the slot. Empty if the segment has no places."""
    if not segment.plane_bytes:
        return []
    return [segment.slot_offset + plane * segment.slot_pitch for plane in range(segment.field.planes.count)]
