"""As little memory as an engine may have, and time: for tests of what sits inside an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

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


def whole_state(sizes: Sequence[tuple[int, ...]], first: int = 0) -> list[torch.Tensor]:
    """A model's state in pieces of these sizes: small whole numbers, which all dtypes have. Neighbours differ."""
    found = []
    for place, size in enumerate(sizes):
        count = math.prod(size)
        found.append((torch.arange(first, first + count) % 120 + place * 0.5).reshape(size).float())
        first += count
    return found


def conv_of_rank(pieces: Sequence[torch.Tensor], tp: int, rank: int) -> list[torch.Tensor]:
    """What a rank has of a convolution's pieces [heads, channels, rows], each [channels, rows]. Of one head all do."""
    shares = [max(1, len(piece) // tp) for piece in pieces]
    firsts = [0 if len(piece) == 1 else rank * share for piece, share in zip(pieces, shares, strict=True)]
    ends = zip(pieces, firsts, shares, strict=True)
    return [piece[first : first + share].flatten(0, 1) for piece, first, share in ends]


class Clock:
    """Time that passes by itself, unless it stands still, and more when a test says so."""

    def __init__(self, is_still: bool = False) -> None:
        self.now = 0.0
        self._began = None if is_still else time.monotonic()

    def __call__(self) -> float:
        return self.now + (0.0 if self._began is None else time.monotonic() - self._began)
