"""The kernels on a GPU against their twins, bit for bit: every codec, addresses beyond 2^31 elements, streams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, SCALE_FORMS, Cast, Number
from kvbridge_kernels.digest_ref import sum64
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Places, Segment, Span
from kvbridge_kernels.tables import Work

from tests.unit.kernels import slow_codecs as slow
from tests.unit.kernels.chunks import (
    GUARD,
    MOVES,
    POISON,
    Shape,
    assert_same_memory,
    assert_same_rows,
    check_digest,
    check_gather,
    check_scatter,
    chunk_of,
    field_of,
    gather,
    memory_of,
    number,
    on,
    rows_by_head,
    scatter,
    slot_on,
)
from tests.unit.kernels.pulls import INDEX_KEYS
from tests.unit.kernels.rows import WHERE, Rows, check_rows, check_rows_scattered, segment_of
from tests.unit.kernels.test_codecs import CORNERS, NANS, bytes_as_stored, patterns_of, stored_as_bytes
from tests.unit.kernels.test_row_scales import SCALES as ROW_SCALES
from tests.unit.kernels.test_row_scales import odd_rows, rows_of

pytest.importorskip("triton")
from kvbridge_kernels.launch import move, warm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
PAIRS = [
    *((old, new) for old in ("bf16", "fp16", "fp32") for new in ("fp8_e4m3", "fp8_e5m2", "int8")),
    *((old, new) for old in ("fp8_e4m3", "fp8_e5m2") for new in ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")),
    *(("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16"), ("int8", "bf16"), ("int8", "fp8_e4m3")),
]
assert {old for old, _ in PAIRS} == {new for _, new in PAIRS} == DTYPES.keys()
# A power of two, some that are not, one that overflows 8 bits, one that leaves nothing, one too small to divide fast.
SCALES = (1.0, 0.5, 0.0371, 1e-4, 37.0, 1.7e9)


@pytest.mark.parametrize("shape", MOVES, ids=str)
def test_rows_move_bit_for_bit(shape: Shape) -> None:
    segments, size = chunk_of([shape], 9, 21)
    check_gather(move, segments, size, "cuda")
    check_digest(move, segments, size, "cuda")
    check_scatter(move, segments, size, "cuda")


def test_a_chunk_of_several_forms_is_several_launches() -> None:
    shapes = [Shape("nhd", planes=3), Shape("hnd"), Shape("folded"), Shape("nhd", shift=1), Shape("nhd")]
    segments, size = chunk_of(shapes, 9, 9)
    check_gather(move, segments, size, "cuda")
    check_scatter(move, segments, size, "cuda")


def every_pattern(old: str, cast: Cast, heads: int) -> list[Segment]:
    """All numbers of a codec (fp32: about a million) once for each head, in rows of 64."""
    stored = stored_as_bytes(patterns_of(old), old)
    row = 64 * SIZES[old]
    stored = stored[: stored.size // row * row]
    rows = stored.size // row
    field = rows_by_head(torch.from_numpy(np.tile(stored, heads)), rows, heads, 64, SIZES[old])
    return [Segment(field, Places(torch.arange(rows)), 0, 0, cast)]


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("scaled", ["no", "old", "new", "both", "tiny"])
def test_every_pattern_becomes_what_the_twin_makes_of_it(old: str, new: str, scaled: str) -> None:
    heads = len(SCALES)
    old_scale = torch.tensor([SCALES[::-1]])
    new_scale = torch.tensor([SCALES]) if scaled != "tiny" else torch.tensor([[1e-30, 1e-20, 1e20, 1e30, 1e-38, 1.0]])
    cast = Cast(
        Number(old, old_scale if scaled in ("old", "both") else None),
        Number(new, new_scale if scaled in ("new", "both", "tiny") else None),
    )
    segments = every_pattern(old, cast, heads)
    check_gather(move, segments, segments[0].plane_bytes, "cuda")


@pytest.mark.parametrize(("memory", "wire"), [("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "bf16")])
@pytest.mark.parametrize("layout", ["nhd", "columns"])
def test_numbers_are_put_back_as_the_twin_does(memory: str, wire: str, layout: str) -> None:
    shape = Shape(layout, heads=3, width=80, size=SIZES[memory], planes=2, shift=SIZES[memory] // 2)
    cast = Cast(number(memory, (2, 3)), number(wire, (1, 3), seed=1))
    segments, size = chunk_of([shape, shape], 9, 21, cast)
    check_gather(move, segments, size, "cuda")
    check_scatter(move, segments, size, "cuda")


@pytest.mark.parametrize("width", [7, 12, 80])
def test_rows_of_any_width_are_summed_as_they_are_written(width: int) -> None:
    cast = Cast(number("bf16", None), number("fp8_e4m3", (1, 1)))
    for shift in (0, 1):
        segments, size = chunk_of([Shape("nhd", width=width, slot_shift=shift)], 9, 21, cast)
        check_gather(move, segments, size, "cuda")
        check_scatter(move, segments, size, "cuda")


def test_scales_that_no_inverse_serves_are_divided_by() -> None:
    """Each of these puts some bf16 on a tie of e4m3 or beside it."""
    values, ties = 1 + torch.arange(128) / 128, torch.arange(17, 32, 2) / 16
    scales = (values[:, None] / ties[None, :]).flatten().unique()[:768].view(1, -1)
    stored = torch.from_numpy(patterns_of("bf16").astype(np.uint16)[0x3800:0x4800].view(np.uint8))
    heads, rows = scales.shape[1], stored.numel() // 128
    field = rows_by_head(stored.repeat(heads), rows, heads, 64, 2)
    for name in ("fp8_e4m3", "fp8_e5m2"):
        cast = Cast(Number("bf16"), Number(name, scales))
        segment = Segment(field, Places(torch.arange(rows)), 0, 0, cast)
        check_gather(move, [segment], segment.plane_bytes, "cuda")


EIGHTS = tuple(name for name, size in SIZES.items() if size == 1)


@pytest.mark.parametrize("new", DTYPES)
@pytest.mark.parametrize("old", EIGHTS)
def test_every_8_bit_pattern(old: str, new: str) -> None:
    """Under every pair of scales, a head each: gathered into every codec, scattered out of any 8 bits."""
    pairs = torch.tensor([(first, second) for first in SCALES for second in SCALES]).T.contiguous()
    ours, theirs = Number(old, pairs[:1]), Number(new, pairs[1:])
    heads, patterns = pairs.shape[1], torch.arange(256, dtype=torch.uint8)
    memory = patterns.repeat(heads)
    segment = Segment(rows_by_head(memory, 1, heads, 256, 1), Places(torch.arange(1)), 0, 0, Cast(ours, theirs))
    check_gather(move, [segment], segment.plane_bytes, "cuda")

    poisoned = torch.full((heads * 256 * SIZES[new],), POISON, dtype=torch.uint8)
    field = rows_by_head(poisoned, 1, heads, 256, SIZES[new])
    segment = Segment(field, Places(torch.arange(1)), 0, 0, Cast(theirs, ours))
    check_scatter(move, [segment], segment.plane_bytes, "cuda", sent=memory)


@pytest.mark.parametrize("copies", [1, 4])  # whether the processor rounds by itself
@pytest.mark.parametrize(("old", "new", "corners"), CORNERS)
def test_the_corners_of_8_bits(old: str, new: str, corners: dict[int, int], copies: int) -> None:
    patterns = [*corners, *NANS.get(old, ())] * copies
    memory = torch.tensor(patterns, dtype=torch.uint8)
    row = len(patterns)
    field = rows_by_head(memory, 1, 1, row, 1)
    segment = Segment(field, Places(torch.arange(1)), 0, 0, Cast(Number(old), Number(new)))
    found, span = slot_on("cuda", row * SIZES[new])
    gather(on([segment], "cuda"), span, None, Work("cuda"), move)
    got = bytes_as_stored(found[GUARD:-GUARD].cpu().numpy(), new)[: len(patterns) // copies]
    assert [hex(each) for each in got[: len(corners)]] == [hex(each) for each in corners.values()]
    if new != "int8":
        assert np.isnan(slow.numbers(new)[got[len(corners) :]]).all()


ROWS = [
    *(Rows(where, planes=2) for where in WHERE),
    Rows("token", heads=4, width=128, moved=range(0, 4)),  # as a packed latent has them
    Rows("token", heads=8, width=128, block_tokens=16, blocks=9, moved=range(0, 8)),
    *(Rows("behind", width=width) for width in (4, 24, 80, 256, 1024)),
    Rows("behind", width=576, heads=1, moved=range(0, 1)),
    Rows("head", width=20, block_tokens=1),
]


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_have_scales_of_their_own(rows: Rows, name: str) -> None:
    check_rows(move, rows, name, Number("bf16"), min(21, rows.blocks * rows.block_tokens), "cuda")


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("form", SCALE_FORMS)
def test_index_keys_are_written_as_their_engine_does(form: str, rotates: bool) -> None:
    """Numbers of every size: sums that are not taken in the twin's order, or fused with a product, would show."""
    rows = replace(INDEX_KEYS, block_tokens=64, blocks=50, planes=3, form=form)
    check_rows(move, rows, "fp8_e4m3", Number("fp32"), 3000, "cuda", rotates=rotates)
    check_rows(move, rows, "fp8_e4m3", Number("bf16"), 3000, "cuda", tame=True, rotates=rotates)


