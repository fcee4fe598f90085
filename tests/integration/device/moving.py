"""One move at a time through the CPU's porter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from kvbridge_kernels.digest_ref import digest as xxh3
from kvbridge_kernels.pull_ref import pull as pull_rows
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import Work

from kvbridge.device.memory import AttachedPool
from kvbridge.device.porter import Moved
from kvbridge.device.porter_cpu import CpuPorter
from kvbridge.device.pulls import Pulls
from kvbridge.geometry.plan import Chunk, Move, Part, Plan
from kvbridge.geometry.tokens import BlockTable


class Moves:
    """Any moves, good or bad, as a part; each array of places is a unit of its own."""

    def __init__(self, moves: Sequence[Move]) -> None:
        arrays = {id(move.places): move.places for move in moves}
        self._arrays = list(arrays.values())
        self._moves = [replace(move, unit_tokens=list(arrays).index(id(move.places))) for move in moves]
        self.plan = self
        self.strips = self.form = object()

    def moves(self) -> list[Move]:
        return self._moves

    def places(self, group: int, unit_tokens: int) -> np.ndarray:
        return self._arrays[unit_tokens]


def pull(
    pulls: Pulls,
    chunk: Chunk,
    planned: Plan,
    source: AttachedPool,
    ours: Mapping[int, BlockTable],
    sink: AttachedPool,
    theirs: Mapping[int, BlockTable],
) -> int:
    """Pull one chunk; its digest, a sum64."""
    sums = torch.zeros(1, dtype=torch.int64)
    parts = Part(planned, chunk, ours, True), Part(planned, chunk, theirs, False)
    with source.hold() as regions, sink.hold() as sink_regions:
        pulled = pulls.of(source, regions, parts[0], sink, sink_regions, parts[1])
        pull_rows(pulled, sums, Work("cpu"))
    return int(sums) & (2**64 - 1)


def gather(pool: AttachedPool, moves: Sequence[Move], slot: torch.Tensor, kind: str = "xxh3") -> int:
    """Fill the slot; its digest."""
    porter = CpuPorter()
    ticket = porter.gather(pool, Moves(moves), Span(slot.data_ptr(), slot.numel()), kind)
    (moved,) = porter.poll()
    assert (moved.ticket, moved.failure) == (ticket, None)
    return moved.digest


def scatter(
    pool: AttachedPool, moves: Sequence[Move], slot: torch.Tensor, digest: int | None = None, kind: str = "xxh3"
) -> Moved:
    """Empty the slot into the blocks, if its digest is this one (any, if None)."""
    porter = CpuPorter()
    if digest is None:
        digest = xxh3(slot)
    porter.scatter(pool, Moves(moves), Span(slot.data_ptr(), slot.numel()), kind, digest)
    (moved,) = porter.poll()
    return moved
