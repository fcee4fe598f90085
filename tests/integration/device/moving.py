"""One move at a time through the CPU's copier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from kvbridge_kernels.digest_ref import digest as xxh3
from kvbridge_kernels.segment import Span

from kvbridge.device.copier import CpuBlockCopier, Moved
from kvbridge.device.memory import AttachedPool
from kvbridge.geometry.plan import Move


class Moves:
    """Any moves, good or bad, as a part; each array of places is a unit of its own."""

    def __init__(self, moves: Sequence[Move]) -> None:
        arrays = {id(move.places): move.places for move in moves}
        self._arrays = list(arrays.values())
        self._moves = [replace(move, unit_tokens=list(arrays).index(id(move.places))) for move in moves]
        self.plan = self.chunk = self.tables = self
        self.index = 0
        self.size_bytes = max((move.slot_offset + move.size_bytes for move in moves), default=0)
        self.pairs = self.template_key = object()

    def moves(self) -> list[Move]:
        return self._moves

    def places(self, group: int, unit_tokens: int) -> np.ndarray:
        return self._arrays[unit_tokens]


def gather(pool: AttachedPool, moves: Sequence[Move], slot: torch.Tensor, kind: str = "xxh3") -> int:
    """Fill the slot; its digest."""
    copier = CpuBlockCopier()
    ticket = copier.gather(pool, Moves(moves), Span(slot.data_ptr(), slot.numel()), kind)
    (moved,) = copier.poll()
    assert (moved.ticket, moved.failure) == (ticket, None)
    return moved.digest


def scatter(
    pool: AttachedPool, moves: Sequence[Move], slot: torch.Tensor, digest: int | None = None, kind: str = "xxh3"
) -> Moved:
    """Empty the slot into the blocks, if its digest is this one (any, if None)."""
    copier = CpuBlockCopier()
    if digest is None:
        digest = xxh3(slot)
    copier.scatter(pool, Moves(moves), Span(slot.data_ptr(), slot.numel()), kind, digest)
    (moved,) = copier.poll()
    return moved