@pytest.mark.parametrize("width", [8, 64, 1024])
@pytest.mark.parametrize("name", DTYPES)
def test_plain_rows_are_rotated_as_the_twin_does(name: str, width: int) -> None:
    for layout in ("nhd", "columns"):
        shape = Shape(layout, heads=3, width=width, size=SIZES[name], planes=2)
        cast = Cast(number(name, (1, 3) if SIZES[name] == 1 else None), Number("bf16"), rotates=True)
        segments, size = chunk_of([shape], 9, 21, cast, tame=True)
        check_scatter(move, segments, size, "cuda", tame=True)


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_rows_with_scales_and_scales_on_the_wire(name: str, wire: str) -> None:
    for each in (Number(wire), number(wire, (1, 2), seed=2)):
        check_rows(move, Rows("token", width=40), name, each, 20, "cuda")


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_every_8_bit_pattern_under_every_scale_of_a_row(name: str, wire: str) -> None:
    field, own = rows_of(len(ROW_SCALES), 256)
    assert isinstance(field.memory, torch.Tensor)
    table = field.memory.numpy().reshape(-1, 260)
    table[:, :4] = ROW_SCALES.view(np.uint8).reshape(-1, 4)
    table[:, 4:] = np.arange(256)
    for scale in (None, torch.tensor([[0.0371]])):
        cast = Cast(Number(name, own), Number(wire, scale))
        segment = Segment(field, Places(torch.arange(len(table))), 0, 0, cast)
        check_gather(move, [segment], segment.plane_bytes, "cuda")


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_rows_of_every_size_are_quantized_as_the_twin_does(name: str, wire: str) -> None:
    """Zeros, NaN, infinities, and what is almost one of them."""
    stored = slow.encode(odd_rows(128), wire)
    rows = Rows("before", heads=1, width=128, block_tokens=1, blocks=len(stored), moved=range(0, 1))
    segment, size = segment_of(rows, name, Number(wire), len(stored))
    sent = torch.zeros(size, dtype=torch.uint8)
    sent[16 : 16 + segment.plane_bytes] = torch.from_numpy(stored_as_bytes(stored.reshape(-1), wire))
    check_rows_scattered(move, rows, segment, sent, "cuda")


