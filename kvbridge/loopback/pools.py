"""Synthetic pools: the pool that an engine of a given shape would attach, and where its rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch
from kvbridge_proto.pool import Codec, CodecName, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
BITS = {1: torch.uint8, 2: torch.int16}  # integers of as many bytes
PARTS = ("k", "v")


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


def scattered(shape: Shape) -> list[int]:
    """All its blocks, in an order as after a day of serving. The same on every rank."""
    return torch.randperm(shape.blocks, generator=torch.Generator().manual_seed(shape.block_tokens)).tolist()


def rows_of(
    regions: Sequence[torch.Tensor], shape: Shape, table: list[int], tokens: range
) -> Iterator[tuple[str, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """These tokens of a request on rank 0: for each plane its name, its integers, and the index of the rows in it."""
    bits = BITS[DTYPES[shape.codec].itemsize]
    layers = range(shape.layers) if len(regions) > 1 else (None,)
    for layer, memory in zip(layers, regions, strict=True):
        at = torch.arange(tokens.start, tokens.stop, device=memory.device)
        blocks = torch.tensor(table, device=memory.device)[at // shape.block_tokens]
        for of_layer, index, plane in planes_in(memory, shape, layer):
            yield f"layer {of_layer} {PARTS[index]}", plane.view(bits), (blocks, at % shape.block_tokens)


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


def planes_in(memory: torch.Tensor, shape: Shape, layer: int | None) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Every plane of one layer, or of all, as [block, token, head, element]."""
    typed = memory.view(DTYPES[shape.codec])
    strides = {axis: size // typed.itemsize for axis, size in _strides(shape).items()}
    size = (shape.blocks, shape.block_tokens, shape.local_heads, shape.width)
    for place, of_layer in enumerate(range(shape.layers) if layer is None else [layer]):
        for index in range(len(PARTS)):
            offset = place * strides["L"] + index * strides["P"]
            yield of_layer, index, typed.as_strided(size, tuple(strides[axis] for axis in "BTHE"), offset)
