"""The pull kernel under Triton's interpreter. test_kernels.py runs this, with the limits of interpreted.py."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_kernels import launch_ref
from kvbridge_kernels.codecs_ref import Number
from kvbridge_kernels.launch import chunks_at_once, move, warm
from kvbridge_kernels.prepared import Prepared, joined
from kvbridge_kernels.segment import Places, Segment
from kvbridge_kernels.tables import Work
from triton.runtime.interpreter import GridExecutor

from kvbridge.device.memory import AttachedPool, PartSide, Templates
from kvbridge.geometry.plan import Part
from kvbridge.geometry.unfilled import Filling
from testing import oracle
from testing.carried import Mapped
from tests.unit.kernels.chunks import MOVES, Shape, chunk_of, on, work_on
from tests.unit.kernels.interpreted import CASTS
from tests.unit.kernels.pulls import (
    INDEX_KEYS,
    JOINED,
    PULLS,
    Ends,
    check_joined,
    check_pull,
    converted,
    ends_of,
    rotated,
)
from tests.unit.kernels.rows import Rows, segment_of


@pytest.mark.parametrize(("sender", "receiver"), PULLS[::8], ids=str)
def test_rows_are_pulled_bit_for_bit(sender: Shape, receiver: Shape) -> None:
    check_pull(move, ends_of([sender], [receiver], 3, 7))


@pytest.mark.parametrize("shape", [MOVES[0], MOVES[8]], ids=str)
def test_no_digest_is_taken_where_none_is_wanted(shape: Shape) -> None:
    check_pull(move, ends_of([shape], [replace(shape, layout="hnd")], 3, 7), has_sums=False)


@pytest.mark.parametrize("ends", JOINED.values(), ids=JOINED)
def test_chunks_that_share_launches(ends: Ends) -> None:
    check_joined(move, ends)


def test_a_chunk_of_several_forms_on_either_side() -> None:
    senders = [Shape("nhd", planes=3), Shape("hnd"), Shape("folded"), Shape("nhd", shift=1), Shape("nhd")]
    receivers = [Shape("hnd", planes=3), Shape("hnd", shift=2), Shape("folded"), Shape("columns"), Shape("nhd")]
    check_pull(move, ends_of(senders, receivers, 3, 5))


@pytest.mark.parametrize(("old", "new"), CASTS)
def test_numbers_become_what_the_twins_make_of_them(old: str, new: str) -> None:
    check_pull(move, converted(old, new, old, (2, 3), ("columns", "hnd")))
    check_pull(move, converted(old, new, new, (2, 3), ("nhd", "columns")))


@pytest.mark.parametrize("scales", [None, (1, 1), (2, 1), (1, 3)])
def test_scales_of_every_shape(scales: tuple[int, int] | None) -> None:
    check_pull(move, converted("fp8_e4m3", "bf16", "fp8_e4m3", scales, ("nhd", "hnd")))
    check_pull(move, converted("bf16", "fp8_e4m3", "fp8_e4m3", scales, ("hnd", "nhd")), has_sums=False)


ROW_SCALED = [
    (Rows("behind", planes=2), Rows("token", planes=2, heads=6)),
    (Rows("head", width=24), Rows("before", width=24, block_tokens=8)),
    (Rows("token", width=128, heads=4, moved=range(0, 4)), Rows("head", width=128, heads=4, moved=range(0, 4))),
]


@pytest.mark.parametrize(("ours", "theirs"), [("fp8_e4m3", "int8"), ("int8", "fp8_e4m3")])
@pytest.mark.parametrize(("sender", "receiver"), ROW_SCALED, ids=str)
def test_rows_with_scales_of_their_own_at_both_ends(sender: Rows, receiver: Rows, ours: str, theirs: str) -> None:
    one, size = segment_of(sender, ours, Number("fp32"), 9, tame=True, is_exact=True)
    other, _ = segment_of(receiver, theirs, Number("fp32"), 9, seed=3)
    check_pull(move, ([one], [other], size))


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("pow2_fp32", "pow2_fp32"), ("pow2_fp32", "ue8m0_x4"), ("ue8m0_x4", "pow2_fp32")]
)
def test_index_keys_become_what_the_other_engine_keeps(ours: str, theirs: str, rotates: bool) -> None:
    """Scales any fp32, as SGLang's are: a product that is fused with a sum would be seen."""
    check_pull(move, rotated(INDEX_KEYS, ours, theirs, rotates))


@pytest.mark.parametrize("is_sender", [True, False])
@pytest.mark.parametrize("plain", ["fp32", "fp16", "fp8_e5m2"])
def test_rows_with_scales_of_their_own_at_one_end(plain: str, is_sender: bool) -> None:
    """The plain side keeps the rows as they are on the way."""
    own, size = segment_of(Rows("token", width=40), "fp8_e4m3", Number(plain), 9, tame=True, is_exact=True)
    sizes = {"fp32": 4, "fp16": 2, "fp8_e5m2": 1}
    senders, _ = chunk_of([Shape("hnd", width=40, size=sizes[plain])], 3, 9, tame=True)
    plainly = replace(senders[0], slot_offset=own.slot_offset, slot_pitch=own.slot_pitch)
    check_pull(move, ([own], [plainly], size) if is_sender else ([plainly], [own], size))


