"""What a chunk in flight needs besides its slot: room for tables, and the tables that the kernels read.

int64 words in one buffer, one upload a chunk: a record per plane, offsets of places, scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .field import Axis
from .form import LAUNCH_US, TILINGS, Offsets, Tiling, place_offsets
from .places import Places
from .scratch import Scratch

TABLE_BYTES = 1 << 20
# Slots up to this size: the few programs that fill them read the tables where they are, in pinned memory. That is a
# microsecond or two over PCIe; the upload costs its caller nine.
IN_PLACE_BYTES = 4 << 20


class Work:
    """Buffers allocated once. One per chunk in flight: a launch reads them until its event has passed.

    On a GPU `table_bytes` of pinned and as much device memory hold the tables of one chunk: 8 bytes a place, 32 a
    plane, 12 a plane and head where it converts. On the CPU it is scratch for the plain-torch twins. Not thread-safe.
    `copy` enqueues a copy from pinned memory, given target, sender, bytes and stream: with one nothing has to make that
    stream torch's current one, which costs its caller more than the copy. Unless it `compiles`, a kernel that is new is
    raised as NotCompiled, for its user to compile on another thread.
    """

    def __init__(
        self,
        device: torch.device | str,
        table_bytes: int = TABLE_BYTES,
        tilings: Mapping[str, Tiling] = TILINGS,
        launch_us: float = LAUNCH_US,
        copy: Callable[[int, int, int, int], None] | None = None,
        compiles: bool = True,
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
        self.kernels: dict[object, Any] = {}  # launch.py's
        self.steps: dict[object, Any] = {}  # scales.py's
        words = table_bytes // 8
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=is_gpu)
        self.table = torch.empty(words, dtype=torch.int64, device=device) if is_gpu else self.host
        self.words = self.host.numpy()
        self.index = device.index if is_gpu else -1  # as torch.Tensor.get_device says it
        self.is_native = is_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1


class LaunchTables:
    """Fills a `Work` from its start."""

    def __init__(self, work: Work, slot_bytes: int) -> None:
        self._work = work
        self.used = 0
        self.must_upload = work.table is not work.host and slot_bytes > IN_PLACE_BYTES
        self.address = (work.table if self.must_upload else work.host).data_ptr()

    def take(self, words: int) -> tuple[Offsets, int]:
        """Room for `words`, and its address for the kernels. ValueError if they are too many."""
        start, self.used = self.used, self.used + words
        if self.used > len(self._work.words):
            raise ValueError(f"tables take {8 * self.used} bytes and more, work has {8 * len(self._work.words)}")
        return self._work.words[start : self.used], self.address + 8 * start

    def put(self, numbers: Offsets) -> int:
        """Address of a copy."""
        room, address = self.take(len(numbers))
        room[:] = numbers
        return address

    def offsets(self, places: Places, block_stride: int, tokens: tuple[Axis, ...]) -> int:
        """Address of the offsets of all places."""
        room, address = self.take(places.count)
        place_offsets(places.array, block_stride, tokens, room)
        return address

    def upload(self, stream: int | None = None) -> None:
        """At most one copy, on this stream, for which work must have a `copy`, or on the current one."""
        work = self._work
        if self.must_upload and stream is not None:
            assert work.copy is not None
            work.copy(work.table.data_ptr(), work.host.data_ptr(), 8 * self.used, stream)
        elif self.must_upload:
            work.table[: self.used].copy_(work.host[: self.used], non_blocking=True)
