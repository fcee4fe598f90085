"""What a pull is made of: segments of the sender's memory and of the receiver's that meet in one slot which nobody
makes.

Both sides' segments of a chunk lie at the same places of its slot. So the slot says which plane belongs to which, and
where each row counts in the digest; the rows themselves go from memory to memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .codecs_ref import DTYPES, Cast, Number
from .form import Form
from .places import Places
from .prepared_copy import LaunchGroup, Lists, Packed
from .segment import Segment, Span


class Pair(NamedTuple):
    """The same rows as they lie in both memories: as many planes, heads and places, at one place of the slot."""

    sender: Segment
    receiver: Segment


class PulledGroup(NamedTuple):
    """Planes that one launch pulls; record for record those of the sender and of the receiver."""

    sender: Packed
    receiver: Packed


class PlacedPull(NamedTuple):
    """A recipe with places: what a pull moves."""

    recipe: PreparedPull
    senders: Sequence[Places]
    receivers: Sequence[Places]

    def pairs(self) -> Iterator[Pair]:
        """With these places."""
        recipe = self.recipe
        ours = dict(zip(map(id, recipe.sender.places), self.senders, strict=True))
        theirs = dict(zip(map(id, recipe.receiver.places), self.receivers, strict=True))
        for sender, receiver in recipe.pairs:
            yield Pair(
                replace(sender, places=ours[id(sender.places)]), replace(receiver, places=theirs[id(receiver.places)])
            )


class PreparedPull:
    """Segments of a chunk of `size_bytes` as its sender and its receiver see them, but for their places.

    Several chunks may be one, their slots one behind the other: planes alike then share launches. ValueError where
    something does not fit, in one memory or between the two.
    """

    def __init__(self, senders: Sequence[Segment], receivers: Sequence[Segment], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.sender, self.receiver = Lists(), Lists()
        self.pairs = pairs(senders, receivers)
        groups: dict[object, tuple[LaunchGroup, LaunchGroup]] = {}
        span = Span(0, size_bytes)
        for pair in self.pairs:
            ours, our_number = self.sender.add(pair.sender, span)
            theirs, their_number = self.receiver.add(pair.receiver, span)
            places = pair.sender.places.count
            group = groups.get((ours, theirs, places))
            if group is None:
                check_pair(pair, ours, theirs)
                group = groups[ours, theirs, places] = LaunchGroup(ours, places), LaunchGroup(theirs, places)
            group[0].add(pair.sender, our_number)
            group[1].add(pair.receiver, their_number)
        self.groups = [PulledGroup(sender.pack(), receiver.pack()) for sender, receiver in groups.values()]

    def at(self, senders: Sequence[Places], receivers: Sequence[Places]) -> PlacedPull:
        """With these instead of `sender.places` and `receiver.places`, one for one and as many each."""
        self.sender.check(senders)
        self.receiver.check(receivers)
        return PlacedPull(self, senders, receivers)

    @property
    def chunk(self) -> PlacedPull:
        """With the places of its segments."""
        return PlacedPull(self, self.sender.places, self.receiver.places)


def pairs(senders: Sequence[Segment], receivers: Sequence[Segment]) -> list[Pair]:
    """The planes that meet, as many at once as lie alike on both sides. ValueError where one meets nothing."""
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


def check_pair(pair: Pair, sender: Form, receiver: Form) -> None:
    """ValueError with both values where rows of the one cannot become rows of the other."""
    ours, theirs = (
        (form.heads, segment.places.count, form.wire_row_bytes)
        for form, segment in ((sender, pair.sender), (receiver, pair.receiver))
    )
    if ours != theirs:
        raise ValueError(f"heads, places and bytes of a row: {ours} of the sender, {theirs} of the receiver")
    names = {form.codecs[1] for form in (sender, receiver) if form.codecs is not None}
    if len(names) > 1:
        raise ValueError(f"on the way: {sorted(names)}, the sender's and the receiver's must be one")
    for name in names:
        for form in (sender, receiver):
            if form.codecs is None and form.run_bytes % DTYPES[name].itemsize:
                raise ValueError(f"on the way: {name}, of a side that is not converted {form.run_bytes} bytes at once")


def planes_of(segment: Segment, first: int, count: int) -> Segment:
    """Some planes of a segment."""
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
    return Cast(*(_number_of(number, first, count) for number in (cast.memory, cast.wire)))


def _number_of(number: Number, first: int, count: int) -> Number:
    table = number.table
    return number if table is None or table.shape[0] == 1 else Number(number.name, table[first : first + count])


def _starts(segment: Segment) -> list[int]:
    """Where each plane begins in the slot; of no places there is none."""
    if not segment.plane_bytes:
        return []
    return [segment.slot_offset + plane * segment.slot_pitch for plane in range(segment.field.planes.count)]
