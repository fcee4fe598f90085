"""Random chunks as both ends see them, and what pulls are compared with: gather and scatter through a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.prepared import Prepared, joined
from kvbridge_kernels.segment import Places, Segment
from kvbridge_kernels.tables import Work

from tests.unit.kernels.chunks import (
    LAYOUTS,
    MOVES,
    Move,
    Shape,
    added,
    assert_same_memory,
    chunk_of,
    gather,
    number,
    on,
    scatter,
    slot_on,
    work_on,
)
from tests.unit.kernels.rows import Rows, segment_of

Ends = tuple[list[Segment], list[Segment], int]

# Every pair of layouts that rows can have at once, and every odd row with another layout and block at its other end.
ROWS = [layout for layout in LAYOUTS if layout != "folded"]
PULLS = [
    *((Shape(ours, planes=2, skip=32), Shape(theirs, planes=2, block_tokens=8)) for ours in ROWS for theirs in ROWS),
    *(
        (shape, replace(shape, layout="hnd" if shape.layout == "nhd" else "nhd", block_tokens=6, shift=0, skip=0))
        for shape in MOVES
        if shape.layout != "folded"
    ),
    *((shape, replace(shape, shift=4)) for shape in MOVES if shape.layout == "folded"),
    (Shape("nhd", width=9, size=1, shift=3), Shape("columns", width=9, size=1, shift=2)),
]
WIRES = tuple(DTYPES)
INDEX_KEYS = Rows("page", heads=1, width=128, moved=range(0, 1))


def ends_of(
    sender: Sequence[Shape],
    receiver: Sequence[Shape],
    blocks: int,
    wanted: int,
    casts: tuple[Cast | None, Cast | None] = (None, None),
    tame: bool = False,
) -> Ends:
    """Segments of both ends and the bytes of their slot."""
    senders, size = chunk_of(sender, blocks, wanted, casts[0], seed=0, tame=tame)
    receivers, their_size = chunk_of(receiver, blocks, wanted, casts[1], seed=5, tame=tame)
    assert size == their_size
    return senders, receivers, size


def converted(
    old: str, new: str, wire: str, scales: tuple[int, int] | None, layouts: tuple[str, str], wanted: int = 5
) -> Ends:
    """Numbers of one codec in the sender, of another in the receiver; tame, and scaled where that has 8 bits."""
    sides = []
    for name, seed in ((old, 1), (new, 2)):
        is_scaled = scales is not None and DTYPES[name].itemsize == 1
        sides.append(number(name, scales if is_scaled else None, seed=seed, is_exact=True))
    middle = sides[0] if wire == old else sides[1] if wire == new else number(wire, None)
    casts = tuple(None if name == wire else Cast(side, middle) for name, side in zip((old, new), sides, strict=True))
    shapes = [
        Shape(layout, heads=3, width=24, size=DTYPES[name].itemsize, planes=2)
        for layout, name in zip(layouts, (old, new), strict=True)
    ]
    return ends_of(shapes[:1], shapes[1:], 3, wanted, casts, tame=True)


def rotated(rows: Rows, ours: str, theirs: str, rotates: bool, wanted: int = 9, **changes: Any) -> Ends:
    """Rows with scales of their own at both ends, in the form `ours` and `theirs`; the receiver's are `changes`."""
    one, size = segment_of(replace(rows, form=ours), "fp8_e4m3", Number("fp32"), wanted, tame=True)
    receiver = replace(rows, form=theirs, **changes)
    other, _ = segment_of(receiver, "fp8_e4m3", Number("fp32"), wanted, seed=3, rotates=rotates)
    return [one], [other], size


def check_pull(
    by: Move,
    ends: Ends,
    device: str = "cpu",
    has_sums: bool = True,
    name: str | None = None,
) -> None:
    """All of the receiver's memory against the twins through a slot, and the digest against that of a gather.

    `name` says what the receiver's numbers are where it does not convert them: one NaN is as good as another.
    """
    senders, receivers, size = ends
    _whole, span = slot_on("cpu", size)
    gather(senders, span, None, Work("cpu"))
    twins = on(receivers, "cpu")
    scatter(twins, span, None, Work("cpu"))
    assert receivers[0].places.count == 0 or not torch.equal(twins[0].field.memory, receivers[0].field.memory)

    ours, theirs = on(senders, device), on(receivers, device)
    sums = torch.full((1,), 77, dtype=torch.int64, device=device)
    by(Prepared(ours, theirs, size).chunk, work_on(device), None, sums if has_sums else None)
    named = [replace(receiver, cast=Cast(Number(name), Number(name))) for receiver in receivers] if name else receivers
    assert_same_memory(named, theirs[0].field.memory.cpu(), twins[0].field.memory)
    assert torch.equal(ours[0].field.memory.cpu(), senders[0].field.memory)
    if has_sums:
        wanted = torch.full_like(sums, 77)
        _slot, span = slot_on(device, size)
        gather(ours, span, wanted, work_on(device), by)
        assert added(sums) == added(wanted)


# Ends whose rows may come in three chunks: with one tile and with several, with two lists of places on each side, and
# converted.
JOINED = {
    **{f"{ours} to {theirs}": ends_of([ours], [theirs], 12, 12) for ours, theirs in PULLS[::9]},
    "several tiles": ends_of([Shape("nhd", width=576)], [Shape("nhd", width=576, block_tokens=6)], 60, 90),
    "two lists a side": ends_of(
        [Shape("nhd", planes=2), Shape("hnd", block_tokens=8, planes=2)],
        [Shape("hnd", planes=2, block_tokens=8), Shape("nhd", planes=2)],
        60,
        90,
    ),
    "converted": converted("bf16", "fp8_e4m3", "fp8_e4m3", (1, 3), ("nhd", "hnd"), 6),
    "lists of scales": rotated(INDEX_KEYS, "pow2_fp32", "ue8m0_x4", True, 18, where="token"),
}


def check_joined(by: Move, ends: Ends) -> None:
    """The same rows in one chunk, and in so many that share launches, each with as many places."""
    (senders, receivers, size), chunks = ends, 3
    ours, whole, parts = on(senders, "cpu"), on(receivers, "cpu"), on(receivers, "cpu")
    by(Prepared(ours, whole, size).chunk, work_on("cpu"))

    def nth(segments: list[Segment], number: int) -> list[Segment]:
        found, lists = [], dict[int, Places]()
        for segment in segments:
            count = segment.places.count // chunks
            some = segment.places.array[number * count : (number + 1) * count]
            places = lists.setdefault(id(segment.places), Places(some))
            start, pitch = segment.slot_offset // chunks, segment.slot_pitch // chunks
            found.append(replace(segment, places=places, slot_offset=start, slot_pitch=pitch))
        return found

    prepared = [Prepared(nth(ours, i), nth(parts, i), size // chunks) for i in range(chunks)]
    together = joined([prepared[0].at(*each.chunk.places) for each in prepared])
    assert together.chunks == chunks
    by(together, work_on("cpu"))
    assert_same_memory(parts, parts[0].field.memory.cpu(), whole[0].field.memory.cpu())
    assert not torch.equal(parts[0].field.memory.cpu(), receivers[0].field.memory)
    sums = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"sums: one for {chunks} chunks"):
        by(together, work_on("cpu"), None, sums)
