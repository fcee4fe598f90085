"""Whether two planes of a pool hold the same bytes: then rows of one would be written over rows of the other. Pure.

A plane that `check_pool` has passed is runs of bytes at nested strides: each stride clears all that smaller ones cover.
So two planes are compared from the largest stride down, and at each of them only the few units count that reach into
the other plane. That is exact, and quick for what engines have; what would take long is refused.

Planes of two groups may share bytes block by block: an engine gives a block to one group at a time (vLLM lays its
groups over each other). That holds only where both have the same block stride, and for blocks of the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from kvbridge_proto.pool import Plane, Pool

from .check import shortened

# Comparisons for one pool, some microseconds each. Those of engines need some hundreds.
MOST_COMPARISONS = 50_000
# Units that are looked at one by one before two strides are brought to a common multiple.
FEW = 4

Strides = tuple[tuple[int, int], ...]  # (stride, count) of each step, the largest stride first


@dataclass(frozen=True, slots=True)
class Bytes:
    """Runs of `run` bytes, the first at `start`; from there to the end of the last are `cover` bytes."""

    start: int
    strides: Strides
    run: int
    cover: int

    @property
    def end(self) -> int:
        return self.start + self.cover

    @property
    def grain(self) -> int:
        """The smallest stride, if all others are multiples of it; 0 if there is none such."""
        smallest = self.strides[-1][0] if self.strides else 0
        return smallest if smallest and not any(stride % smallest for stride, _ in self.strides) else 0

    def unit(self, index: int) -> Bytes:
        """One of those at the largest stride."""
        (stride, count), *_ = self.strides
        return Bytes(self.start + index * stride, self.strides[1:], self.run, self.cover - stride * (count - 1))


class HeldBytes(NamedTuple):
    """A plane and all its bytes."""

    plane: Plane
    bytes: Bytes


class _TooMany(Exception):
    pass


def overlaps(pool: Pool) -> tuple[str, ...]:
    """The planes that share bytes, two by two, of a pool that `check_pool` has nothing against."""
    regions: dict[int, list[HeldBytes]] = {}
    for plane in pool.planes:
        held = HeldBytes(plane, _bytes(plane, range(pool.groups[plane.group].blocks)))
        regions.setdefault(plane.region, []).append(held)
    search = _Search(pool)
    found = [each for _, members in sorted(regions.items()) for each in search.among(members)]
    return shortened(list(dict.fromkeys(found)))


class _Search:
    """For bytes that planes share, with a bound on what it costs."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._left = MOST_COMPARISONS

    def among(self, members: Sequence[HeldBytes]) -> Iterator[str]:
        """The planes of one region that share bytes."""
        one = other = members[0]
        try:
            for one, other in self._near(members):
                byte = self._shared(one, other)
                if byte is not None:
                    yield f"{_spell(one)} and {_spell(other)}: both hold byte {byte} of region {one.plane.region}"
        except _TooMany:
            yield f"{_spell(one)} and {_spell(other)}: lie across each other in too many ways to tell them apart"

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMany

    # Which planes to compare:

    def _near(self, members: Sequence[HeldBytes]) -> Iterator[tuple[HeldBytes, HeldBytes]]:
        """Those without a gap of bytes between them, two by two."""
        ordered = sorted(members, key=lambda member: member.bytes.start)
        first = end = 0
        for index, member in enumerate(ordered):
            if member.bytes.start >= end:
                yield from self._near_within(ordered[first:index])
                first = index
            end = max(end, member.bytes.end)
        yield from self._near_within(ordered[first:])

    def _near_within(self, members: Sequence[HeldBytes]) -> Iterator[tuple[HeldBytes, HeldBytes]]:
        """Most lie interleaved at a stride that all have in common: of these only those that meet within it."""
        alike: dict[int, list[HeldBytes]] = {}
        for member in members:
            alike.setdefault(member.bytes.grain, []).append(member)
        for grain, some in alike.items():
            yield from self._meeting([(*_within(member.bytes, grain), member) for member in some], grain)
        if len(alike) > 1:
            for one, other in self._meeting([(each.bytes.start, each.bytes.end, each) for each in members], 0):
                if one.bytes.grain != other.bytes.grain:
                    yield one, other

    def _meeting(
        self, spans: Sequence[tuple[int, int, HeldBytes]], grain: int
    ) -> Iterator[tuple[HeldBytes, HeldBytes]]:
        """Whose spans meet. One that reaches beyond the grain goes on at 0."""
        beyond = [(start - grain, end - grain, member) for start, end, member in spans if grain and end > grain]
        ordered = sorted([*beyond, *spans], key=lambda span: span[0])
        for index, (_, end, one) in enumerate(ordered):
            for start, _, other in ordered[index + 1 :]:
                if start >= end:
                    break
                self._spend()
                if one is not other:
                    yield one, other

    # Two planes:

    def _shared(self, one: HeldBytes, other: HeldBytes) -> int | None:
        """A byte that both hold and must not."""
        if one.plane.group == other.plane.group or one.plane.block_stride != other.plane.block_stride:
            return self._met(one.bytes, other.bytes)
        for ours, theirs in ((one.plane, other.plane), (other.plane, one.plane)):
            blocks = self._pool.groups[ours.group].blocks
            if blocks > 1:  # by how many blocks ours is ahead of theirs is all that matters
                found = self._met(_bytes(ours, range(1, blocks)), _bytes(theirs, range(1)))
                if found is not None:
                    return found
        return None

    def _met(self, one: Bytes, other: Bytes) -> int | None:
        """A byte of both."""
        self._spend()
        if one.end <= other.start or other.end <= one.start:
            return None
        if not one.strides or (other.strides and other.strides[0] > one.strides[0]):
            one, other = other, one  # now `one` has the larger stride
        if not one.strides:
            return max(one.start, other.start)
        if other.strides and other.strides[0][0] == one.strides[0][0]:
            return self._met_in_step(one, other)
        stride, count = one.strides[0]
        width = one.unit(0).cover
        first = max(0, (other.start - one.start - width) // stride + 1)
        last = min(count - 1, (other.end - 1 - one.start) // stride)
        if not other.strides and last - first > 1:
            return one.start + (first + 1) * stride  # all of this unit lies within the other's only run
        if other.strides and last - first >= max(FEW, lcm(stride, other.strides[0][0]) // stride):
            return self._met_in_parts(one, other)
        return self._first(self._met(one.unit(index), other) for index in range(first, last + 1))

    def _met_in_step(self, one: Bytes, other: Bytes) -> int | None:
        """Both have the same largest stride: it matters only by how many units they are apart."""
        (stride, ours), (_, theirs) = one.strides[0], other.strides[0]
        mine, its = one.unit(0), other.unit(0)
        first = max(1 - theirs, (its.start - mine.start - mine.cover) // stride + 1)
        last = min(ours - 1, (its.end - 1 - mine.start) // stride)
        for apart in range(first, last + 1):
            found = self._met(one.unit(apart), its)
            if found is not None:
                return found + max(0, -apart) * stride
        return None

    def _met_in_parts(self, one: Bytes, other: Bytes) -> int | None:
        """Both with the least common multiple of their largest strides as the largest."""
        period = lcm(one.strides[0][0], other.strides[0][0])
        parts = ((mine, its) for mine in _cut(one, period) for its in _cut(other, period))
        return self._first(self._met(mine, its) for mine, its in parts)

    @staticmethod
    def _first(found: Iterator[int | None]) -> int | None:
        return next((byte for byte in found if byte is not None), None)


def _spell(held: HeldBytes) -> str:
    return f"layer {held.plane.layer} {held.plane.part}"


def _within(held: Bytes, grain: int) -> tuple[int, int]:
    """Where the runs of a plane begin and end, modulo its grain."""
    if not grain:
        return held.start, held.end
    return held.start % grain, held.start % grain + held.run


def _bytes(plane: Plane, blocks: range) -> Bytes:
    """What a plane holds in these of its blocks."""
    axes = [*plane.token_axis, *plane.element_axis]
    steps = [(len(blocks), plane.block_stride), (plane.heads, plane.head_stride), *((s.count, s.stride) for s in axes)]
    return _nested(plane.offset + blocks.start * plane.block_stride, steps, plane.codec.element_bytes)


def _nested(start: int, steps: Iterable[tuple[int, int]], run: int) -> Bytes:
    """Runs at these steps, (count, stride) each. One that leaves no gap becomes part of what is below it."""
    strides: list[tuple[int, int]] = []
    cover = run
    for stride, count in sorted((stride, count) for count, stride in steps if count > 1):
        cover += stride * (count - 1)
        if not strides and stride == run:
            run *= count
        elif strides and stride == strides[0][0] * strides[0][1]:
            strides[0] = strides[0][0], strides[0][1] * count
        else:
            strides.insert(0, (stride, count))
    return Bytes(start, tuple(strides), run, cover)


def _cut(held: Bytes, period: int) -> Iterator[Bytes]:
    """The same bytes with `period`, a multiple of the largest stride, as the largest, and what is left then."""
    (stride, count), *inner = held.strides
    whole, rest = divmod(count, period // stride)
    for units, start, counts in (
        (whole, held.start, ((period, whole), (stride, period // stride))),
        (rest, held.start + whole * period, ((stride, rest),)),
    ):
        if units:
            strides = (*(step for step in counts if step[1] > 1), *inner)
            yield Bytes(start, strides, held.run, held.run + sum(each * (many - 1) for each, many in strides))
