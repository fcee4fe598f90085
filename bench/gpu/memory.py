"""Engine memory for the GPU bench: makes, fills and checks a pool, layer by layer, so that 8 GiB fit.

All tokens of a pool are one long sequence over blocks in random order. A request is a window of it, so repeated
requests touch other memory each time. Every element is a number made from its coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from kvbridge_proto.pool import CodecName
from msgspec import structs

from kvbridge.loopback.pools import Shape, describe
from testing.made_rows import POISON, first_difference, prepare

GRAIN_TOKENS = 64  # windows begin at multiples of this, a block border for every block size used here


class Memory:
    """One rank's memory for `tokens` tokens, with blocks to spare, whatever `shape.blocks` says. Region i is layer i.

    `table[i]` is the block of tokens [i*block_tokens, (i+1)*block_tokens) of the sequence.
    """

    def __init__(self, shape: Shape, rank: int, tokens: int, device: str, seed: int) -> None:
        used = -(-tokens // shape.block_tokens)
        name = f"bench-{seed}-{shape}"[:256]
        self.shape = structs.replace(shape, name=name, blocks=used * 17 // 16 + 4)
        self.rank, self.tokens, self.device = rank, tokens, torch.device(device)
        self.pool = describe(self.shape, rank, self.shape.layers_apart)
        sizes = [region.size_bytes for region in self.pool.regions]
        self.regions = [torch.full((size,), POISON, dtype=torch.uint8, device=device) for size in sizes]
        blocks = torch.randperm(self.shape.blocks, generator=torch.Generator().manual_seed(seed))
        self.table = blocks[:used].tolist()
        self.spare = int(blocks[-1])
        self._table = torch.tensor(self.table, device=device)

    def blocks(self, first: int, end: int) -> list[int]:
        """Those of a window."""
        size = self.shape.block_tokens
        return self.table[first // size : -(-end // size)]

    def poison(self) -> None:
        for region in self.regions:
            region.fill_(POISON)

    def fill(self, codec: CodecName) -> None:
        """Fill in the whole sequence, as computed by an engine of codec `codec`."""
        for layer, region in enumerate(self.regions):
            self._write(region, layer, torch.arange(self.tokens, device=self.device), codec)

    def wrong(self, windows: Sequence[tuple[int, int]], codec: CodecName) -> str:
        """What is wrong, or "". Tokens of the windows must be as `codec` computed them, and all else poison."""
        is_wanted = torch.zeros(self.tokens, dtype=torch.bool, device=self.device)
        for first, end in windows:
            is_wanted[first:end] = True
        tokens = is_wanted.nonzero().flatten()
        for layer, region in enumerate(self.regions):
            expected = torch.full_like(region, POISON)
            self._write(expected, layer, tokens, codec)
            if wrong := first_difference(region, expected, self.shape, self.rank, layer):
                return wrong
        return ""

    def spoil(self, token: int | None) -> None:
        """Flip one bit of the last plane: of a token, or (None) of an unused block. A second call undoes the first."""
        plane, size = self.pool.planes[-1], self.shape.block_tokens
        block, offset = (self.spare, 0) if token is None else (self.table[token // size], token % size)
        place = plane.offset + block * plane.block_stride + offset * plane.token_axis[0].stride
        self.regions[plane.region][place] ^= 1

    def _write(self, region: torch.Tensor, layer: int, tokens: torch.Tensor, codec: CodecName) -> None:
        for rows in prepare(region, self.shape, self.rank, self._table, tokens, codec, layer):
            rows.put()


def windows(count: int, tokens: int, capacity: int, first: int) -> Iterator[tuple[int, int]]:
    """`count` windows of `tokens` tokens, one after another from window `first` on, wrapping round the sequence."""
    step = -(-tokens // GRAIN_TOKENS) * GRAIN_TOKENS
    places = capacity // step
    for number in range(first, first + count):
        begin = number % places * step
        yield begin, begin + tokens
