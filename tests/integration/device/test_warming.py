"""For what pulls a GPU's copier compiles kernels before a request. Nothing is compiled here."""

from __future__ import annotations

import threading

from kvbridge_kernels.prepared import Placed
from kvbridge_kernels.segment import Span

from kvbridge.device.copier import BlockCopier
from kvbridge.device.copier_gpu import GpuBlockCopier
from kvbridge.geometry.plan import Planner
from testing.oracle import Shape, build
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
