"""The kernels under Triton's interpreter, on the CPU. tests/unit/kernels/test_kernels.py runs this in its own process.

The interpreter misreads infinities, NaN and subnormals, and truncates where it should round to bf16. These are compared
on a GPU (tests/system/gpu/test_kernels.py), and so is the processor's own rounding to 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.launch import NotCompiled, move, warm
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Places, Span
from kvbridge_kernels.tables import Work
from triton.runtime import interpreter

from tests.unit.kernels.chunks import (
    MOVES,
    Shape,
    check_digest,
    check_gather,
    check_scatter,
    chunk_of,
    gather,
    number,
    on,
    scatter,
    slot_on,
    work_on,
)
from tests.unit.kernels.rows import WHERE, Rows, check_rows, check_rows_scattered, segment_of

# It replaces Triton's language anew whenever a kernel calls a function, which took half of all time. Once is enough.
interpreter._patch_lang = cache(interpreter._patch_lang)
interpreter._LangPatchScope.restore = lambda scope: None


@pytest.mark.parametrize("shape", MOVES, ids=str)
def test_rows_move_bit_for_bit(shape: Shape) -> None:
    segments, size = chunk_of([shape], 3, 7)
    check_gather(move, segments, size)
    check_scatter(move, segments, size)
    check_digest(move, segments, size)


def test_a_digest_of_converted_rows_needs_no_slot() -> None:
    cast = Cast(number("fp8_e4m3", (2, 3), is_exact=True), number("bf16", None))
    segments, size = chunk_of([Shape("nhd", heads=3, width=40, size=1, planes=2)] * 2, 3, 5, cast, tame=True)
    check_digest(move, segments, size)


def test_a_chunk_of_several_forms_is_several_launches() -> None:
    shapes = [Shape("nhd", planes=3), Shape("hnd"), Shape("folded"), Shape("nhd", shift=1), Shape("nhd")]
    segments, size = chunk_of(shapes, 3, 5)
    check_gather(move, segments, size)
    check_scatter(move, segments, size)


# What the interpreter can do: from numbers that are neither tiny nor infinite, to bf16 without rounding.
CASTS = [
    ("fp8_e4m3", "bf16"),
    ("fp8_e5m2", "fp16"),
    ("fp8_e4m3", "fp32"),
    ("int8", "fp32"),
    ("fp16", "fp32"),
    ("bf16", "fp32"),
    ("bf16", "fp8_e4m3"),
    ("fp32", "fp8_e5m2"),
    ("fp16", "int8"),
    ("fp8_e5m2", "fp8_e4m3"),
]
assert {name for pair in CASTS for name in pair} == DTYPES.keys()


SCALES = [None, (1, 1), (2, 1), (1, 3)]


@pytest.mark.parametrize(
    ("old", "new", "scales"), [*((*pair, (2, 3)) for pair in CASTS), *((*CASTS[0], scales) for scales in SCALES)]
)
def test_numbers_become_what_the_twin_makes_of_them(old: str, new: str, scales: tuple[int, int] | None) -> None:
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    shape = Shape("nhd", heads=3, width=24, size=sizes[old], planes=2)
    cast = Cast(number(old, scales, is_exact=new == "bf16"), number(new, scales if sizes[new] == 1 else None, seed=1))
    segments, size = chunk_of([shape], 3, 3, cast, tame=True)
    check_gather(move, segments, size)
    shape = Shape("columns", heads=3, width=24, size=sizes[new], planes=2, shift=sizes[new] // 2)
    cast = Cast(number(new, None), number(old, scales, is_exact=new == "bf16"))
    segments, size = chunk_of([shape], 3, 3, cast, tame=True)
    check_scatter(move, segments, size, tame=True)


@pytest.mark.parametrize("width", [7, 6])
def test_rows_of_odd_widths_are_rounded_and_summed(width: int) -> None:
    shape = Shape("nhd", width=width, slot_shift=width % 2)
    segments, size = chunk_of(
        [shape], 3, 5, Cast(number("bf16", None), number("fp8_e4m3", (1, 1), is_exact=True)), tame=True
    )
    check_gather(move, segments, size)
    check_scatter(move, segments, size, tame=True)


ROWS = [
    *(Rows(where, planes=2) for where in WHERE),
    Rows("token", heads=6, width=128, moved=range(0, 4)),
    Rows("behind", width=24),
    Rows("behind", width=576, heads=1, moved=range(0, 1)),
    Rows("head", width=4, block_tokens=1),
]


@pytest.mark.parametrize(("name", "wire"), [("fp8_e4m3", "fp32"), ("int8", "fp32"), ("fp8_e4m3", "fp8_e5m2")])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_have_scales_of_their_own(rows: Rows, name: str, wire: str) -> None:
    check_rows(move, rows, name, Number(wire), tame=True)


@pytest.mark.parametrize("form", ["pow2_fp32", "ue8m0_x4"])
@pytest.mark.parametrize("rotates", [False, True])
def test_index_keys_are_rotated_and_their_scales_rounded_up(form: str, rotates: bool) -> None:
    rows = Rows("page", heads=1, width=128, moved=range(0, 1), form=form, planes=2)
    check_rows(move, rows, "fp8_e4m3", Number("fp32"), tame=True, rotates=rotates)


@pytest.mark.parametrize(("name", "width"), [("fp8_e5m2", 16), ("fp32", 64)])
def test_plain_rows_are_rotated_too(name: str, width: int) -> None:
    shape = Shape("columns", heads=3, width=width, size=DTYPES[name].itemsize, planes=2)
    segments, size = chunk_of([shape], 3, 5, Cast(number(name, None), number("fp32", None), rotates=True), tame=True)
    check_scatter(move, segments, size, tame=True)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_rows_with_scales_and_scales_on_the_wire(wire: str, is_scaled: bool) -> None:
    each = number(wire, (1, 2), is_exact=True) if is_scaled else Number(wire)
    check_rows(move, Rows("token", width=40), "int8" if wire == "fp8_e4m3" else "fp8_e4m3", each, tame=True)


def test_a_row_without_a_largest_number_and_one_with_only_that() -> None:
    """Zeros get the smallest scale, a row's last number counts, and a NaN does not."""
    rows = Rows("token", width=40)
    segment, size = segment_of(rows, "fp8_e4m3", Number("fp32"), 9)
    sent = torch.zeros(size, dtype=torch.uint8)
    values = sent[16 : 16 + segment.plane_bytes].view(torch.float32).view(2, 9, 40)
    values[0, 1, 39], values[0, 2, 0], values[1, 3, 7], values[1, 4] = 5.0, -7.0, 1e37, -1e-3
    values[1, 8, :2] = torch.tensor([torch.nan, 0.3])
    check_rows_scattered(move, rows, segment, sent, "cpu")