def test_a_kernel_for_rows_with_scales_is_used_again() -> None:
    """The first launch compiles, the second takes what was compiled, with its constants in their order."""
    rows = Rows("token", width=128)
    segment, size = segment_of(rows, "fp8_e4m3", Number("bf16"), 9)
    wanted, wanted_span = slot_on("cpu", size)
    gather([segment], wanted_span, None, Work("cpu"))
    twins = on([segment], "cpu")
    scatter(twins, wanted_span, None, Work("cpu"))
    work, copied = Work("cuda"), on([segment], "cuda")
    warm(Prepared(copied, None, size).chunk, work, slot_on("cuda", size)[1], False)
    for _ in range(2):
        found, span = slot_on("cuda", size)
        gather(copied, span, None, work, move)
        assert_same_rows([segment], found.cpu()[GUARD:-GUARD], wanted[GUARD:-GUARD])
    for _ in range(2):
        memory_of(copied[0]).copy_(memory_of(on([segment], "cuda")[0]))
        scatter(copied, span, None, work, move)
        torch.cuda.synchronize()
        assert_same_memory([segment], memory_of(copied[0]).cpu(), memory_of(twins[0]))


def test_work_and_prepared_copy_are_used_again_on_another_stream() -> None:
    work = Work("cuda")
    prepared = None
    for seed in range(4):
        segments, size = chunk_of([Shape("nhd", planes=2), Shape("hnd", width=80)], 9, 21, seed=seed)
        wanted, wanted_span = slot_on("cpu", size)
        found, span = slot_on("cuda", size)
        copied = on(segments, "cuda")
        sums = torch.zeros(1, dtype=torch.int64, device="cuda")
        if prepared is None:
            memory, prepared = memory_of(copied[0]), Prepared(copied, None, size)
        memory.copy_(memory_of(copied[0]))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        move(prepared.at([segments[0].places]), work, span, sums, stream)
        stream.synchronize()
        gather(segments, wanted_span, None, Work("cpu"))
        assert torch.equal(found.cpu(), wanted)
        assert int(sums) == sum64(segments, wanted[GUARD:-GUARD])


