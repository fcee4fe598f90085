"""What both agents compare after a push: xxh3 over the bytes of a slot in host memory."""

from __future__ import annotations

import torch
import xxhash


def digest(slot: torch.Tensor) -> int:
    """64 bits over a contiguous uint8 tensor; "xxh3" on the wire. Reads in place, releases the GIL."""
    return xxhash.xxh3_64_intdigest(slot.numpy().data)
