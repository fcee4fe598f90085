"""Every case of the matrix on a GPU: the engine's memory gets the same bytes as from the CPU's copier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvbridge.device import driver
from kvbridge.device.copier import Moved
from kvbridge.device.copier_gpu import GpuBlockCopier
from kvbridge.device.staging import Staging
from kvbridge.geometry.compat import Incompatible, verdict
from kvbridge.geometry.plan import Part
from testing.carried import Mapped, OnCpu, carried, pools_of
from testing.matrix import ROWS, Row
from testing.pools import Held
from tests.system.gpu.test_copier_gpu import on_gpu

pytestmark = pytest.mark.gpu
MOST_SLOT_BYTES = 1 << 20


class OnGpu:
    """By a GPU's copier, in copies of the pools' memory; what it writes is copied back."""

    def __init__(self, copier: GpuBlockCopier, slots: Staging) -> None:
        self._copier = copier
        self._slots = slots
        self._mapped: dict[int, tuple[Held, Mapped]] = {}

    def carry(self, sender: Held, gather: Part, receiver: Held, scatter: Part, slot_bytes: int) -> None:
        slot = self._slots.span(0, slot_bytes)
        self._copier.fill(slot, b"\xa5" * slot_bytes)
        self._copier.gather(self._of(sender), gather, slot, "sum64")
        gathered = self._over()
        target = self._of(receiver)
        self._copier.scatter(target, scatter, slot, "sum64", gathered.digest)
        self._over()
        for memory, copied in zip(receiver.memory, target.memories, strict=True):
            memory[:] = copied.cpu().numpy()

    def forget(self) -> None:
        for _, mapped in self._mapped.values():
            self._copier.forget(mapped)

    def _over(self) -> Moved:
        while not (moved := self._copier.poll()):
            pass
        assert moved[0].failure is None, moved[0].failure
        return moved[0]

    def _of(self, held: Held) -> Mapped:
        if id(held) not in self._mapped:
            self._mapped[id(held)] = held, on_gpu(held)
        return self._mapped[id(held)][1]


@pytest.fixture(scope="module")
def gpu() -> Iterator[tuple[GpuBlockCopier, Staging]]:
    copier = GpuBlockCopier(driver.Gpu.open("cuda:0"), 4)
    with closing(copier.staging(MOST_SLOT_BYTES, 1)) as slots:
        yield copier, slots
    copier.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_gpu_writes_the_bytes_that_a_cpu_writes(row: Row, gpu: tuple[GpuBlockCopier, Staging]) -> None:
    for number, case in enumerate(row.cases()):
        if isinstance(verdict(*pools_of(case, number)), Incompatible):
            continue  # tests/unit/test_matrix.py shows that nothing can be carried
        carrier = OnGpu(*gpu)
        found, wrong = carried(case, number, carrier)
        carrier.forget()
        assert not wrong, f"case {number}: {wrong}\n{case.sender}\n{case.receiver}"
        expected, _ = carried(case, number, OnCpu())
        for region, (ours, theirs) in enumerate(zip(found.memory, expected.memory, strict=True)):
            different = np.flatnonzero(ours != theirs)
            assert not len(different), f"case {number}: region {region} from byte {different[0]} on\n{case}"


def test_a_slot_of_a_gpu_holds_the_largest_chunk() -> None:
    assert all(case.slot_bytes <= MOST_SLOT_BYTES for row in ROWS for case in row.cases())
