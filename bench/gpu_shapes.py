"""Engine memory for the GPU bench: makes, fills and checks a Llama-8B-shaped pool, with an allocation per layer.

All tokens of a pool are one long sequence over blocks in random order. A request is a window of it, so repeated
requests touch other memory each time. Every element is a number made from its coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import torch
from kvbridge_proto.pool import Codec, CodecName, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step

DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
AXES = {"NHD": "PBTHE", "HND": "PBHTE"}
PARTS = ("k", "v")
POISON = 0xA5
GRAIN_TOKENS = 64  # windows begin at multiples of this, a block border for every block size used here


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. All its planes have `scale` (0: none): value = stored * scale."""

    layout: Literal["NHD", "HND"] = "NHD"
    block_tokens: int = 16
    codec: CodecName = "bf16"
    scale: float = 0.0
    tp_size: int = 1
    layers: int = 32
    kv_heads: int = 8
    width: int = 128

    @property
    def local_heads(self) -> int:
        return self.kv_heads // self.tp_size

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers, K and V, of all ranks together."""
        return self.layers * len(PARTS) * self.kv_heads * self.width * DTYPES[self.codec].itemsize

    def blocks(self, tokens: int) -> int:
        """How many blocks a pool for this many tokens has. Some are never used."""
        return -(-tokens // self.block_tokens) * 17 // 16 + 4

    def strides(self, tokens: int) -> dict[str, int]:
        """Bytes from one part, block, token, head, element to the next."""
        counts = {"P": len(PARTS), "B": self.blocks(tokens), "T": self.block_tokens}
        counts |= {"H": self.local_heads, "E": self.width}
        strides, size = {}, DTYPES[self.codec].itemsize
        for axis in reversed(AXES[self.layout]):
            strides[axis] = size
            size *= counts[axis]
        return strides

    def layer_bytes(self, tokens: int) -> int:
        per_token = len(PARTS) * self.local_heads * self.width * DTYPES[self.codec].itemsize
        return self.blocks(tokens) * self.block_tokens * per_token


def describe(shape: Shape, rank: int, tokens: int, engine: str) -> Pool:
    """The pool of one rank with room for `tokens` tokens. Region i is layer i."""
    strides, itemsize = shape.strides(tokens), DTYPES[shape.codec].itemsize
    codec = Codec(
        name=shape.codec,
        width=shape.width,
        element_bytes=itemsize,
        row_bytes=shape.width * itemsize,
        scales=(shape.scale,) if shape.scale else (),
    )
    planes = tuple(
        Plane(
            layer=layer,
            part=part,
            region=layer,
            offset=index * strides["P"],
            block_stride=strides["B"],
            token_axis=(Step(shape.block_tokens, strides["T"]),),
            head_stride=strides["H"],
            element_axis=(Step(shape.width, strides["E"]),),
            first_head=rank * shape.local_heads,
            heads=shape.local_heads,
            total_heads=shape.kv_heads,
            codec=codec,
        )
        for layer in range(shape.layers)
        for index, part in enumerate(PARTS)
    )
    kept = Layer(kind="full", kv_heads=shape.kv_heads, key_width=shape.width, value_width=shape.width)
    return Pool(
        engine=Engine(kind="bench", version="0", id=engine),
        model=Model(name="bench", layers=(kept,) * shape.layers),
        shard=Shard(tp_rank=rank, tp_size=shape.tp_size),
        groups=(Group(kind="full", block_tokens=shape.block_tokens, blocks=shape.blocks(tokens)),),
        regions=(Region(shape.layer_bytes(tokens)),) * shape.layers,
        planes=planes,
    )


class Memory:
    """One rank's memory. `table[i]` is the block of tokens [i*block_tokens, (i+1)*block_tokens) of the sequence."""

    def __init__(self, shape: Shape, rank: int, tokens: int, device: str, seed: int) -> None:
        self.shape, self.rank, self.tokens, self.device = shape, rank, tokens, torch.device(device)
        size = shape.layer_bytes(tokens)
        self.layers = [torch.full((size,), POISON, dtype=torch.uint8, device=device) for _ in range(shape.layers)]
        blocks = torch.randperm(shape.blocks(tokens), generator=torch.Generator().manual_seed(seed))
        self.table = blocks[: -(-tokens // shape.block_tokens)].tolist()
        self.spare = int(blocks[-1])
        self._table = torch.tensor(self.table, device=device)

    def poison(self) -> None:
        for layer in self.layers:
            layer.fill_(POISON)

    def fill(self, codec: CodecName) -> None:
        """Fill in the whole sequence, as computed by an engine of codec `codec`."""
        for layer, memory in enumerate(self.layers):
            self._write(memory, layer, torch.arange(self.tokens, device=self.device), codec)

    def wrong(self, windows: Sequence[tuple[int, int]], codec: CodecName) -> str:
        """What is wrong, or "". Tokens of the windows must be as `codec` computed them, and all else poison."""
        is_wanted = torch.zeros(self.tokens, dtype=torch.bool, device=self.device)
        for first, end in windows:
            is_wanted[first:end] = True
        tokens = is_wanted.nonzero().flatten()
        for layer, memory in enumerate(self.layers):
            expected = torch.full_like(memory, POISON)
            self._write(expected, layer, tokens, codec)
            if not torch.equal(memory.view(torch.int64), expected.view(torch.int64)):
                return self._first_difference(layer, memory, expected)
        return ""

    def spoil(self, token: int | None) -> None:
        """Flip one bit of the last layer: of a token, or (None) of an unused block. A second call undoes the first."""
        plane = self._planes(self.layers[-1], torch.uint8)[-1]
        size = self.shape.block_tokens
        block, offset = (self.spare, 0) if token is None else (self.table[token // size], token % size)
        plane[block, offset, -1, -1] ^= 1

    def _write(self, memory: torch.Tensor, layer: int, tokens: torch.Tensor, codec: CodecName) -> None:
        size, heads = self.shape.block_tokens, self.shape.local_heads
        ids = torch.arange(self.rank * heads, (self.rank + 1) * heads, device=self.device)
        for part, plane in enumerate(self._planes(memory, DTYPES[self.shape.codec])):
            values = _values(layer, part, ids, tokens, self.shape.width).to(DTYPES[codec])
            stored = values if codec == self.shape.codec else _quantized(values, self.shape)
            bits = plane.view(torch.uint8) if stored.itemsize == 1 else plane  # torch has no index_put for fp8
            bits[self._table[tokens // size], tokens % size] = stored.view(bits.dtype)

    def _planes(self, memory: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """K and V as [block, token, head, element] of `dtype`."""
        typed = memory.view(dtype)
        strides = {axis: size // typed.itemsize for axis, size in self.shape.strides(self.tokens).items()}
        width = self.shape.width * DTYPES[self.shape.codec].itemsize // typed.itemsize
        size = (self.shape.blocks(self.tokens), self.shape.block_tokens, self.shape.local_heads, width)
        steps = (*(strides[axis] for axis in "BTH"), 1)
        return [typed.as_strided(size, steps, part * strides["P"]) for part in range(len(PARTS))]

    def _first_difference(self, layer: int, found: torch.Tensor, expected: torch.Tensor) -> str:
        pairs = zip(PARTS, self._planes(found, torch.uint8), self._planes(expected, torch.uint8), strict=True)
        for part, ours, wanted in pairs:
            places = (ours != wanted).nonzero()
            if len(places):
                block, token, head, byte = places[0].tolist()
                where = f"layer {layer} {part} block {block} token {token} head {head} byte {byte}"
                values = (
                    f"{int(ours[block, token, head, byte]):#x}, expected {int(wanted[block, token, head, byte]):#x}"
                )
                return f"{len(places)} bytes differ, first at {where}: {values}"
        return f"layer {layer}: memory outside of the planes differs"


def _values(layer: int, part: int, heads: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers in [-8, 8), fp32 [T, H, E], each made from its coordinates."""
    rows = (tokens[:, None] * 1009 + heads[None, :] * 9176 + layer * 40503 + part * 30011) & 0xFFFF
    numbers = rows[:, :, None].int() * 25173 + torch.arange(width, dtype=torch.int32, device=tokens.device) * 13849
    numbers = (numbers ^ (numbers >> 7)) & 0xFFFF
    return numbers.float() / 4096 - 8


def _quantized(values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The reference conversion: in fp32, round to nearest even, saturate in 8 bits."""
    numbers, dtype = values.float() / (shape.scale or 1.0), DTYPES[shape.codec]
    if dtype.itemsize > 1:
        return numbers.to(dtype)
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)


def windows(count: int, tokens: int, capacity: int, first: int) -> Iterator[tuple[int, int]]:
    """`count` windows of `tokens` tokens, one after another from window `first` on, wrapping round the sequence."""
    step = -(-tokens // GRAIN_TOKENS) * GRAIN_TOKENS
    places = capacity // step
    for number in range(first, first + count):
        begin = number % places * step
        yield begin, begin + tokens