def test_a_launch_neither_waits_nor_allocates() -> None:
    segments, size = chunk_of([Shape("nhd", planes=2)], 9, 21)
    found, span = slot_on("cuda", size)
    copied, work = on(segments, "cuda"), Work("cuda")
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    chunk = Prepared(copied, None, size).chunk
    warm(chunk, work, span, True)
    torch.cuda.synchronize()
    assert (found == POISON).all()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(2_000_000_000)  # a second: who waits for the stream waits this long, busy machine or not
    end = torch.cuda.Event()
    move(chunk, work, span, sums)
    end.record()
    assert not end.query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    end.synchronize()
    assert int(sums) == sum64(segments, found[GUARD:-GUARD].cpu())


def test_pools_and_slots_beyond_two_to_the_31_elements() -> None:
    """A pool of 4.5 GiB of bf16, rows from both its ends, in a slot that begins beyond 2 GiB."""
    free, _ = torch.cuda.mem_get_info()
    if free < 10 << 30:
        pytest.skip(f"needs 10 GiB of GPU memory, {free >> 30} are free")
    heads, row, tokens = 8, 256, 16
    block = tokens * heads * row
    blocks = (9 << 29) // block
    pool = torch.full((blocks * block,), POISON, dtype=torch.uint8, device="cuda")
    ends = torch.cat([torch.arange(64), torch.arange(blocks * tokens - 64, blocks * tokens)])
    view = pool.view(blocks * tokens, heads, row)
    rows = torch.randint(0, 256, (128, heads, row), dtype=torch.uint8)
    view[ends.cuda()] = rows.cuda()
    field = field_of(Shape("nhd", heads, row // 2, block_tokens=tokens), blocks, pool, 0)
    start = (1 << 31) + 32
    segment = Segment(field, Places(ends), start, 0)
    slot = torch.full((start + segment.plane_bytes,), POISON, dtype=torch.uint8, device="cuda")
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    gather([segment], Span(slot.data_ptr(), slot.numel()), sums, Work("cuda"), move)
    wanted = rows.transpose(0, 1).reshape(-1)
    assert torch.equal(slot[start:].cpu(), wanted)
    assert not slot[:start].any()  # a gap
    view[ends.cuda()] = POISON
    scatter([segment], Span(slot.data_ptr(), slot.numel()), sums, Work("cuda"), move)
    assert torch.equal(view[ends.cuda()].cpu(), rows)
    assert bool((view[64:-64] == POISON).all())


def test_refuses_another_device_and_tables_that_do_not_fit() -> None:
    segments, size = chunk_of([Shape("nhd")], 9, 21)
    found, span = slot_on("cuda", size)
    copied = on(segments, "cuda")
    with pytest.raises(ValueError, match=r"sums must be int64 \[1\] on cuda:0, got torch.int64 \[1\] cpu"):
        gather(copied, span, torch.zeros(1, dtype=torch.int64), Work("cuda"), move)
    with pytest.raises(ValueError, match="work has 64"):
        scatter(copied, span, None, Work("cuda", 64), move)
    with pytest.raises(ValueError, match="fields are on device -1, work on cuda:0"):
        gather(segments, span, None, Work("cuda"), move)
    torch.cuda.synchronize()
    assert (found == POISON).all()
