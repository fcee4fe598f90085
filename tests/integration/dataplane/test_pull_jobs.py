"""A pull that fails with reads under way ends when they have, and says so: nothing of it may be forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbridge.dataplane.mover import Mover
from kvbridge.dataplane.receiving import Receiving
from kvbridge.dataplane.routes.pull import Pulling
from kvbridge.dataplane.waiting import Job, WaitKernels, WaitMove, WaitRoom
from kvbridge.device.porter import Compiling, Moved
from kvbridge.errors import EngineError
from kvbridge.exchange.orders import Pulled
from kvbridge.exchange.reading import Lease

WHOSE = ("boot", 1, "")


class FullPorter:
    """Has room for one read."""

    def __init__(self) -> None:
        self.begun = 0
        self.is_compiled = True

    @property
    def has_room(self) -> bool:
        return not self.begun

    def pull(self, *parts: Any) -> int:
        if not self.is_compiled:
            raise Compiling(lambda: self.is_compiled)
        self.begun += 1
        return self.begun


@pytest.fixture
def told() -> Receiving:
    return Receiving()


@pytest.fixture
def porter() -> FullPorter:
    return FullPorter()


@pytest.fixture
def lease() -> Lease:
    lease = Lease(0.0)
    lease.answered(0)
    return lease


@pytest.fixture
def job(told: Receiving, porter: FullPorter, lease: Lease) -> Job:
    equipment: Any = SimpleNamespace(porter=porter)
    pulling = Pulling(equipment, lambda *args: None, told, 30.0, lambda: 0.0)
    pulling._peers[WHOSE] = cast(Any, object()), lambda: None
    plan = SimpleNamespace(chunk=lambda index: index)
    pull: Any = SimpleNamespace(
        whose=WHOSE,
        transfer="t",
        plan=plan,
        first_chunk=0,
        end_chunk=3,
        size_bytes=3,
        lease=lease,
        fence=0,
        tables={},
        peer_tables={},
        compared=frozenset({0}),
    )
    attachment: Any = SimpleNamespace(
        memory=object(), word=SimpleNamespace(has_left=False), has_reached=lambda count: True
    )
    return pulling.pull(pull, attachment)


def test_it_is_told_of_once_what_it_has_begun_is_over(job: Job, told: Receiving) -> None:
    job.send(None)  # the fence
    assert isinstance(job.send(None), WaitRoom)
    waits = job.throw(EngineError("engine_left", "the engine left"))
    assert waits == WaitMove(1) and not told.take_reports()
    with pytest.raises(StopIteration):
        job.send(Moved(1, 7))
    assert told.take_reports() == [Pulled("t", 3, 3, 3, {0: 7}, ("engine_left", "the engine left"))]


def test_a_read_whose_kernels_are_new_is_begun_once_they_are_compiled(
    job: Job, told: Receiving, porter: FullPorter
) -> None:
    porter.is_compiled = False
    mover = Mover(lambda: cast(Any, None), "us", cast(Any, None), 30.0)
    mover._resume(job, None)
    ((wait, waiting),) = mover._fenced
    assert isinstance(wait, WaitKernels) and waiting is job and not wait.is_over and not porter.begun
    porter.is_compiled = True
    mover._fenced.clear()
    mover._go_on(job, lambda: job.send(None))
    ((wait, _),) = mover._fenced
    assert isinstance(wait, WaitRoom) and porter.begun == 1 and not told.take_reports()


def test_a_transfer_that_ends_while_its_kernels_are_compiled_reads_nothing(
    job: Job, told: Receiving, porter: FullPorter, lease: Lease
) -> None:
    porter.is_compiled = False
    job.send(None)  # the fence
    assert isinstance(job.send(None), WaitKernels)
    lease.is_given_up = porter.is_compiled = True
    with pytest.raises(StopIteration):
        job.send(None)
    assert not porter.begun and [each.failure for each in told.take_reports()] == [
        ("aborted", "the transfer ended while it was read")
    ]


def test_kernels_that_are_not_compiled_in_time_cost_the_transfer(job: Job, told: Receiving, porter: FullPorter) -> None:
    porter.is_compiled = False
    job.send(None)
    wait = job.send(None)
    assert isinstance(wait, WaitKernels) and wait.deadline == 30.0
    with pytest.raises(StopIteration):
        job.throw(wait.late())
    assert [each.failure for each in told.take_reports()] == [("not_compiled", "kernels were not compiled in time")]


def test_the_mover_goes_on_with_a_job_that_waits_on_after_an_error(job: Job, told: Receiving) -> None:
    mover = Mover(lambda: cast(Any, None), "us", cast(Any, None), 30.0)
    mover._resume(job, None)
    ((wait, waiting),) = mover._fenced
    assert isinstance(wait, WaitRoom) and waiting is job
    mover._end_waits(lambda wait: True, EngineError("engine_left", "the engine left"))
    assert mover._moving == {1: job} and not mover._fenced and not told.take_reports()
    mover._resume(mover._moving.pop(1), Moved(1))
    assert len(told.take_reports()) == 1
