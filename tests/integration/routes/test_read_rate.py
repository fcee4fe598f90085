"""Measuring how fast a peer's memory can be read or its slots written, before any transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kvbridge_kernels.segment import Span

from kvbridge.dataplane.attached import Job, WaitMove, WaitWrite
from kvbridge.dataplane.orders import ReceiveOrders, SendOrders
from kvbridge.device.copier import Moved
from kvbridge.errors import EngineError, FabricError
from kvbridge.exchange.route import Rate
from kvbridge.routes.pull.job import PullRoute, read_rate
from kvbridge.routes.rate import MOST_ROUNDS, ROUNDS, SLOW_BYTES_PER_S, fastest, growing, is_slow
from kvbridge.transport.fabric import WriteLate, Wrote
from testing.refusals import refused

SCRATCH = Span(7, 1 << 22)


class Memory:
    def __init__(self, *sizes: int) -> None:
        self.regions = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    @contextmanager
    def hold(self) -> Iterator[Any]:
        yield self.regions


def measured(memory: Memory, took_s: list[float]) -> tuple[Rate, list[tuple[Span, Span]]]:
    """The rate when each read takes so long, and what was copied where."""
    copied: list[tuple[Span, Span]] = []
    copier = SimpleNamespace(copy=lambda sender, target: copied.append((sender, target)) or len(copied))
    now = [0.0]
    job = read_rate(SimpleNamespace(scratch=SCRATCH, copier=copier), memory, lambda: now[0])
    waits = next(job)
    try:
        while True:
            assert waits == WaitMove(len(copied))
            now[0] += took_s[min(len(copied), len(took_s)) - 1]
            waits = job.send(Moved(len(copied)))
    except StopIteration as over:
        return over.value, copied


def test_the_best_of_some_rounds_counts() -> None:
    memory = Memory(100, 5000)
    rate, copied = measured(memory, [0.5, 1e-6, 2e-6])
    assert rate == Rate(5000, pytest.approx(5000 / 1e-6))
    assert copied == [(Span(memory.regions[1].data_ptr(), 5000), Span(SCRATCH.address, 5000))] * ROUNDS


def test_what_seems_too_slow_is_tried_for_longer() -> None:
    memory = Memory(SCRATCH.size_bytes * 2)
    slow_s = SCRATCH.size_bytes / SLOW_BYTES_PER_S * 1.1
    rate, copied = measured(memory, [slow_s] * (ROUNDS + 1) + [slow_s / 2])
    assert rate.size_bytes == SCRATCH.size_bytes and len(copied) == ROUNDS + 2
    rate, copied = measured(memory, [slow_s])
    assert is_slow(rate) and len(copied) == MOST_ROUNDS


def test_what_is_too_small_to_tell_is_not_slow() -> None:
    rate, copied = measured(Memory(100), [1e-4])
    assert rate.bytes_per_s == pytest.approx(1e6) and len(copied) == ROUNDS < MOST_ROUNDS


WHOSE = ("incarnation", 1, "")


class Peers(Memory):
    """A peer's memory, which notes that it was closed."""

    is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Opening:
    """Pulls that open memory, beside a copier that copies one thing at a time, and ends it when it is told to."""

    def __init__(self) -> None:
        self.forgotten: list[Peers] = []
        copier = SimpleNamespace(
            copy=self._copy, is_using=lambda memory: memory in self.read, forget=self.forgotten.append
        )
        resources: Any = SimpleNamespace(scratch=SCRATCH, copier=copier)
        orders = SendOrders(0), ReceiveOrders()
        self.pulling = PullRoute(resources, lambda hear, *args: hear(*args), *orders, 30.0, lambda: 0.0)
        self.closed: list[Peers] = []
        self.read: list[Peers] = []  # a pull of these is under way
        self.found: list[tuple[Rate | None, Exception | None]] = []

    def _copy(self, sender: Span, target: Span) -> int:
        if self.pulling._measured[0] is not self.pulling._measured[-1]:
            raise EngineError("too_many_moves", "moves: 1 are under way")
        return 1

    def begin(self, memory: Peers) -> Job:
        closed, settle = partial(self.closed.append, memory), lambda *found: self.found.append(found)
        return self.pulling.open(WHOSE, lambda: (cast(Any, memory), None), closed, settle)


