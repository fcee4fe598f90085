"""A pull that fails with reads under way ends when these have ended, and says so: no read may be forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbridge.dataplane.attached import Job, WaitCopier, WaitKernels, WaitLease, WaitMove
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.dataplane.orders import ReceiveOrders, SendOrders
from kvbridge.device.copier import Compiling, Moved
from kvbridge.errors import EngineError
from kvbridge.exchange.orders import Pulled, Summed
from kvbridge.routes.pull.halves import ReadLease
from kvbridge.routes.pull.job import ENDED_WHILE_READ, MOST_AHEAD, Opened, PullRoute

WHOSE = ("incarnation", 1, "")


class FullCopier:
    """Has room for one read."""

    def __init__(self) -> None:
        self.begun = 0
        self.is_compiled, self.is_roomy = True, False

    @property
    def has_room(self) -> bool:
        return self.is_roomy or not self.begun

    def pull(self, *parts: Any) -> int:
        if not self.is_compiled:
            raise Compiling(lambda: self.is_compiled)
        self.begun += 1
        return self.begun


@pytest.fixture
def told() -> ReceiveOrders:
    return ReceiveOrders()


@pytest.fixture
def copier() -> FullCopier:
    return FullCopier()


@pytest.fixture
def lease() -> ReadLease:
    lease = ReadLease(0.0)
    lease.answered(0)
    return lease


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def end_chunk() -> int:
    return MOST_AHEAD


@pytest.fixture
def peer_fence() -> int | None:
    return None


@pytest.fixture
def fence() -> Any:
    return None


@pytest.fixture
def attached() -> Any:
    liveness = SimpleNamespace(has_left=False)
    return SimpleNamespace(memory=object(), liveness=liveness, has_reached=lambda count: True)


@pytest.fixture
def job(
    told: ReceiveOrders,
    copier: FullCopier,
    lease: ReadLease,
    clock: list[float],
    end_chunk: int,
    attached: Any,
    peer_fence: int | None,
    fence: Any,
) -> Job:
    resources: Any = SimpleNamespace(copier=copier)
    pulling = PullRoute(resources, lambda *args: None, SendOrders(0), told, 30.0, lambda: clock[0])
    pulling._peers[WHOSE] = Opened(cast(Any, object()), fence, lambda: None)
    plan = SimpleNamespace(chunk=lambda index: index, bytes_of=lambda first, end: end - first)
    pull: Any = SimpleNamespace(
        memory_id=WHOSE,
        transfer="t",
        request="r",
        plan=plan,
        first_chunk=0,
        end_chunk=end_chunk,
        lease=lease,
        fence=0,
        tables={},
        peer_tables={},
        compared=frozenset({0}),
        peer_fence=peer_fence,
    )
    return pulling.pull(pull, attached)


def test_it_is_told_of_once_what_it_has_begun_is_over(job: Job, told: ReceiveOrders) -> None:
    assert isinstance(job.send(None), WaitCopier)
    waits = job.throw(EngineError("engine_left", "the engine left"))
    assert waits == WaitMove(1) and not told.take_reports()
    with pytest.raises(StopIteration):
        job.send(Moved(1, 7))
    failure = "engine_left", "the engine left"
    assert told.take_reports() == [Summed("t", {0: 7}), Pulled("t", 3, 3, 3, {}, failure)]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_digest_is_told_while_other_chunks_are_read_if_the_lease_lasts_and_else_once_it_does(
    job: Job, told: ReceiveOrders, copier: FullCopier, lease: ReadLease, clock: list[float], is_late: bool
) -> None:
    copier.is_roomy = True
    assert job.send(None) == WaitMove(1)
    clock[0] = 1.0 if is_late else 0.0
    assert job.send(Moved(1, 7)) == WaitMove(2)
    assert told.take_reports() == ([] if is_late else [Summed("t", {0: 7})])
    lease.answered(lease.renew(0.9))
    assert job.send(Moved(2)) == WaitMove(3)
    with pytest.raises(StopIteration):
        job.send(Moved(3))
    assert told.take_reports() == [Pulled("t", 3, 3, 3, {0: 7} if is_late else {}, None, clock[0])]


def test_a_read_whose_kernels_are_new_is_begun_once_they_are_compiled(
    job: Job, told: ReceiveOrders, copier: FullCopier
) -> None:
    copier.is_compiled = False
    data_plane = DataPlane(lambda: cast(Any, None), "us", cast(Any, None), 30.0)
    data_plane._resume(job, None)
    ((wait, waiting),) = data_plane._fenced
    assert isinstance(wait, WaitKernels) and waiting is job and not wait.is_over and not copier.begun
    copier.is_compiled = True
    data_plane._fenced.clear()
    data_plane._go_on(job, job.send, None)
    ((wait, _),) = data_plane._fenced
    assert isinstance(wait, WaitCopier) and copier.begun == 1 and not told.take_reports()


def test_a_transfer_that_ends_while_its_kernels_are_compiled_reads_nothing(
    job: Job, told: ReceiveOrders, copier: FullCopier, lease: ReadLease
) -> None:
    copier.is_compiled = False
    assert isinstance(job.send(None), WaitKernels)
    lease.is_given_up = copier.is_compiled = True
    with pytest.raises(StopIteration):
        job.send(None)
    assert not copier.begun and [each.failure for each in told.take_reports()] == [ENDED_WHILE_READ]
    assert [each.stage for each in told.take_reached()] == ["reading"]


def test_a_read_that_ends_after_its_lease_counts_once_a_renewal_covers_it(
    job: Job, told: ReceiveOrders, copier: FullCopier, lease: ReadLease, clock: list[float]
) -> None:
    wait = _read_until(1.0, job, copier, clock)
    assert isinstance(wait, WaitLease) and not wait.is_over and not told.take_reports()
    lease.answered(lease.renew(0.5))  # asked for before the read ended, and lasts for less than that
    assert not wait.is_over
    lease.answered(lease.renew(0.9))
    assert wait.is_over
    with pytest.raises(StopIteration):
        job.send(None)
    assert [each.failure for each in told.take_reports()] == [None]


def test_a_read_that_ends_after_its_lease_is_lost_if_no_renewal_comes(
    job: Job, told: ReceiveOrders, copier: FullCopier, clock: list[float]
) -> None:
    wait = _read_until(1.0, job, copier, clock)
    assert isinstance(wait, WaitLease) and wait.deadline == 31.0
    with pytest.raises(StopIteration):
        job.throw(wait.late())
    assert [each.failure and each.failure[0] for each in told.take_reports()] == ["lease_over"]


@pytest.mark.parametrize("until", [0.1, 1.0], ids=["during the read", "while a renewal is awaited"])
def test_a_read_whose_transfer_ends_meanwhile_does_not_count(
    job: Job, told: ReceiveOrders, copier: FullCopier, lease: ReadLease, clock: list[float], until: float
) -> None:
    copier.is_roomy = True
    wait = job.send(None)
    lease.is_given_up, clock[0] = until < lease.ends, until
    with pytest.raises(StopIteration):
        for ticket in (1, 2, 3):
            assert wait == WaitMove(ticket)
            wait = job.send(Moved(ticket, 7))
        assert isinstance(wait, WaitLease) and not wait.is_over
        lease.is_given_up = True
        assert wait.is_over
        job.send(None)
    assert [each.failure for each in told.take_reports() if isinstance(each, Pulled)] == [ENDED_WHILE_READ]


def test_a_read_that_ends_after_its_lease_and_its_own_engine_is_lost_at_once(
    job: Job, copier: FullCopier, told: ReceiveOrders, clock: list[float], attached: Any
) -> None:
    """No renewal is heard any more."""
    attached.liveness.has_left = True
    with pytest.raises(StopIteration):
        _read_until(1.0, job, copier, clock)
    assert [each.failure and each.failure[0] for each in told.take_reports()] == ["engine_left"]


@pytest.mark.proves("G3")
@pytest.mark.parametrize(
    ("peer_fence", "fence", "reads"),
    [
        (0, None, True),
        (7, SimpleNamespace(reached=lambda count: count <= 7), True),
        (7, SimpleNamespace(reached=lambda count: count < 7), False),
        (7, None, False),
    ],
    ids=["computed", "reached", "not reached", "no page"],
)
def test_what_is_read_ahead_is_computed_and_waits_for_no_lease(
    job: Job, told: ReceiveOrders, copier: FullCopier, clock: list[float], reads: bool
) -> None:
    """Whether it counts is decided later, by when it ended."""
    with pytest.raises(StopIteration):
        _read_until(1.0, job, copier, clock)
    (pulled,) = (each for each in told.take_reports() if isinstance(each, Pulled))
    assert (pulled.failure and pulled.failure[0], copier.begun) == ((None, 3) if reads else ("fence_late", 0))
    assert pulled.at == (1.0 if reads else 0.0)


def _read_until(at: float, job: Job, copier: FullCopier, clock: list[float]) -> object:
    """All three chunks are read, the last until `at`. What the job waits for then."""
    copier.is_roomy = True
    wait = job.send(None)
    for ticket in (1, 2, 3):
        assert wait == WaitMove(ticket)
        clock[0] = at
        wait = job.send(Moved(ticket, 7))
    return wait


def test_kernels_that_are_not_compiled_in_time_cost_the_transfer(
    job: Job, told: ReceiveOrders, copier: FullCopier
) -> None:
    copier.is_compiled = False
    job.send(None)
    wait = job.send(None)
    assert isinstance(wait, WaitKernels) and wait.deadline == 30.0
    with pytest.raises(StopIteration):
        job.throw(wait.late())
    assert [each.failure for each in told.take_reports()] == [("not_compiled", "kernels were not compiled in time")]


def test_the_data_plane_goes_on_with_a_job_that_waits_on_after_an_error(job: Job, told: ReceiveOrders) -> None:
    data_plane = DataPlane(lambda: cast(Any, None), "us", cast(Any, None), 30.0)
    data_plane._resume(job, None)
    ((wait, waiting),) = data_plane._fenced
    assert isinstance(wait, WaitCopier) and waiting is job
    data_plane._end_waits(lambda wait: True, EngineError("engine_left", "the engine left"))
    assert data_plane._moving == {1: job} and not data_plane._fenced and not told.take_reports()
    data_plane._resume(data_plane._moving.pop(1), Moved(1))
    assert isinstance(told.take_reports()[-1], Pulled)


@pytest.mark.parametrize("place", [1, 3])
def test_a_read_that_could_not_begin_later_fails_its_transfer_once_the_others_are_over(
    job: Job, told: ReceiveOrders, copier: FullCopier, place: int
) -> None:
    copier.is_roomy = True
    assert job.send(None) == WaitMove(1)
    failure = "pull_failed", "no launch"
    for ticket in (1, 2):
        assert job.send(Moved(ticket, failure=failure if ticket == place else None)) == WaitMove(ticket + 1)
    with pytest.raises(StopIteration):
        job.send(Moved(3, failure=failure if place == 3 else None))
    assert [each.failure for each in told.take_reports() if isinstance(each, Pulled)] == [failure]
    assert [each.stage for each in told.take_reached()] == ["reading"]


@pytest.mark.parametrize("end_chunk", [MOST_AHEAD + 2])
def test_after_a_read_that_could_not_begin_no_other_begins_and_the_first_failure_counts(
    job: Job, told: ReceiveOrders, copier: FullCopier
) -> None:
    copier.is_roomy = True
    assert job.send(None) == WaitMove(1) and copier.begun == MOST_AHEAD
    first, second = ("pull_failed", "no launch"), ("detached", "no memory")
    assert job.send(Moved(1, failure=first)) == WaitMove(2)
    assert job.send(Moved(2, failure=second)) == WaitMove(3) and copier.begun == MOST_AHEAD
    with pytest.raises(StopIteration):
        job.send(Moved(3))
    assert [each.failure for each in told.take_reports() if isinstance(each, Pulled)] == [first]
