"""The copier without a GPU: rows are moved by this thread, at once.

Peers may write to a slot at any time, so it is read once: a chunk is copied out, and only the copy is checked and
scattered. A late write cannot change what was checked.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
from kvbridge_kernels.digest_ref import digest as xxh3
from kvbridge_kernels.digest_ref import sum64
from kvbridge_kernels.launch_ref import move
from kvbridge_kernels.scratch import Scratch
from kvbridge_kernels.segment import Span
from kvbridge_kernels.tables import Work
from kvbridge_proto.pool import Pool

from ..geometry.plan import Part
from .copier import Moved, compared
from .memory import AttachedPool
from .staging import Staging
from .templates import PartSide, Templates


class CpuBlockCopier:
    """Keeps the contract of `copier.BlockCopier`. The copies release the GIL."""

    memory: Literal["dram", "vram"] = "dram"
    device = "cpu"
    digests = ("xxh3", "sum64")
    description = "cpu"

    def __init__(self) -> None:
        self._work = Work("cpu")
        self._copies = Scratch()
        self._templates = Templates()
        self._count = 0
        self._moved: list[Moved] = []

    def staging(self, slot_bytes: int, slots: int) -> Staging:
        return Staging.pageable(slot_bytes, slots)

    def gather(
        self,
        pool: AttachedPool,
        part: Part,
        slot: Span,
        digest_kind: str,
        host: Span | None = None,
    ) -> int:
        assert host is None, "the slots are in host memory already"
        sums = _sums(digest_kind)
        with pool.hold() as regions:
            move(self._templates.of(PartSide(pool, regions, part), None, slot.size_bytes), self._work, slot, sums)
        return self._over(_word(int(sums.item())) if sums is not None else xxh3(slot.on_cpu()))

    def digest(self, pool: AttachedPool, part: Part) -> int:
        sums, size_bytes = torch.zeros(1, dtype=torch.int64), part.chunk.size_bytes
        with pool.hold() as regions:
            move(self._templates.of(PartSide(pool, regions, part), None, size_bytes), self._work, None, sums)
        return self._over(_word(int(sums.item())))

    def scatter(
        self,
        pool: AttachedPool,
        part: Part,
        slot: Span,
        digest_kind: str,
        expected: int,
        host: Span | None = None,
    ) -> int:
        assert host is None, "the slots are in host memory already"
        copy = self._copies.take("chunk", slot.size_bytes, torch.device("cpu"))
        ctypes.memmove(copy.data_ptr(), slot.address, slot.size_bytes)
        with pool.hold() as regions:
            placed = self._templates.of(None, PartSide(pool, regions, part), slot.size_bytes)
            found = _word(sum64(placed.segments, copy)) if digest_kind == "sum64" else xxh3(copy)
            if found == expected:
                move(placed, self._work, Span(copy.data_ptr(), slot.size_bytes))
        return self._over(found, expected)

    def pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool = False) -> int:
        sums = _sums("sum64") if has_digest else None
        with sender.hold() as sender_regions, pool.hold() as regions:
            sides = PartSide(sender, sender_regions, theirs), PartSide(pool, regions, ours)
            move(self._templates.of(*sides, ours.chunk.size_bytes), self._work, None, sums)
        return self._over(_word(int(sums.item())) if sums is not None else 0)

    def zeros(self, pool: Pool) -> AttachedPool:
        return AttachedPool.of_zeros(pool, self.device)

    def make_room(self, moves: int) -> None:
        """A move is over when its call returns."""

    def warm(self, pool: AttachedPool, part: Part, slot: Span | None) -> None:
        """Nothing is compiled for a CPU."""

    def warm_pull(self, sender: AttachedPool, theirs: Part, pool: AttachedPool, ours: Part, has_digest: bool) -> None:
        """Nothing is compiled for a CPU."""

    def copy(self, source: Span, target: Span) -> int:
        ctypes.memmove(target.address, source.address, min(source.size_bytes, target.size_bytes))
        return self._over(0)

    def fill(self, span: Span, content: bytes) -> None:
        ctypes.memmove(span.address, content, min(span.size_bytes, len(content)))

    def read(self, span: Span) -> bytes:
        return ctypes.string_at(span.address, span.size_bytes)

    @property
    def has_room(self) -> bool:
        return True

    def poll(self) -> list[Moved]:
        moved, self._moved = self._moved, []
        return moved

    def is_using(self, pool: AttachedPool) -> bool:
        return False

    def forget(self, pool: AttachedPool) -> None:
        self._templates.forget(pool)

    def close(self) -> None:
        self._moved.clear()
        self._copies = Scratch()

    def _over(self, digest: int, expected: int | None = None) -> int:
        self._count += 1
        self._moved.append(compared(self._count, digest, expected))
        return self._count


def _sums(digest_kind: str) -> torch.Tensor | None:
    """The tensor that kernels add a sum64 to. None for other digests, which are taken of the whole chunk."""
    return torch.zeros(1, dtype=torch.int64) if digest_kind == "sum64" else None


def _word(total: int) -> int:
    """A sum64 as it is on the wire."""
    return total & (2**64 - 1)