def test_planes_meet_however_they_are_cut() -> None:
    senders, receivers, size = ends_of([Shape("nhd", planes=5)], [Shape("hnd", planes=5)], 3, 7)
    (whole,) = receivers
    check_pull(move, (senders, apart(whole), size))
    check_pull(move, (apart(senders[0]), [whole], size))


def apart(segment: Segment) -> list[Segment]:
    """A plane each."""
    stride = segment.field.planes.stride
    return [
        replace(
            segment,
            field=replace(
                segment.field, offset=segment.field.offset + i * stride, planes=segment.field.planes._replace(count=1)
            ),
            slot_offset=segment.slot_offset + i * segment.slot_pitch,
        )
        for i in range(segment.field.planes.count)
    ]


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_programs_walks_all_tiles(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []
    run = GridExecutor.__call__

    def noted(executor: GridExecutor, *arguments: object, **constants: object) -> object:
        grids.append(executor.grid[0])
        return run(executor, *arguments, **constants)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    ends = ends_of([Shape("nhd", planes=4, heads=8)], [Shape("hnd", planes=4, heads=8)], 5, 19)

    def at_once(placed: Any, work: Work, *rest: Any) -> None:
        work.launch_us = 100.0  # so that one launch has all tiles
        move(placed, work, *rest, programs=programs)

    check_pull(at_once, ends)
    assert max(grids) <= programs


def test_a_prepared_pull_is_used_with_other_places() -> None:
    shapes = [Shape("nhd", planes=2), Shape("folded")], [Shape("hnd", planes=2), Shape("folded")]
    senders, receivers, size = ends_of(*shapes, 3, 2)
    prepared, work, memory = Prepared(senders, receivers, size), work_on("cpu"), receivers[0].field.memory
    before = memory.clone()
    for step in range(3):
        chunk = prepared.at(*([Places((each.index + step) % 3) for each in end.places] for end in prepared.memories))
        found = []
        for run in (move, launch_ref.move):
            memory.copy_(before)
            run(chunk, work)
            found.append(memory.clone())
        assert torch.equal(*found) and not torch.equal(found[0], before)
    with pytest.raises(ValueError, match="3 places, the copy was prepared with 2"):
        prepared.at([Places(torch.arange(3))] * 2, prepared.memories[1].places)


def test_warming_writes_nothing() -> None:
    senders, receivers, size = ends_of([Shape("nhd")], [Shape("columns")], 3, 5)
    before = on(receivers, "cpu")[0].field.memory
    warm(Prepared(senders, receivers, size).chunk, work_on("cpu"), None, True)
    assert torch.equal(receivers[0].field.memory, before)


def test_as_many_chunks_share_launches_as_the_tables_have_room_for() -> None:
    senders, receivers, size = ends_of([Shape("nhd", planes=2)], [Shape("hnd", planes=2)], 3, 5)
    prepared, work = Prepared(senders, receivers, size), Work("cpu", table_bytes=1000)
    assert not chunks_at_once(prepared, work), "its kernels are not compiled yet"
    for kernel in work.kernels.chosen.values():
        kernel.compiled = object()  # the interpreter compiles none
    most = chunks_at_once(prepared, work)
    for kernel in work.kernels.chosen.values():
        kernel.compiled = None
    assert most > 1
    move(joined([prepared.chunk] * most), work)
    with pytest.raises(ValueError, match="tables take"):
        move(joined([prepared.chunk] * (most + 1)), work)


@pytest.mark.parametrize(
    "shape",
    [
        oracle.Shape("nhd", layers=3, drafts=1),
        oracle.Shape("cross_layer", layers=4, drafts=2),
        oracle.Shape("cpu_vec", layers=3, drafts=1, block_tokens=32, key_width=8, value_width=8),
        oracle.Shape("hnd", layers=3, drafts=1, codec="fp8_row_scale", block_tokens=8, blocks=24),
    ],
    ids=lambda shape: f"{shape.layout} {shape.codec}",
)
def test_one_block_of_zeros_fills_the_draft_s_rows_of_any_blocks(shape: oracle.Shape) -> None:
    held = oracle.build(shape)
    for region in held.memory:
        region[:] = 0xFF
    before, tokens = held.copy(), range(32, 96)
    table = oracle.table_of(held.pool, tokens.stop, seed=1)
    filling = Filling(held.pool, held.pool.model.drafts)
    planned, tables = filling.plan(tokens.start, tokens.stop), oracle.block_table(held.pool, table)
    mapped = Mapped(held.pool, [torch.from_numpy(region) for region in held.memory])
    with closing(AttachedPool.of_zeros(filling.zeros, "cpu")) as zeros, zeros.hold() as given, mapped.hold() as taken:
        for chunk in map(planned.chunk, range(planned.chunks)):
            theirs = Part(planned, chunk, filling.tables(tables), is_sender=True)
            ours = Part(planned, chunk, tables, is_sender=False)
            sides = PartSide(zeros, given, theirs), PartSide(mapped, taken, ours)
            move(Templates().of(*sides, chunk.size_bytes), work_on("cpu"))
    for plane in before.pool.planes:
        if plane.layer in filling.layers:
            _, places = oracle.rows_at(before.pool, plane.group, table, tokens)
            empty = np.zeros((len(places), plane.heads, plane.codec.row_bytes), np.uint8)
            oracle.put_rows(before, plane, places, empty)
    assert all(map(np.array_equal, held.memory, before.memory))
