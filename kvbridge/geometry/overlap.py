"""Finds planes of a pool that share bytes, so that rows of one would overwrite rows of the other. Pure.

A plane that `check_pool` has passed is runs of bytes at nested strides: each stride clears all that smaller ones cover.
So two planes are compared from the largest stride down, and at each stride only the few units matter that reach into
the other plane. This is exact, and quick for the pools of engines; a pool that would take long is refused.

Planes of two groups may share bytes block by block: an engine gives a block to one group at a time (vLLM lays its
groups over each other). This holds only if both have the same block stride, and for blocks of the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import NamedTuple

from kvbridge_proto.pool import Plane, Pool

from ..values import Value
from .check import shortened

# The most comparisons for one pool, some microseconds each. The pools of engines need some hundreds.
MOST_COMPARISONS = 50_000
# From this many units on, two strides are brought to a common multiple; fewer units are compared one by one.
FEW_UNITS = 4

Strides = tuple[tuple[int, int], ...]  # (stride, count) of each step, the largest stride first


class Bytes(Value):
    """Runs of `run` bytes. The first is at `start`; from there to the end of the last there are `cover` bytes."""

    start: int
    strides: Strides
    run: int
    cover: int

    @property
    def end(self) -> int:
        return self.start + self.cover

    @property
    def grain(self) -> int:
        """The smallest stride, if all others are multiples of it; else 0."""
        smallest = self.strides[-1][0] if self.strides else 0
        return smallest if smallest and not any(stride % smallest for stride, _ in self.strides) else 0

    def unit(self, index: int) -> Bytes:
        """One of the units at the largest stride."""
        (stride, count), *_ = self.strides
        return Bytes(self.start + index * stride, self.strides[1:], self.run, self.cover - stride * (count - 1))


class HeldBytes(NamedTuple):
    """A plane and all its bytes."""

    plane: Plane
    bytes: Bytes


class _TooMany(Exception):
    pass


def overlaps(pool: Pool) -> tuple[str, ...]:
    """The planes that share bytes, two by two, in a pool that `check_pool` has passed."""
    regions: dict[int, list[HeldBytes]] = {}
    for plane in pool.planes:
        held = HeldBytes(plane, _bytes(plane, range(pool.groups[plane.group].blocks)))
        regions.setdefault(plane.region, []).append(held)
    search = _Search(pool)
    found = [each for _, members in sorted(regions.items()) for each in search.among(members)]
    return shortened(list(dict.fromkeys(found)))


class _Search:
    """Searches for bytes that planes share, with a bound on the cost."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._left = MOST_COMPARISONS

    def among(self, members: Sequence[HeldBytes]) -> Iterator[str]:
        """The planes of one region that share bytes, a sentence for each two."""
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
        """Planes without a gap of bytes between them, two by two."""
        ordered = sorted(members, key=lambda member: member.bytes.start)
        first = end = 0
        for index, member in enumerate(ordered):
            if member.bytes.start >= end:
                yield from self._near_within(ordered[first:index])
                first = index
            end = max(end, member.bytes.end)
        yield from self._near_within(ordered[first:])

    def _near_within(self, members: Sequence[HeldBytes]) -> Iterator[tuple[HeldBytes, HeldBytes]]:
        """Most planes are interleaved at a stride that all have in common. Of these, only those that meet within it."""
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
        """Planes whose spans meet. A span that reaches beyond the grain goes on at 0."""
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
        """A byte that both hold but must not share."""
        if one.plane.group == other.plane.group or one.plane.block_stride != other.plane.block_stride:
            return self._met(one.bytes, other.bytes)
        for ours, theirs in ((one.plane, other.plane), (other.plane, one.plane)):
            blocks = self._pool.groups[ours.group].blocks
            if blocks > 1:  # it matters only by how many blocks ours is ahead of theirs
                found = self._met(_bytes(ours, range(1, blocks)), _bytes(theirs, range(1)))
                if found is not None:
                    return found
        return None

    def _met(self, one: Bytes, other: Bytes) -> int | None:
        """A byte that both hold."""
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
        if other.strides and last - first >= max(FEW_UNITS, lcm(stride, other.strides[0][0]) // stride):
            return self._met_in_parts(one, other)
        return self._first(self._met(one.unit(index), other) for index in range(first, last + 1))

    def _met_in_step(self, one: Bytes, other: Bytes) -> int | None:
        """`_met` if both have the same largest stride: it matters only by how many units they are apart."""
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
        """`_met` with the least common multiple of the largest strides as the largest stride of both."""
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
    """The bytes of a plane in these of its blocks."""
    axes = [*plane.token_axis, *plane.element_axis]
    steps = [(len(blocks), plane.block_stride), (plane.heads, plane.head_stride), *((s.count, s.stride) for s in axes)]
    return _nested(plane.offset + blocks.start * plane.block_stride, steps, plane.codec.element_bytes)


def _nested(start: int, steps: Iterable[tuple[int, int]], run: int) -> Bytes:
    """Runs at these steps, (count, stride) each. A step that leaves no gap is merged into the one below."""
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
    """The same bytes with `period`, a multiple of the largest stride, as the largest stride; then the rest."""
    (stride, count), *inner = held.strides
    whole, rest = divmod(count, period // stride)
    for units, start, counts in (
        (whole, held.start, ((period, whole), (stride, period // stride))),
        (rest, held.start + whole * period, ((stride, rest),)),
    ):
        if units:
            strides = (*(step for step in counts if step[1] > 1), *inner)
            yield Bytes(start, strides, held.run, held.run + sum(each * (many - 1) for each, many in strides))
