"""As little memory as an engine may have, and time: for tests of what sits inside an engine."""

from __future__ import annotations

import time

import torch
from kvbridge_proto.pool import Step

from kvbridge.adapters.engine.memory import Memory
from testing.pools import Held, Shape, describe

BLOCKS = 512  # as many as any scheduler of the tests hands out


def memory_of(rank: int = 0, tp: int = 1) -> Memory:
    """Hardly any, but real: it goes through shared memory. One K of one layer."""
    shape = Shape("packed", layers=1, kv_heads=tp, tp_size=tp, key_width=4, value_width=4, blocks=BLOCKS)
    pool = describe(shape, rank)
    return Memory(
        pool, tuple(torch.zeros(each.size_bytes, dtype=torch.uint8).untyped_storage() for each in pool.regions)
    )


def held(memory: Memory) -> Held:
    """The same memory, as testing/oracle.py reads it."""
    regions = (torch.empty(0, dtype=torch.uint8).set_(each).numpy() for each in memory.storages)
    return Held(memory.pool, tuple(regions))


def places(axis: tuple[Step, ...]) -> torch.Tensor:
    """The byte of every place of an axis: a mixed radix number, outermost step first."""
    total = torch.zeros(1, dtype=torch.int64)
    for step in axis:
        total = (total[:, None] + torch.arange(step.count) * step.stride).flatten()
    return total


class Clock:
    """Time that passes by itself, unless it stands still, and more when a test says so."""

    def __init__(self, is_still: bool = False) -> None:
        self.now = 0.0
        self._began = None if is_still else time.monotonic()

    def __call__(self) -> float:
        return self.now + (0.0 if self._began is None else time.monotonic() - self._began)
