"""The agent's own memory, cut into slots: what the fabric reads and remote agents write."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Literal, Self

import torch
from kvbridge_kernels.segment import Span as Span
from kvbridge_proto.peer import PROBE_LANES

from ..errors import OperatorError
from . import driver

# A cache line: slots never share one, and words of any width fit.
SLOT_ALIGN = 64
PROT_NONE = 0
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # asm-generic/mman.h
_sealed: list[object] = []  # must not be unmapped while this process lives


class Staging:
    """`slots` slots of `slot_bytes`, and one more for probes, in one allocation at address `base`.

    Before `close`, no view of a slot may be left, and no fabric may know the memory.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        memory: Literal["dram", "vram"],
        base: int,
        free: Callable[[], None],
        pages: mmap.mmap | None = None,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.memory = memory
        self.base = base
        self._free: Callable[[], None] | None = free
        self._pages = pages
        self._is_pinned = False

    @classmethod
    def pageable(cls, slot_bytes: int, slots: int) -> Self:
        """In this process's memory. Every page is touched, so that no request pays for its first use."""
        size_bytes = _total(slot_bytes, slots)
        pages = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        touched = torch.frombuffer(pages, dtype=torch.uint8).zero_()
        return cls(slot_bytes, slots, "dram", touched.data_ptr(), pages.close, pages)

    @classmethod
    def pinned(cls, slot_bytes: int, slots: int) -> Self:
        """In pinned host memory, for the GPU's copy engines. Needs a CUDA context on this thread."""
        staging = cls.pageable(slot_bytes, slots)
        driver.host_register(staging.base, staging.size_bytes)
        staging._is_pinned = True
        return staging

    @classmethod
    def on_gpu(cls, slot_bytes: int, slots: int) -> Self:
        """In an allocation of its own on the thread's current GPU, which fabrics and peers can open."""
        base = driver.allocate(_total(slot_bytes, slots))
        return cls(slot_bytes, slots, "vram", base, lambda: driver.free(base))

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * (self.slots + 1)

    def span(self, index: int, size_bytes: int | None = None) -> Span:
        """The first `size_bytes` of a slot, all of it by default; valid until close."""
        size_bytes = self.slot_bytes if size_bytes is None else size_bytes
        assert self._free is not None, "staging is closed"
        assert 0 <= size_bytes <= self.slot_bytes, f"size_bytes: {size_bytes}, slot_bytes {self.slot_bytes}"
        return Span(self.address(index), size_bytes)

    def address(self, index: int) -> int:
        assert 0 <= index < self.slots, f"slot: {index} of {self.slots}"
        return self.base + index * self.slot_bytes

    def lane(self, number: int) -> Span:
        """A lane of the slot for probes, which one probe is written to."""
        return lane_of(self.base, self.slot_bytes, self.slots, number)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._free is not None:
            self._unpin()
            self._free()
            self._free = None

    def _unpin(self) -> None:
        if self._is_pinned:
            driver.host_unregister(self.base)
            self._is_pinned = False

    def seal(self) -> int:
        """Close it although a peer may still write here: the addresses are never used for anything else.

        Host memory is given back, and writes to it fault. A GPU cannot do that, so its memory stays allocated. Returns
        how many bytes stay allocated. Idempotent; `close` does nothing afterwards.
        """
        if self._free is None:
            return 0
        if self._pages is None:
            _sealed.append(self._free)
            self._free = None
            return self.size_bytes
        _sealed.append(self._pages)  # its destructor would unmap them
        self._unpin()
        _reserve(self.base, self.size_bytes)
        self._free = None
        return 0


def _reserve(address: int, size_bytes: int) -> None:
    """Reserve these addresses for good: the memory there is given back, and every access faults."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
    if libc.mmap(address, size_bytes, PROT_NONE, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), f"{size_bytes} bytes of it could not be reserved")


def lane_of(base: int, slot_bytes: int, slots: int, number: int) -> Span:
    """A probe lane of a staging, ours or a peer's."""
    lane_bytes = slot_bytes // PROBE_LANES // SLOT_ALIGN * SLOT_ALIGN
    return Span(base + slots * slot_bytes + number % PROBE_LANES * lane_bytes, lane_bytes)


def check_slots(slot_bytes: int, slots: int) -> None:
    """Raise OperatorError if a staging cannot have such slots."""
    if slot_bytes <= 0 or slot_bytes % SLOT_ALIGN or slots <= 0:
        raise OperatorError(
            "slot_bytes",
            f"slot_bytes: {slot_bytes}, must be a multiple of {SLOT_ALIGN}; slots: {slots}, at least 1",
        )


def _total(slot_bytes: int, slots: int) -> int:
    check_slots(slot_bytes, slots)
    return slot_bytes * (slots + 1)
