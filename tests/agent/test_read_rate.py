"""How fast a peer's memory is read, before anything is: so slow that something is wrong is no route."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvbridge_kernels.segment import Span

from kvbridge.agent.routes import MOST_ROUNDS, ROUNDS, SLOW_BYTES_PER_S, read_rate
from kvbridge.agent.waiting import WaitMove
from kvbridge.device.porter import Moved
from kvbridge.errors import FabricError
from kvbridge.exchange.route import Rate

LANE_BYTES = 1 << 22


class Memory:
    def __init__(self, *sizes: int) -> None:
        self.regions = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    @contextmanager
    def hold(self) -> Iterator[Any]:
        yield SimpleNamespace(memories=self.regions)


def measured(memory: Memory, took_s: list[float]) -> tuple[Rate, list[tuple[Span, Span]]]:
    """The rate when each read takes so long, and what was copied where."""
    copied: list[tuple[Span, Span]] = []
    porter = SimpleNamespace(copy=lambda source, target: copied.append((source, target)) or len(copied))
    dock = SimpleNamespace(lanes=deque([7]), outbound=SimpleNamespace(lane=lambda number: Span(number, LANE_BYTES)))
    now = [0.0]
    job = read_rate(SimpleNamespace(dock=dock, porter=porter), memory, lambda: now[0])  # type: ignore[arg-type]
    waits = next(job)
    try:
        while True:
            assert waits == WaitMove(len(copied)) and not dock.lanes
            now[0] += took_s[min(len(copied), len(took_s)) - 1]
            waits = job.send(Moved(len(copied)))
    except StopIteration as over:
        return over.value, copied
    finally:
        assert dock.lanes == deque([7])


def test_the_best_of_some_rounds_counts() -> None:
    memory = Memory(100, 5000)
    rate, copied = measured(memory, [0.5, 1e-6, 2e-6])
    assert rate == Rate(5000, pytest.approx(5000 / 1e-6))
    assert copied == [(Span(memory.regions[1].data_ptr(), 5000), Span(7, 5000))] * ROUNDS


def test_what_is_too_slow_is_tried_for_longer_and_then_is_no_route() -> None:
    memory = Memory(LANE_BYTES * 2)
    slow_s = LANE_BYTES / SLOW_BYTES_PER_S * 1.1
    rate, copied = measured(memory, [slow_s] * (ROUNDS + 1) + [slow_s / 2])
    assert rate.size_bytes == LANE_BYTES and len(copied) == ROUNDS + 2
    with pytest.raises(FabricError, match="too slow") as raised:
        measured(memory, [slow_s])
    assert raised.value.code == "slow_route"


def test_what_is_too_small_to_tell_is_not_slow() -> None:
    rate, copied = measured(Memory(100), [1e-4])
    assert rate.bytes_per_s == pytest.approx(1e6) and len(copied) == ROUNDS < MOST_ROUNDS
