"""Working memory kept between calls, because on a CPU touching fresh pages costs more than the copy itself."""

from __future__ import annotations

import torch


class Scratch:
    """One growing buffer per purpose. Not thread-safe: its owner runs one move at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, size_bytes: int, device: torch.device) -> torch.Tensor:
        """An uninitialised uint8 tensor of `size_bytes`, valid until the next `take` for the same purpose."""
        kept = self._buffers.get(purpose)
        if kept is None or kept.numel() < size_bytes or kept.device != device:
            kept = self._buffers[purpose] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return kept[:size_bytes]