def test_memory_that_is_given_up_while_it_is_measured_stays_mapped_until_then() -> None:
    opening, memory = Opening(), Peers(5000)
    job = opening.begin(memory)
    next(job)
    opening.pulling.close(WHOSE)
    for _ in range(ROUNDS - 1):
        job.send(Moved(1))
        assert not memory.is_closed
    with pytest.raises(StopIteration):
        job.send(Moved(1))
    assert memory.is_closed and opening.closed == [memory] and opening.found[0][1] is None


@pytest.mark.parametrize("by", ["its end", "another of its name"])
def test_memory_that_is_given_up_while_a_pull_reads_it_stays_mapped_until_then(by: str) -> None:
    opening, memory = Opening(), Peers(5000)

    def opened(memory: Peers) -> None:
        with pytest.raises(StopIteration):
            job = opening.begin(memory)
            next(job)
            while True:
                job.send(Moved(1))

    opened(memory)
    opening.read.append(memory)
    opening.pulling.close(WHOSE) if by == "its end" else opened(Peers(5000))
    assert not memory.is_closed
    opening.pulling.close_unread()  # another read has ended
    assert not memory.is_closed and not opening.closed
    opening.read.clear()
    opening.pulling.close_unread()
    assert memory.is_closed and opening.closed == opening.forgotten == [memory]


def test_all_is_unmapped_at_the_end_what_was_given_up_too() -> None:
    opening, old, new = Opening(), Peers(5000), Peers(5000)
    first = opening.begin(old)
    next(first)
    with pytest.raises(StopIteration):
        next(opening.begin(new))
    assert not old.is_closed
    opening.pulling.close_all()
    assert old.is_closed and new.is_closed


def test_of_one_memory_that_was_opened_twice_the_newest_is_read() -> None:
    opening, old, new = Opening(), Peers(5000), Peers(5000)
    first = opening.begin(old)
    next(first)
    with pytest.raises(StopIteration):  # no other move can begin: nobody knows how fast it is
        next(opening.begin(new))
    assert opening.found == [(None, None)] and not old.is_closed
    with pytest.raises(StopIteration):
        while True:
            first.send(Moved(1))
    assert opening.closed == [old] and not new.is_closed
    opening.pulling.close(WHOSE)
    assert not new.is_closed
    opening.pulling.close(WHOSE)
    assert opening.closed == [old, new]


def test_memory_that_cannot_be_mapped_is_not_open() -> None:
    opening = Opening()

    def broken() -> Any:
        raise EngineError("handle_missing", "region 0")

    with pytest.raises(StopIteration):
        next(opening.pulling.open(WHOSE, broken, lambda: None, lambda *found: opening.found.append(found)))
    ((_, error),) = opening.found
    assert isinstance(error, EngineError) and not opening.pulling._peers and not opening.pulling._openings


def written(sizes: list[int], took_s: list[float | None]) -> tuple[Rate, list[int]]:
    """The rate when each write takes so long, None for one that is late, and the sizes that were written."""
    now, sent = [0.0], list[int]()

    def begin(size_bytes: int, deadline: float) -> WaitWrite:
        sent.append(size_bytes)
        return WaitWrite(cast(Any, None), len(sent))

    job = fastest(sizes, begin, lambda: now[0])
    try:
        next(job)
        while True:
            s = took_s[min(len(sent), len(took_s)) - 1]
            now[0] += s or 0.0
            job.send(WriteLate(len(sent)) if s is None else Wrote(len(sent)))
    except StopIteration as over:
        return over.value, sent


def test_writes_grow_up_to_the_whole_size() -> None:
    assert growing(64 << 10) == [64 << 10]
    assert growing(2 << 20) == [64 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20]
    rate, sent = written(growing(2 << 20), [1.0, 1e-4])
    assert sent == [64 << 10, 64 << 10, 128 << 10, 512 << 10] + [2 << 20] * ROUNDS
    assert rate == Rate(2 << 20, pytest.approx((2 << 20) / 1e-4))


def test_the_best_that_finished_counts_when_the_next_does_not_fit_or_is_late() -> None:
    rate, sent = written(growing(2 << 20), [1.0, 0.2])
    assert sent == [64 << 10] * 2 and rate == Rate(64 << 10, pytest.approx((64 << 10) / 0.2))
    rate, sent = written(growing(2 << 20), [1.0, 0.05, None])
    assert sent == [64 << 10, 64 << 10, 128 << 10] and rate == Rate(64 << 10, pytest.approx((64 << 10) / 0.05))
    with refused(FabricError, "probe_failed"):
        written(growing(2 << 20), [None])