def test_scales_outside_of_memory_are_refused_in_every_segment_of_a_form() -> None:
    """The second is like the first but at the end of the memory."""
    rows = Rows("behind", width=8)
    segment, size = segment_of(rows, "int8", Number("bf16"), 2)
    field = segment.field
    end = field.memory.numel() - (field.end - field.offset)
    late = replace(segment, field=replace(field, offset=end), slot_offset=size)
    _, span = slot_on("cpu", 2 * size)
    for copy in (gather, scatter):
        with pytest.raises(ValueError, match="row scales from byte"):
            copy([segment, late], span, None, work_on("cpu"), move)


def test_no_places_and_no_segments_clear_the_slot() -> None:
    for shapes in ([Shape("nhd")], []):
        segments, _ = chunk_of([Shape("nhd")], 3, 0)
        whole, span = slot_on("cpu", 100)
        sums = torch.ones(1, dtype=torch.int64)
        gather(segments if shapes else [], span, sums, Work("cpu"), move)
        assert int(sums) == 1 and not whole[64:-64].any()


def test_a_prepared_copy_is_used_with_other_places() -> None:
    shapes = [Shape("nhd", planes=2), Shape("hnd"), Shape("folded"), Shape("nhd", slot_shift=4)]
    prepared, work = None, work_on("cpu")
    for seed in range(3):
        segments, size = chunk_of(shapes, 3, 5, seed=seed)
        memory = segments[0].field.memory
        if prepared is None:
            kept, prepared = memory, Prepared(segments, None, size)
        kept.copy_(memory)
        places = [*{id(segment.places): segment.places for segment in segments}.values()]
        found, span = slot_on("cpu", size)
        wanted, wanted_span = slot_on("cpu", size)
        sums, wanted_sums = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        move(prepared.at(places), work, span, sums)
        gather(segments, wanted_span, wanted_sums, Work("cpu"))
        assert torch.equal(found, wanted) and torch.equal(sums, wanted_sums)
    with pytest.raises(ValueError, match="4 places, the copy was prepared with 5"):
        prepared.at([Places(torch.arange(4)), places[1]])
    with pytest.raises(ValueError, match="places reach from 8 to 12, the field has 12"):
        prepared.at([Places(torch.arange(8, 13)), places[1]])
    with pytest.raises(ValueError, match="1 lists of places, the copy was prepared with 2"):
        prepared.at(places[:1])
    with pytest.raises(ValueError, match=f"slot: {size - 1} bytes, the copy was prepared for {size}"):
        move(prepared.at(places), work, Span(span.address, size - 1))


def test_warming_writes_nothing() -> None:
    segments, size = chunk_of([Shape("nhd"), Shape("columns")], 3, 5)
    whole, span = slot_on("cpu", size)
    chunk = Prepared(segments, None, size).chunk
    warm(chunk, Work("cpu"), span, True)
    warm(chunk, Work("cpu"), None, True)
    assert (whole == 0xA5).all()


def test_who_does_not_compile_is_told_what_is_new_before_anything_is_written() -> None:
    segments, size = chunk_of([Shape("nhd"), Shape("columns")], 3, 5)
    whole, span = slot_on("cpu", size)
    work, chunk = Work("cpu", compiles=False), Prepared(segments, None, size).chunk
    for act in (lambda: move(chunk, work, span), lambda: warm(chunk, work, span, False)):
        with pytest.raises(NotCompiled) as missing:
            act()
        assert [each.kernel.compiled for each in missing.value.launches] == [None, None]
    assert (whole == 0xA5).all()
    for launch in missing.value.launches:
        launch.kernel.compiled = launch  # as if another thread had: the interpreter makes nothing to keep
    warm(chunk, work, span, False)


def test_refuses_what_does_not_fit_before_anything_is_written() -> None:
    segments, size = chunk_of([Shape("nhd"), Shape("hnd")], 3, 5)
    before = segments[0].field.memory.clone()
    whole, span = slot_on("cpu", size)
    work = Work("cpu")
    short = segments[-1].slot_end - 1
    for copy in (gather, scatter):
        with pytest.raises(ValueError, match=f"segment ends at byte {short + 1}, the slot has {short}"):
            copy(segments, Span(span.address, short), None, work, move)
        with pytest.raises(ValueError, match=r"sums must be int64 \[1\]"):
            copy(segments, span, torch.zeros(2, dtype=torch.int64), work, move)
        with pytest.raises(ValueError, match="work has 64"):
            copy(segments, span, None, Work("cpu", 64), move)
    assert (whole == 0xA5).all() and torch.equal(on(segments, "cpu")[0].field.memory, before)
