"""The agent's own memory, cut into slots: what the fabric reads and remote agents write."""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Self

import torch

from ..errors import OperatorError

# A cache line: slots never share one, and words of any width fit.
SLOT_ALIGN = 64


class Staging:
    """`slots` slots of `slot_bytes` in one page-aligned allocation at address `base`.

    Whoever calls `close` has made sure that no view of a slot is left and no fabric knows the memory any more.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        if slot_bytes <= 0 or slot_bytes % SLOT_ALIGN or slots <= 0:
            raise OperatorError(
                "slot_bytes",
                f"slot_bytes: {slot_bytes}, must be a multiple of {SLOT_ALIGN}; slots: {slots}, at least 1",
            )
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.size_bytes = slot_bytes * slots
        self._pages = mmap.mmap(-1, self.size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory: torch.Tensor | None = torch.frombuffer(self._pages, dtype=torch.uint8)
        # Touched now, so that no request pays for the first use of a page.
        self._memory.zero_()
        self.base = self._memory.data_ptr()

    def slot(self, index: int, size_bytes: int | None = None) -> torch.Tensor:
        """The first `size_bytes` of a slot, all of it by default: uint8, valid until close."""
        start = self.address(index) - self.base
        size_bytes = self.slot_bytes if size_bytes is None else size_bytes
        assert self._memory is not None, "staging is closed"
        assert 0 <= size_bytes <= self.slot_bytes, f"size_bytes: {size_bytes}, slot_bytes {self.slot_bytes}"
        return self._memory[start : start + size_bytes]

    def address(self, index: int) -> int:
        assert 0 <= index < self.slots, f"slot: {index} of {self.slots}"
        return self.base + index * self.slot_bytes

    def close(self) -> None:
        self._memory = None
        self._pages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
