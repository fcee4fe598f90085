"""The pull kernel on a GPU against its twins through a slot, and reading the memory of another GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, SCALE_FORMS, Cast, Number
from kvbridge_kernels.field import Axis, Field, Mapped
from kvbridge_kernels.launch_ref import move as move_on_cpu
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Places, Segment
from kvbridge_kernels.tables import Work

from tests.system.gpu.test_kernels import PAIRS, SCALES, every_pattern
from tests.unit.kernels.chunks import Shape, assert_same_memory, memory_of, on
from tests.unit.kernels.pulls import INDEX_KEYS, PULLS, WIRES, check_pull, converted, ends_of, rotated
from tests.unit.kernels.rows import WHERE, Rows, segment_of

pytest.importorskip("triton")
from kvbridge_kernels.launch import move, warm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize(("sender", "receiver"), PULLS, ids=str)
def test_rows_are_pulled_bit_for_bit(sender: Shape, receiver: Shape, has_sums: bool) -> None:
    check_pull(move, ends_of([sender], [receiver], 17, 17), "cuda", has_sums)


@pytest.mark.parametrize("layouts", [("nhd", "hnd"), ("columns", "nhd"), ("nhd", "tiled")])
@pytest.mark.parametrize("old", WIRES)
@pytest.mark.parametrize("new", WIRES)
def test_every_codec_becomes_every_other(old: str, new: str, layouts: tuple[str, str]) -> None:
    for wire in {old, new, "fp32"}:
        check_pull(move, converted(old, new, wire, (2, 3), layouts), "cuda")
    check_pull(move, converted(old, new, new, None, layouts), "cuda", has_sums=False)


@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_pattern_becomes_what_the_twins_make_of_it(old: str, new: str, is_dense: bool, has_sums: bool) -> None:
    """Converted as they are read, into rows that are dense, and such as are not."""
    size, heads = DTYPES[new].itemsize, len(SCALES)
    scales = [torch.tensor([each]) for each in (SCALES[::-1], SCALES)]
    (sender,) = every_pattern(old, Cast(Number(old, scales[0]), Number(new, scales[1])), heads)
    rows, row = sender.places.count, 64 * size
    memory = torch.full((heads * rows * row,), 0xA5, dtype=torch.uint8)
    elements, stride = (Axis(64, size), row) if is_dense else (Axis(64, rows * size), size)
    field = Field(memory, 0, Axis(1, 0), Axis(rows, stride), (Axis(1, 0),), Axis(heads, rows * row), (elements,), size)
    receiver = Segment(field, Places(torch.arange(rows).flip(0)), 0, 0)
    check_pull(move, ([sender], [receiver], sender.plane_bytes), "cuda", has_sums, new)


@pytest.mark.parametrize(("ours", "theirs"), [("fp8_e4m3", "int8"), ("int8", "fp8_e4m3")])
@pytest.mark.parametrize("sender", WHERE)
@pytest.mark.parametrize("receiver", WHERE)
def test_rows_with_scales_of_their_own(sender: str, receiver: str, ours: str, theirs: str) -> None:
    one, size = segment_of(Rows(sender, planes=2, width=128), ours, Number("fp32"), 9, tame=True)
    other, _ = segment_of(Rows(receiver, planes=2, width=128, block_tokens=8), theirs, Number("fp32"), 9, seed=3)
    check_pull(move, ([one], [other], size), "cuda")


@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("theirs", SCALE_FORMS)
@pytest.mark.parametrize("ours", SCALE_FORMS)
def test_index_keys_become_what_the_other_engine_keeps(ours: str, theirs: str, rotates: bool, has_sums: bool) -> None:
    """Scales any fp32, as SGLang's are: a product that is fused with a sum would be seen."""
    rows = replace(INDEX_KEYS, block_tokens=64, blocks=50, planes=3)
    check_pull(move, rotated(rows, ours, theirs, rotates, 3000), "cuda", has_sums)
    other = rotated(rows, ours, theirs, rotates, 3000, where="token", block_tokens=16, blocks=200)
    check_pull(move, other, "cuda", has_sums)


@pytest.mark.parametrize("programs", [1, 8, 33, 1000])
def test_any_number_of_programs_walks_all_tiles(programs: int) -> None:
    shapes = Shape("nhd", heads=8, width=128, planes=8), Shape("hnd", heads=8, width=128, planes=8)
    ends = ends_of(shapes[:1], shapes[1:], 99, 300)
    check_pull(partial(move, programs=programs), ends, "cuda")


def test_a_prepared_pull_is_used_again_on_another_stream() -> None:
    senders, receivers, size = ends_of([Shape("nhd", planes=4)], [Shape("hnd", planes=4)], 9, 21)
    ours, theirs, work = on(senders, "cuda"), on(receivers, "cuda"), Work("cuda")
    prepared, stream = Prepared(ours, theirs, size), torch.cuda.Stream()
    warm(prepared.chunk, work, None, False)
    torch.cuda.synchronize()
    assert torch.equal(memory_of(theirs[0]).cpu(), memory_of(receivers[0]))
    for seed in range(3):
        index = torch.randperm(36, generator=torch.Generator().manual_seed(seed))[:21]
        places = [Places(index)]
        memory_of(theirs[0]).copy_(memory_of(receivers[0]))
        torch.cuda.synchronize()
        move(prepared.at(places, places), work, stream=stream)
        stream.synchronize()
        sender, receiver = (replace(each[0], places=places[0]) for each in (senders, receivers))
        twins = on([receiver], "cpu")
        move_on_cpu(Prepared([sender], twins, size).chunk, Work("cpu"))
        assert_same_memory(twins, memory_of(theirs[0]).cpu(), memory_of(twins[0]))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("programs", [None, 33])
def test_rows_of_another_gpu_are_read_where_they_are(programs: int | None) -> None:
    senders, receivers, size = ends_of([Shape("nhd", planes=4)], [Shape("hnd", planes=4, block_tokens=8)], 18, 60)
    ours = memory_of(senders[0]).to("cuda:0")
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda:0").copy_(torch.ones(1, device="cuda:1"))  # torch lets 1 reach 0 by this
        theirs = on(receivers, "cuda:1")
        foreign = Mapped(ours.data_ptr(), ours.numel(), 1)
        far = [replace(each, field=replace(each.field, memory=foreign)) for each in senders]
        torch.cuda.synchronize(0)
        sums = torch.full((1,), 77, dtype=torch.int64, device="cuda:1")
        move(Prepared(far, theirs, size).chunk, Work("cuda:1"), None, sums, None, programs)
        found = memory_of(theirs[0]).cpu()
    wanted, near = on(receivers, "cuda:0"), on(senders, "cuda:0")
    again = torch.full((1,), 77, dtype=torch.int64, device="cuda:0")
    move(Prepared(near, wanted, size).chunk, Work("cuda:0"), None, again)
    assert_same_memory(receivers, found, memory_of(wanted[0]).cpu())
    assert int(sums) == int(again) and not torch.equal(found, memory_of(receivers[0]))
