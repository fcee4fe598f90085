"""The kernels, compiled for an H100 by Triton, which needs no GPU for it. test_kernels.py runs this in its own process.

The interpreter takes Python that the compiler refuses. Here nothing is launched: what the kernels write is compared in
interpreted.py and on a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from kvbridge_kernels import codecs, launch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.launch import warm
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Segment, Span
from kvbridge_kernels.tables import Work
from kvbridge_kernels.tiles import move_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError

from tests.unit.kernels.chunks import Shape, chunk_of, number
from tests.unit.kernels.pulls import INDEX_KEYS, Ends, converted, ends_of, rotated
from tests.unit.kernels.rows import Rows, segment_of

H100 = GPUTarget("cuda", 90, 32)
FORMS = [("pow2_fp32", "ue8m0_x4"), ("ue8m0_x4", "pow2_fp32"), ("fp32", "pow2_fp32")]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """As on an H100. Kernels are compiled to the end, and not loaded."""
    driver = SimpleNamespace(
        get_current_target=lambda: H100, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    triton.runtime.driver.set_active(driver)
    compiled = []

    def start(each: Any, work: Work, first: int, end: int, *rest: Any) -> None:
        kernel = each.kernel
        options = {"num_warps": kernel.warps, "enable_fp_fusion": not kernel.is_exact}
        compiled.append(
            move_tiles.warmup(*each.arguments, first, end, grid=(1,), **kernel.constants, **options).asm["cubin"]
        )

    monkeypatch.setattr(launch, "start", start)
    work = Work("cpu")
    work.is_native = True
    yield work
    assert compiled and all(compiled)


def warm_both_ways(segments: list[Segment], size: int, work: Work) -> None:
    warm(Prepared(segments, None, size).chunk, work, Span(0, size), True)
    warm(Prepared(None, segments, size).chunk, work, Span(0, size), True)


def test_moves(work: Work) -> None:
    segments, size = chunk_of([Shape("nhd", planes=3), Shape("columns"), Shape("folded")], 3, 5)
    warm_both_ways(segments, size, work)
    warm(Prepared(segments, None, size).chunk, work, None, True)


@pytest.mark.parametrize(("old", "new"), [("bf16", "fp8_e4m3"), ("fp8_e5m2", "bf16"), ("fp8_e4m3", "int8")])
def test_conversions(old: str, new: str, work: Work) -> None:
    cast = Cast(number(old, (2, 3)), number(new, (2, 3)))
    segments, size = chunk_of([Shape("nhd", heads=3, width=64, size=DTYPES[old].itemsize, planes=2)], 3, 5, cast)
    warm_both_ways(segments, size, work)


@pytest.mark.parametrize(("name", "unknown"), [("fp8_e4m3", tl.float8e4b8), ("fp16", tl.uint16)])
def test_a_codec_that_the_kernel_does_not_know_is_refused(
    name: str, unknown: tl.dtype, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_moves(work)
    monkeypatch.setitem(codecs.TYPES, name, unknown)
    with pytest.raises(CompilationError) as refused:
        test_conversions("bf16", name, work)
    assert "no such codec" in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("form", ["fp32", "pow2_fp32", "ue8m0_x4"])
@pytest.mark.parametrize("rotates", [False, True])
def test_rows_with_scales_of_their_own(form: str, rotates: bool, work: Work) -> None:
    rows = Rows("page", heads=1, width=128, moved=range(0, 1), form=form, planes=2)
    segment, size = segment_of(rows, "fp8_e4m3", Number("fp32"), 9, rotates=rotates)
    warm_both_ways([segment], size, work)


@pytest.mark.parametrize(
    "ends",
    [
        ends_of([Shape("nhd")], [Shape("hnd")], 3, 7),
        converted("bf16", "fp8_e4m3", "fp8_e4m3", (1, 3), ("nhd", "hnd"), 6),
        *(rotated(INDEX_KEYS, *forms, rotates) for rotates in (False, True) for forms in FORMS),
    ],
)
def test_pulls(ends: Ends, work: Work) -> None:
    for has_sums in (True, False):
        warm(Prepared(*ends).chunk, work, None, has_sums)
