"""What every element of the stand-in engine's pool must be: rows of a rendezvous, or the stamp of a block's owner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvbridge.loopback.pools import PARTS, Shape

PIECE_NUMBERS = 1 << 24  # of so many at a time, so that a GPU has room for them


class Content:
    """Makes the rows of rendezvous ids, `tokens` long, for a shape whose outermost axis is the block.

    If there are only so many `contents`, each is made once.
    """

    def __init__(self, shape: Shape, tokens: int, device: str, contents: int = 0) -> None:
        assert shape.axes.startswith("B") and not tokens % shape.block_tokens
        self.shape, self.device = shape, torch.device(device)
        self.rendezvous_blocks = tokens // shape.block_tokens
        self._is_hnd = shape.axes.index("H") < shape.axes.index("T")
        self._contents = contents
        self._made: dict[int, torch.Tensor] = {}
        self._tokens = torch.arange(tokens, dtype=torch.int32, device=device)
        axes = (1, shape.layers, len(PARTS), 1, shape.kv_heads, shape.width)
        factors = np.random.default_rng(7).integers(1, 1 << 31, np.prod(axes), dtype=np.uint32) * 2 + 1
        self._factors = torch.from_numpy(factors.view(np.int32)).to(device).reshape(axes)

    def blocks_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The pool's memory, bytes, as one row of numbers for each block."""
        return memory.view(torch.int16).view(self.shape.blocks, -1)

    def pieces(self, blocks: int) -> Iterator[slice]:
        """So many blocks, some at a time."""
        step = max(1, PIECE_NUMBERS * self.shape.blocks * 2 // self.shape.rank_bytes)
        return (slice(first, min(first + step, blocks)) for first in range(0, blocks, step))

    def rows(self, rendezvous: int) -> torch.Tensor:
        """What the blocks of this rendezvous must hold, in token order."""
        if not self._contents:
            return self._rows(rendezvous)
        number = rendezvous % self._contents
        if number not in self._made:
            self._made[number] = self._rows(number)
        return self._made[number]

    def _rows(self, rendezvous: int) -> torch.Tensor:
        seed = ((rendezvous * 2654435761 + 12345) & 0xFFFFFFFF) - (1 << 31)
        tokens = ((self._tokens * 40503) ^ seed).view(self.rendezvous_blocks, 1, 1, -1, 1, 1)
        rows = torch.empty(self.rendezvous_blocks, self._factors.numel() * tokens.shape[3], dtype=torch.int16)
        rows = rows.to(self.device)
        for piece in self.pieces(self.rendezvous_blocks):
            numbers = ((tokens[piece] * self._factors) >> 13).to(torch.int16)
            rows[piece] = (numbers.transpose(3, 4) if self._is_hnd else numbers).reshape(len(numbers), -1)
        return rows
