"""The kernels under Triton's interpreter, on the CPU; run by test_kernels.py in a process of its own.

The interpreter cuts bits off where it should round, and misreads infinities, NaN and subnormals: those are compared on
a GPU, tests/gpu/test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from kvbridge_kernels.codecs_ref import Cast
from kvbridge_kernels.gather import gather, warm
from kvbridge_kernels.scatter import scatter
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import Work

from tests.kernels.chunks import Shape, check_gather, check_scatter, chunk_of, number, on, slot_on

LAYOUTS = ["nhd", "hnd", "columns", "tiled", "folded"]
MOVES = [
    *(Shape(layout, planes=2, skip=32) for layout in LAYOUTS),
    *(Shape("nhd", width=width) for width in (80, 96, 128, 576, 8, 24, 7, 1)),
    *(Shape("hnd", heads=heads, width=16) for heads in (1, 3, 6, 32)),
    *(Shape(layout, width=40, shift=shift) for layout, shift in zip(LAYOUTS, (1, 2, 4, 8, 2), strict=True)),
    *(Shape(layout, width=8, shift=1) for layout in LAYOUTS),
    Shape("nhd", width=5, size=1, heads=3),
    Shape("nhd", slot_shift=4),
    Shape("hnd", width=9, size=1, slot_shift=3, shift=5, skip=1),
    Shape("nhd", size=4, block_tokens=1),
    Shape("folded", width=1536, heads=8),
]


@pytest.mark.parametrize("shape", MOVES, ids=str)
def test_rows_move_bit_for_bit(shape: Shape) -> None:
    segments, size = chunk_of([shape], 3, 7)
    check_gather(gather, segments, size)
    check_scatter(scatter, segments, size)


def test_a_chunk_of_several_forms_is_several_launches() -> None:
    shapes = [Shape("nhd", planes=3), Shape("hnd"), Shape("folded"), Shape("nhd", shift=1), Shape("nhd")]
    segments, size = chunk_of(shapes, 3, 5)
    check_gather(gather, segments, size)
    check_scatter(scatter, segments, size)


# What the interpreter can do: to more bits, from numbers that are neither tiny nor infinite, to bf16 without rounding.
CASTS = [
    ("fp8_e4m3", "bf16"),
    ("fp8_e5m2", "fp16"),
    ("fp8_e4m3", "fp32"),
    ("int8", "fp32"),
    ("fp16", "fp32"),
    ("bf16", "fp32"),
]


SCALES = [None, (1, 1), (2, 1), (1, 3)]


@pytest.mark.parametrize(
    ("old", "new", "scales"), [*((*pair, (2, 3)) for pair in CASTS), *((*CASTS[0], scales) for scales in SCALES)]
)
def test_numbers_widen_exactly(old: str, new: str, scales: tuple[int, int] | None) -> None:
    sizes = {"fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "fp16": 2, "bf16": 2, "fp32": 4}
    shape = Shape("nhd", heads=3, width=40, size=sizes[old], planes=2)
    cast = Cast(number(old, scales, is_exact=new == "bf16"), number(new, None))
    segments, size = chunk_of([shape, shape], 3, 5, cast, tame=True)
    check_gather(gather, segments, size)
    shape = Shape("columns", heads=3, width=40, size=sizes[new], planes=2, shift=sizes[new] // 2)
    cast = Cast(number(new, None), number(old, scales, is_exact=new == "bf16"))
    segments, size = chunk_of([shape], 3, 5, cast, tame=True)
    check_scatter(scatter, segments, size, tame=True)


def test_no_places_and_no_segments_clear_the_slot() -> None:
    for shapes in ([Shape("nhd")], []):
        segments, _ = chunk_of([Shape("nhd")], 3, 0)
        whole, span = slot_on("cpu", 100)
        sums = torch.ones(1, dtype=torch.int64)
        gather(segments if shapes else [], span, sums, Work("cpu"))
        assert int(sums) == 0 and not whole[64:-64].any()


def test_warming_writes_nothing() -> None:
    segments, size = chunk_of([Shape("nhd"), Shape("columns")], 3, 5)
    whole, span = slot_on("cpu", size)
    warm(segments, span, True, Work("cpu"))
    assert (whole == 0xA5).all()


def test_refuses_what_does_not_fit_before_anything_is_written() -> None:
    segments, size = chunk_of([Shape("nhd"), Shape("hnd")], 3, 5)
    before = segments[0].field.memory.clone()
    whole, span = slot_on("cpu", size)
    work = Work("cpu")
    short = segments[-1].slot_end - 1
    for move in (gather, scatter):
        with pytest.raises(ValueError, match=f"segment ends at byte {short + 1}, the slot has {short}"):
            move(segments, Span(span.address, short), None, work)
        with pytest.raises(ValueError, match=r"sums must be int64 \[1\]"):
            move(segments, span, torch.zeros(2, dtype=torch.int64), work)
        with pytest.raises(ValueError, match="work has 64"):
            move(segments, span, None, Work("cpu", 64))
    assert (whole == 0xA5).all() and torch.equal(on(segments, "cpu")[0].field.memory, before)
