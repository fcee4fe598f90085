"""The buffers of a chunk in flight, and the tables in them that its kernels read.

The tables are int64 words in one buffer, uploaded once per chunk: a record per plane, offsets of places and of
elements, scales, gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .field import Axis, Scratch
from .scales import Steps
from .segment import Places
from .segment_layout import Offsets, place_offsets
from .tiling import LAUNCH_US, TILINGS, Tiling

TABLE_BYTES = 1 << 20
# For slots up to this size the kernels read the tables in pinned memory: few programs read them, which takes a
# microsecond or two over PCIe. An upload costs its caller nine.
IN_PLACE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels that were chosen so far, and the arithmetic of scales. Works of one device may share them."""

    chosen: dict[object, Any] = field(default_factory=dict)
    steps: dict[object, Steps] = field(default_factory=dict)


class Work:
    """Buffers, allocated once. Each chunk in flight needs its own: launches read it until they have run.

    On a GPU, `table_bytes` of pinned memory and as much device memory hold the tables of one chunk: 8 bytes per place
    of each list of offsets, 40 per plane, and 12 per plane and head if it converts with scales. On the CPU it is
    scratch for the plain-torch twins. Not thread-safe.
    `copy(target, source, bytes, stream)` enqueues a copy from pinned memory. With it, no stream need be made torch's
    current one, which costs more than the copy. With `compiles` a new kernel is compiled when it is first used. Without
    it NotCompiled is raised, for the caller to compile on another thread.
    """

    def __init__(
        self,
        device: torch.device | str,
        table_bytes: int = TABLE_BYTES,
        tilings: Mapping[str, Tiling] = TILINGS,
        launch_us: float = LAUNCH_US,
        copy: Callable[[int, int, int, int], None] | None = None,
        compiles: bool = True,
        kernels: Kernels | None = None,
    ) -> None:
        device = torch.device(device)
        is_gpu = device.type == "cuda"
        if is_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.tilings = tilings
        self.launch_us = launch_us
        self.copy = copy
        self.compiles = compiles
        self.scratch = Scratch()
        self.kernels = kernels or Kernels()
        words = table_bytes // 8
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=is_gpu)
        self.table = torch.empty(words, dtype=torch.int64, device=device) if is_gpu else self.host
        self.words = self.host.numpy()
        self.index = device.index if is_gpu else -1  # as torch.Tensor.get_device
        self.is_native = is_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1


class LaunchTables:
    """Fills the tables of a `Work`, from their start."""

    def __init__(self, work: Work, slot_bytes: int) -> None:
        self._work = work
        self.used = 0
        self.must_upload = work.table is not work.host and slot_bytes > IN_PLACE_BYTES
        self.address = (work.table if self.must_upload else work.host).data_ptr()

    def take(self, words: int) -> tuple[Offsets, int]:
        """The next `words` words, and their address as kernels see it. ValueError if there is no room."""
        start, self.used = self.used, self.used + words
        if self.used > len(self._work.words):
            raise ValueError(f"tables take {8 * self.used} bytes and more, work has {8 * len(self._work.words)}")
        return self._work.words[start : self.used], self.address + 8 * start

    def put(self, numbers: Offsets) -> int:
        """Put a copy of `numbers` into the tables. Returns its address."""
        room, address = self.take(len(numbers))
        room[:] = numbers
        return address

    def offsets(self, places: Places, block_stride: int, tokens: tuple[Axis, ...]) -> int:
        """Put the offsets of all places into the tables. Returns their address."""
        if (listed := places.offsets.get((block_stride, tokens))) is not None:
            return self.put(listed)
        room, address = self.take(places.count)
        place_offsets(places.array, block_stride, tokens, room)
        return address

    def upload(self, stream: int | None = None) -> None:
        """Copy the tables to the GPU, if kernels read them there. To name a `stream`, `work` must have a `copy`."""
        work = self._work
        if self.must_upload and stream is not None:
            assert work.copy is not None
            work.copy(work.table.data_ptr(), work.host.data_ptr(), 8 * self.used, stream)
        elif self.must_upload:
            work.table[: self.used].copy_(work.host[: self.used], non_blocking=True)
