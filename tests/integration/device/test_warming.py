"""For what pulls a GPU's copier compiles kernels before a request. Nothing is compiled here."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvbridge_kernels.prepared import Placed
from kvbridge_kernels.segment import Span

from kvbridge.device import copier_gpu
from kvbridge.device.copier import BlockCopier
from kvbridge.device.copier_gpu import GpuBlockCopier
from kvbridge.device.memory import PartSide
from kvbridge.geometry.plan import Part, Planner
from testing.oracle import Shape, build
from testing.waiting import wait_for
from tests.integration.device.attached import attached


class Recording(GpuBlockCopier):
    """It needs no GPU, and notes what it would compile."""

    def __init__(self) -> None:
        BlockCopier.__init__(self)
        self.seen: list[bool] = []

    def _compile(self, placed: Placed, slot: Span | None, has_digest: bool) -> None:
        self.seen.append(has_digest)


def test_our_own_pool_takes_the_place_of_an_equal_one() -> None:
    """A pool is held by one at a time: it must not wait for itself."""
    copier = Recording()
    with attached(build(Shape())) as (_, pool):
        twin = Planner(pool.pool, pool.pool)
        ((theirs, *_), (ours, *_)) = (twin.samples(1 << 16, is_sender) for is_sender in (True, False))
        warming = threading.Thread(target=copier.warm_pull, args=(pool, theirs, pool, ours, True), daemon=True)
        warming.start()
        warming.join(20.0)
        assert not warming.is_alive() and copier.seen == [True]


def test_what_an_awaited_pull_needs_is_compiled_and_listed_for_it() -> None:
    copier = Recording()
    with attached(build(Shape())) as (_, sender), attached(build(Shape())) as (_, pool):
        twin = Planner(pool.pool, pool.pool)
        ((theirs, *_), (ours, *_)) = (twin.samples(1 << 16, is_sender) for is_sender in (True, False))
        copier.await_pull(sender, ours.plan, pool, ours.tables)
        with sender.hold() as sent, pool.hold() as regions:
            sides = (
                PartSide(sender, sent, Part(ours.plan, ours.chunk, theirs.tables, True)),
                PartSide(pool, regions, ours),
            )
            placed = copier._templates.of(*sides, ours.chunk.size_bytes)
    (source,), (target,) = placed.places
    assert copier.seen == [False] and target.offsets and not source.offsets


def test_what_cannot_be_compiled_in_advance_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request compiles it itself, and only its own failure is its."""
    tried: list[str] = []

    def prepare(launch: Any, work: Any) -> None:
        tried.append(launch.kernel)
        if len(tried) == 1:
            raise RuntimeError("no space left in the cache's folder")

    monkeypatch.setattr(copier_gpu, "prepare", prepare)
    monkeypatch.setattr(copier_gpu, "_use", lambda gpu: None)
    launch, gpu = cast(Any, SimpleNamespace(kernel="k")), cast(Any, None)
    compiler = copier_gpu.Compiler(gpu)
    compiler.begin([launch], gpu, copier_gpu._try_to_prepare)
    wait_for(lambda: not compiler.under_way)
    compiler.begin([launch], gpu, prepare)  # takes note that it is over
    compiler.begin([launch], gpu, prepare)
    wait_for(lambda: not compiler.under_way)
    assert tried == ["k", "k"] and "no space left" in caplog.text
    compiler.close()
