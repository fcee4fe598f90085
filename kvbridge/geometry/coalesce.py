"""Coalesces rows that both sides keep next to each other, so that copies are fewer and larger. Pure.

A pair whose rows are bit-equal on both sides is read as a run of bytes. The run grows while both sides agree on what
comes next: the other heads, the other tokens of the block, the next plane (K then V, layer after layer). The result is
a pair again, of two ordinary planes whose rows are the runs; no later code knows of coalescing.

A run over tokens has as many as divide both sides' blocks (a block, if they are equal), and the first token must begin
one. The last run then travels whole, with whatever its unused rows hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from kvbridge_proto.pool import Codec, Plane, Pool, Step
from msgspec import structs

from .plane_pair import PlanePair
from .wire import is_same_scales, scales_of

# Longer rows are no faster, and shorter ones fill slots better.
LONGEST_BYTES = 64 << 10
ONE_PLACE = (Step(1, 0),)  # of a block that is one row

Axis = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class RunPlane:
    """Where the first run of a pair is in the blocks and the region of `plane`, and a block's `places`."""

    plane: Plane
    offset: int
    places: Axis

    def of_units(self, tokens: int) -> tuple[RunPlane, Axis] | None:
        """With a place for each unit of so many tokens, and the axis of its rows. None if a unit is no sub-axis."""
        outer = self.places
        inner: Axis = ()
        rows = tokens // self.plane.row_tokens
        while rows > 1:
            *before, step = outer
            taken = gcd(rows, step.count)
            if taken not in (rows, step.count):
                return None
            rest = (Step(step.count // taken, step.stride * taken),) if taken < step.count else ()
            outer, inner = (*before, *rest), (Step(taken, step.stride), *inner)
            rows //= taken
        return replace(self, places=_steps(outer) or ONE_PLACE), _steps(inner)


@dataclass(frozen=True, slots=True)
class Run:
    """`heads` runs of `row_bytes` bytes for each place, of `unit_tokens` tokens: those of a row, or `most_tokens`."""

    sender: RunPlane
    receiver: RunPlane
    heads: int
    row_bytes: int
    unit_tokens: int
    most_tokens: int


def coalesce(
    pairs: Sequence[PlanePair],
    sender: Pool,
    receiver: Pool,
    first_token: int,
    slot_bytes: int,
    is_whole: bool = True,
    moves_units: bool = True,
) -> list[PlanePair]:
    """The same bytes as fewer pairs of longer rows, none longer than a slot. No row spans tokens unless `is_whole`.

    Between blocks of different sizes none does unless `moves_units`: older agents move single tokens there.
    """
    longest = min(LONGEST_BYTES, slot_bytes)
    kept: list[PlanePair] = []
    runs: list[Run] = []
    for pair in pairs:
        ours = sender.groups[pair.sender.group].block_tokens
        theirs = receiver.groups[pair.receiver.group].block_tokens
        common = gcd(ours, theirs) if moves_units or ours == theirs else pair.unit_tokens
        can_span = is_whole and first_token % common == 0
        run = _first_run(pair, common if can_span else pair.unit_tokens, longest)
        if run is None:
            kept.append(pair)
        else:
            runs.append(run)
    runs.sort(key=lambda run: (run.sender.plane.region, run.sender.offset))
    while True:
        grown = _joined([_grown(run, longest) for run in runs], longest)
        if len(grown) == len(runs) and all(new is old for new, old in zip(grown, runs, strict=True)):
            break
        runs = grown
    forms = {size: (_opaque(size), (Step(size, 1),)) for size in {run.row_bytes for run in runs}}
    return kept + [_plane_pair(run, *forms[run.row_bytes]) for run in runs]


def _first_run(pair: PlanePair, most_tokens: int, longest: int) -> Run | None:
    """One row if it is dense, else all rows of a unit and head if they are; None if neither is one run."""
    sender, receiver, heads = pair.sender, pair.receiver, pair.heads
    ours, theirs = sender.codec, receiver.codec
    if pair.is_converted or sender.element_axis != receiver.element_axis:
        return None
    if ours.scales or theirs.scales:
        scales = scales_of(ours, pair.sender_head, heads), scales_of(theirs, pair.receiver_head, heads)
        if not is_same_scales(*scales):
            return None
    sides = (
        RunPlane(sender, sender.offset + pair.sender_head * sender.head_stride, sender.token_axis),
        RunPlane(receiver, receiver.offset + pair.receiver_head * receiver.head_stride, receiver.token_axis),
    )
    run = Run(*sides, heads, ours.row_bytes, pair.unit_tokens, most_tokens)
    if _is_dense(sender.element_axis, ours.element_bytes):
        return run
    return _over_tokens(run, sender.element_axis, ours.element_bytes, longest)


def _over_tokens(run: Run, elements: Axis, element_bytes: int, longest: int) -> Run | None:
    """The run over all tokens of a unit, if with such elements they follow each other on both sides."""
    row_bytes = run.most_tokens // run.unit_tokens * run.row_bytes
    ours, theirs = run.sender.of_units(run.most_tokens), run.receiver.of_units(run.most_tokens)
    if row_bytes > longest or ours is None or theirs is None or ours[1] != theirs[1]:
        return None
    if not _is_dense(ours[1] + elements, element_bytes):
        return None
    return Run(ours[0], theirs[0], run.heads, row_bytes, run.most_tokens, run.most_tokens)


def _steps(axis: Axis) -> Axis:
    """Without those of one place, which say nothing: a page may be a whole block on one side."""
    return tuple(step for step in axis if step.count > 1)


def _is_dense(axis: Sequence[Step], element_bytes: int) -> bool:
    """True if the places of an axis fill their bytes without a gap, in any order."""
    covered = element_bytes
    for step in sorted(axis, key=lambda step: step.stride) if len(axis) > 1 else axis:
        if step.count > 1:
            if step.stride != covered:
                return False
            covered *= step.count
    return True


def _grown(run: Run, longest: int) -> Run:
    """The run grown over all heads, or all tokens of a unit, if they follow each other on both sides."""
    sender, receiver, row_bytes = run.sender.plane, run.receiver.plane, run.row_bytes
    if run.heads > 1 and run.heads * row_bytes <= longest and sender.head_stride == receiver.head_stride == row_bytes:
        return replace(run, heads=1, row_bytes=run.heads * row_bytes)
    if run.unit_tokens < run.most_tokens:
        return _over_tokens(run, (), row_bytes, longest) or run
    return run


def _joined(runs: Sequence[Run], longest: int) -> list[Run]:
    """Joins runs that follow each other on both sides, block by block."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.row_bytes + run.row_bytes <= longest and _is_next(last, run):
            joined[-1] = replace(last, row_bytes=last.row_bytes + run.row_bytes)
        else:
            joined.append(run)
    return joined


def _is_next(last: Run, run: Run) -> bool:
    if (last.heads, last.unit_tokens) != (run.heads, run.unit_tokens):
        return False
    for before, after in ((last.sender, run.sender), (last.receiver, run.receiver)):
        ours, theirs = before.plane, after.plane
        if after.offset - before.offset != last.row_bytes:
            return False
        if (ours.region, ours.group, ours.block_stride) != (theirs.region, theirs.group, theirs.block_stride):
            return False
        if run.heads > 1 and ours.head_stride != theirs.head_stride:
            return False
        if before.places != after.places:
            return False
    return True


def _opaque(row_bytes: int) -> Codec:
    return Codec(name="opaque", width=row_bytes, element_bytes=1, row_bytes=row_bytes)


def _plane_pair(run: Run, codec: Codec, element_axis: tuple[Step, ...]) -> PlanePair:
    sender, receiver = _plane(run.sender, run, codec, element_axis), _plane(run.receiver, run, codec, element_axis)
    return PlanePair(sender, 0, receiver, 0, run.heads, codec, run.unit_tokens)


def _plane(side: RunPlane, run: Run, codec: Codec, element_axis: tuple[Step, ...]) -> Plane:
    """The plane whose rows are the runs. Layer and part are those of its first run."""
    plane = side.plane
    return structs.replace(
        plane,
        offset=side.offset,
        token_axis=side.places,
        head_stride=plane.head_stride if run.heads > 1 else 0,
        element_axis=element_axis,
        first_head=0,
        heads=run.heads,
        total_heads=run.heads,
        codec=codec,
        name="folded",
    )
