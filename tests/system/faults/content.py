"""What every element of a pool must be: each rendezvous has its own rows, and each owner of a block its own stamp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvbridge_proto.pool import Pool

from testing.pools import Shape, describe

LAYERS, PARTS, HEADS = 4, 2, 4
# Blocks of two engines that disagree: [block, layer, part, token, head, element] and [.., head, token, element].
AXES = {"sender": "cross_layer", "receiver": "cross_layer_hnd"}


@dataclass(frozen=True, slots=True)
class Size:
    """How long prompts are, in tokens, and their rows; the blocks that an engine has for so many of them."""

    tokens: int = 256
    width: int = 32
    prompts: int = 6

    def shape(self, role: str) -> Shape:
        block_tokens = min(self.tokens, {"sender": 16, "receiver": 32}[role])
        blocks = self.prompts * (self.tokens // block_tokens)
        return Shape(
            layout=AXES[role],
            layers=LAYERS,
            kv_heads=HEADS,
            key_width=self.width,
            value_width=self.width,
            block_tokens=block_tokens,
            blocks=blocks,
        )


class Content:
    """Makes the rows of rendezvous ids and looks at blocks, for one role."""

    def __init__(self, role: str, size: Size) -> None:
        self.shape = size.shape(role)
        self.pool: Pool = describe(self.shape)
        self._is_hnd = role == "receiver"
        (region,) = self.pool.regions
        self.size_bytes = region.size_bytes
        self.rendezvous_blocks = size.tokens // self.shape.block_tokens
        self._tokens = np.arange(size.tokens, dtype=np.uint32)
        count = LAYERS * PARTS * HEADS * size.width
        self._factors = (np.random.default_rng(7).integers(1, 1 << 31, count, dtype=np.uint32) * 2 + 1).reshape(
            LAYERS, PARTS, 1, HEADS, size.width
        )

    def blocks_of(self, memory: np.ndarray) -> np.ndarray:
        """The pool's memory, bytes, as one row of numbers for each block."""
        return memory.view(np.uint16).reshape(self.shape.blocks, -1)

    def rows(self, rendezvous: int) -> np.ndarray:
        """What the blocks of this rendezvous must hold, in token order."""
        seed = np.uint32((rendezvous * 2654435761 + 12345) & 0xFFFFFFFF)
        tokens = (self._tokens * np.uint32(40503)) ^ seed
        tokens = tokens.reshape(self.rendezvous_blocks, 1, 1, -1, 1, 1)
        numbers = ((tokens * self._factors[None]) >> np.uint32(13)).astype(np.uint16)
        if self._is_hnd:
            numbers = numbers.swapaxes(3, 4)
        return np.ascontiguousarray(numbers).reshape(self.rendezvous_blocks, -1)
