"""What a chunk in flight needs besides its slot: room for tables, and the kernels it has launched before."""

from __future__ import annotations

import torch

from .scratch import Scratch

TABLE_BYTES = 1 << 20


class Work:
    """Buffers allocated once. One per chunk in flight: a launch reads them until its event has passed.

    On a GPU `table_bytes` of pinned and as much device memory hold the tables of one chunk: 8 bytes a place, about 64
    a plane, 12 a plane and head where it converts. On the CPU it is scratch for the plain-torch twins. Not thread-safe.
    """

    def __init__(self, device: torch.device | str, table_bytes: int = TABLE_BYTES) -> None:
        self.device = torch.device(device)
        self.table_bytes = table_bytes
        self.scratch = Scratch()
        if self.device.type == "cuda":
            self.host = torch.zeros(table_bytes // 8, dtype=torch.int64, pin_memory=True)
            self.table = torch.zeros(table_bytes // 8, dtype=torch.int64, device=self.device)
