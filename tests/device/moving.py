"""One move at a time through the CPU's porter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvbridge_kernels.digest_ref import digest as xxh3
from kvbridge_kernels.segment import Span

from kvbridge.device.memory import AttachedPool
from kvbridge.device.porter import Moved
from kvbridge.device.porter_cpu import CpuPorter
from kvbridge.geometry.plan import Move


def gather(pool: AttachedPool, moves: Sequence[Move], slot: torch.Tensor, kind: str = "xxh3") -> int:
    """Fill the slot; its digest."""
    porter = CpuPorter()
    ticket = porter.gather(pool, moves, Span(slot.data_ptr(), slot.numel()), kind)
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
    porter.scatter(pool, moves, Span(slot.data_ptr(), slot.numel()), kind, digest)
    (moved,) = porter.poll()
    return moved
