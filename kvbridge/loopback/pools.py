"""Synthetic pools: the pool that an engine of a given shape would attach, and the expected value of every element.

A value is made from its (layer, part, head, token, element), so a value in the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch
from kvbridge_proto.pool import Codec, CodecName, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step

from ..values import Value

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
BITS = {1: torch.uint8, 2: torch.int16}  # integers of as many bytes
PARTS = ("k", "v")
POISON = 0xA5


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `axes` is the order of its memory, outermost first: Layer, Part, Block, Token, Head, Element.

    The last `drafts` of its layers are a draft model's.
    """

    name: str
    axes: str
    block_tokens: int
    blocks: int
    codec: CodecName = "bf16"
    scale: float = 0.0
    tp_size: int = 1
    layers: int = 8
    kv_heads: int = 8
    width: int = 128
    drafts: int = 0

    @property
    def local_heads(self) -> int:
        return self.kv_heads // self.tp_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, on all ranks together."""
        return self.layers * len(PARTS) * self.kv_heads * self.width * DTYPES[self.codec].itemsize

    @property
    def rank_bytes(self) -> int:
        return self.blocks * self.block_tokens * self.token_bytes // self.tp_size

    @property
    def layers_apart(self) -> tuple[int | None, ...]:
        """The layer of each region if every layer has its own, as on a GPU. (None,) if one region holds all."""
        return tuple(range(self.layers)) if self.axes.startswith("L") else (None,)


class DemoRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. The receiver already has the tokens before `first_token`."""

    name: str
    tokens: int
    first_token: int = 0
    seed: int = 0


class DemoRows(Value):
    """What `put` writes into one plane: values [T, H, E] at blocks [T] and offsets [T]."""

    plane: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor

    def put(self) -> None:
        """Write the values. On a GPU this only enqueues."""
        bits = BITS[self.values.itemsize]  # not every torch has an index_put for fp8
        self.plane.view(bits)[self.blocks, self.offsets] = self.values.view(bits)


def describe(shape: Shape, rank: int, layers: tuple[int | None, ...] = (None,)) -> Pool:
    """The pool of one rank. `layers` has the layer of each region, or None for a region that holds all."""
    strides = _strides(shape)
    itemsize = DTYPES[shape.codec].itemsize
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
            region=layer if layer in layers else 0,
            offset=(0 if layer in layers else layer * strides["L"]) + index * strides["P"],
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
    layer = Layer(kind="full", kv_heads=shape.kv_heads, key_width=shape.width, value_width=shape.width)
    return Pool(
        engine=Engine(kind="synthetic", version="0", id=shape.name),
        model=Model(
            name="demo",
            layers=(layer,) * shape.layers,
            depth=shape.layers - shape.drafts,
            drafts=tuple(range(shape.layers - shape.drafts, shape.layers)),
        ),
        shard=Shard(tp_rank=rank, tp_size=shape.tp_size),
        groups=(Group(kind="full", block_tokens=shape.block_tokens, blocks=shape.blocks),),
        regions=(Region(shape.rank_bytes // len(layers)),) * len(layers),
        planes=planes,
    )


def tables(shape: Shape, requests: list[DemoRequest]) -> dict[str, list[int]]:
    """The blocks of every request, scattered over the pool as after a day of serving. The same on every rank."""
    free = torch.randperm(shape.blocks, generator=torch.Generator().manual_seed(shape.block_tokens)).tolist()
    return {request.name: [free.pop() for _ in range(-(-request.tokens // shape.block_tokens))] for request in requests}


def prepare(
    memory: torch.Tensor,
    shape: Shape,
    rank: int,
    table: Sequence[int] | torch.Tensor,
    tokens: torch.Tensor,
    codec: CodecName,
    layer: int | None = None,
    seed: int = 0,
    has_zeros: bool = False,
) -> Iterator[DemoRows]:
    """The rows of these tokens of a prompt, plane by plane, as they must be after a transfer from an engine of `codec`.

    `memory` holds that `layer`, or all of them. `table` has the blocks of the whole prompt. With `has_zeros`, the draft
    model's rows are zeros, as if that engine had none.
    """
    device = memory.device
    blocks = torch.as_tensor(table, device=device)[tokens // shape.block_tokens]
    offsets = tokens % shape.block_tokens
    heads = torch.arange(rank * shape.local_heads, (rank + 1) * shape.local_heads, device=device)
    for of_layer, index, plane in _planes(memory, shape, layer):
        values = _values(of_layer, index, heads, tokens, shape.width, seed).to(DTYPES[codec])
        if has_zeros and of_layer >= shape.layers - shape.drafts:
            values = torch.zeros_like(values)
        yield DemoRows(plane, blocks, offsets, values if codec == shape.codec else _quantized(values, shape))


def rows_of(
    regions: Sequence[torch.Tensor], shape: Shape, table: list[int], tokens: range
) -> Iterator[tuple[str, torch.Tensor]]:
    """These tokens of a request on rank 0: for each plane its name, and its rows as integers [T, H, E]."""
    bits = BITS[DTYPES[shape.codec].itemsize]
    layers = range(shape.layers) if len(regions) > 1 else (None,)
    for layer, memory in zip(layers, regions, strict=True):
        at = torch.arange(tokens.start, tokens.stop, device=memory.device)
        blocks = torch.tensor(table, device=memory.device)[at // shape.block_tokens]
        for of_layer, index, plane in _planes(memory, shape, layer):
            yield f"layer {of_layer} {PARTS[index]}", plane.view(bits)[blocks, at % shape.block_tokens]


def first_difference(
    found: torch.Tensor, expected: torch.Tensor, shape: Shape, rank: int, layer: int | None = None
) -> str:
    """Describes where two memories of this shape first differ; empty if nowhere."""
    if torch.equal(found, expected):
        return ""
    bits = BITS[DTYPES[shape.codec].itemsize]
    pairs = zip(_planes(found, shape, layer), _planes(expected, shape, layer), strict=True)
    for (of_layer, index, ours), (_, _, wanted) in pairs:
        wrong = (ours.view(bits) != wanted.view(bits)).nonzero()
        if len(wrong):
            block, token, head, element = wrong[0].tolist()
            place = (
                f"layer {of_layer} {PARTS[index]} head {head + rank * shape.local_heads} block {block} token {token}"
            )
            values = f"{ours[block, token, head, element]}, expected {wanted[block, token, head, element]}"
            return f"{len(wrong)} elements differ, first at {place} element {element}: {values}"
    return "memory outside of the planes differs"


def _strides(shape: Shape) -> dict[str, int]:
    counts = {
        "L": shape.layers,
        "P": len(PARTS),
        "B": shape.blocks,
        "T": shape.block_tokens,
        "H": shape.local_heads,
        "E": shape.width,
    }
    strides, size = {}, DTYPES[shape.codec].itemsize
    for axis in reversed(shape.axes):
        strides[axis] = size
        size *= counts[axis]
    return strides


def _planes(memory: torch.Tensor, shape: Shape, layer: int | None) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Every plane of one layer, or of all, as [block, token, head, element]."""
    typed = memory.view(DTYPES[shape.codec])
    strides = {axis: size // typed.itemsize for axis, size in _strides(shape).items()}
    size = (shape.blocks, shape.block_tokens, shape.local_heads, shape.width)
    for place, of_layer in enumerate(range(shape.layers) if layer is None else [layer]):
        for index in range(len(PARTS)):
            offset = place * strides["L"] + index * strides["P"]
            yield of_layer, index, typed.as_strided(size, tuple(strides[axis] for axis in "BTHE"), offset)


def _values(layer: int, part: int, heads: torch.Tensor, tokens: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Values in [-8, 8), fp32 [T, H, E], each made from its coordinates."""
    rows = (tokens[:, None] * 1009 + heads[None, :] * 9176 + layer * 40503 + part * 30011 + seed * 7919) & 0xFFFF
    mixed = rows[:, :, None].int() * 25173 + torch.arange(width, dtype=torch.int32, device=rows.device) * 13849
    mixed = (mixed ^ (mixed >> 7)) & 0xFFFF
    return mixed.float() / 4096 - 8


def _quantized(values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The reference conversion: fp32, round to nearest even; 8 bits saturate."""
    numbers, dtype = values.float() / (shape.scale or 1.0), DTYPES[shape.codec]
    if dtype.itemsize > 1:
        return numbers.to(dtype)
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)
