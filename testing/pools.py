"""Pools of every shape that an engine may have, and their memory, which `testing.oracle` fills.

`describe` makes the record of one rank's pool. `build` also makes its memory, full of poison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from kvbridge_proto.pool import (
    Codec,
    CodecName,
    Engine,
    Group,
    GroupKind,
    Layer,
    Model,
    Plane,
    Pool,
    Region,
    Shard,
    Step,
)

from kvbridge.geometry.wire import PLAIN, PLANE_SCALED

POISON = 0xA5
PARTS = ("k", "v")
# The pieces of a state, in the order of a block: heads in all, numbers of each head. Every rank has the only head of b.
STATES = {"conv_x": (4, 6), "conv_b": (1, 6), "state": (4, 20)}
CONV_ROWS = 3  # of a convolution's numbers
ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}  # all others: 1
EIGHT_BITS: tuple[CodecName, ...] = tuple(name for name, size in PLAIN.items() if size == 1)
# Codecs whose rows have fewer bytes than numbers, or more.
ROW_BYTES: dict[str, int] = {"fp8_ds_mla": 656, "fp8_ds_v4": 576, "nvfp4_ds_mla": 352}
HALF = ("int4_row_scale", "nvfp4", "fp4_mx_block16", "mxfp4")
# How many numbers share one scale of a byte.
SCALE_BLOCK: dict[str, int] = {"mxfp8_e4m3": 32, "nvfp4": 16, "fp4_mx_block16": 16, "mxfp4": 32}
ROW_SCALES = ("fp8_row_scale", "int8_row_scale", "int4_row_scale")

# The axes of a region, outermost first: L layer, P part, B block, T token, H head, E element. If a letter is missing,
# there is a region for each of its values. A row's scale lies after its numbers. Other scales are parts like K and V.
LAYOUTS = {
    "nhd": "BTHE",  # K and V apart
    "hnd": "BHTE",
    "two_first": "PBTHE",  # (2, NB, ...)
    "block_first": "BPTHE",  # (NB, 2, ...)
    "packed": "BTHPE",  # K|V in one row
    "packed_hnd": "BHTPE",
    "cross_layer": "BLPTHE",  # block outermost, all layers in one region
    "cross_layer_hnd": "BLPHTE",
    "token_outer": "BTLPHE",
    "cpu_vec": "BHP*",  # vLLM's CPU cache: K column-major, V row-major, K half before V half in (block, head)
    "cpu_amx": "BHP*",  # the same on a machine with AMX: both tiled
}


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's pool and its memory, one byte array for each region."""

    pool: Pool
    memory: tuple[np.ndarray, ...]

    def copy(self) -> Held:
        return Held(self.pool, tuple(region.copy() for region in self.memory))


@dataclass(frozen=True, slots=True)
class More:
    """A part beside K and V, or the latent, of some layers (empty: of all), in a region for each layer.

    A rank holds its share of the heads, or all of them unless `is_cut`. A page holds `page_tokens` tokens (0: as many
    as a block), head after head: all rows of the page, then their scales, in the codec `scale_codec`. A row stands for
    `row_tokens` tokens.
    """

    part: str
    heads: int = 1
    width: int = 32
    codec: CodecName = "bf16"
    is_cut: bool = False
    page_tokens: int = 0
    layers: tuple[int, ...] = ()
    scale_codec: CodecName = "fp32"
    row_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and how an engine keeps it. `build(shape, ...)` makes one rank.

    Layer i is in a group of kind `kinds[i % len(kinds)]`. `window` and `begins_inside` are for sliding and chunked
    kinds. `group_tokens` has the block sizes of kinds whose blocks are not of `block_tokens`. The last `drafts` layers
    are a draft model's. An engine has `tp_size * cp_size` ranks in each pipeline stage. Each holds the heads of its
    `tp_rank` and the tokens of its `cp_rank`.
    """

    layout: str = "nhd"
    layers: int = 2
    kv_heads: int = 4
    key_width: int = 8
    value_width: int = 8
    rope_width: int = 0
    is_mla: bool = False
    block_tokens: int = 16
    blocks: int = 12
    codec: CodecName = "bf16"
    scales: Mapping[str, tuple[float, ...]] | None = None
    kinds: tuple[GroupKind, ...] = ("full",)
    window: int = 0
    begins_inside: bool = False
    group_tokens: Mapping[str, int] = field(default_factory=dict)
    tp_size: int = 1
    pp_size: int = 1
    pp_layers: tuple[int, ...] = ()  # of each stage, if they are not split evenly
    cp_size: int = 1
    cp_interleave: int = 1
    pad_bytes: int = 0
    model: str = "oracle"
    drafts: int = 0
    draft: str = ""
    more: tuple[More, ...] = ()

    def __post_init__(self) -> None:
        if self.is_mla:
            assert self.kv_heads == 1 and self.value_width == 0

    @property
    def groups(self) -> tuple[GroupKind, ...]:
        """The kind of each group."""
        return tuple(dict.fromkeys(self.kinds))

    def kind(self, layer: int) -> GroupKind:
        return self.kinds[layer % len(self.kinds)]

    def tokens_of(self, kind: GroupKind) -> int:
        return self.group_tokens.get(kind, self.block_tokens)


def mla(codec: CodecName = "bf16", **changes: Any) -> Shape:
    """The shape of a latent cache: one head of 512 numbers and 64 of rope, the same on every rank."""
    whole = Shape(kv_heads=1, key_width=576, value_width=0, rope_width=64, is_mla=True, codec=codec)
    return replace(whole, **changes)


def split(count: int, rank: int, size: int) -> range:
    """Which of `count` heads or layers rank `rank` of `size` holds. With more ranks than heads, heads repeat."""
    first = rank * count // size
    return range(first, max((rank + 1) * count // size, first + 1))


def ranks_of(shape: Shape) -> list[tuple[int, int, int]]:
    """Every rank of an engine, as `build` takes it."""
    stages, shares, ranks = range(shape.pp_size), range(shape.cp_size), range(shape.tp_size)
    return [(tp_rank, pp_rank, cp_rank) for pp_rank in stages for cp_rank in shares for tp_rank in ranks]


def build_all(shape: Shape) -> list[Held]:
    """Every rank of an engine."""
    return [build(shape, *ranks) for ranks in ranks_of(shape)]


def build(shape: Shape, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0) -> Held:
    """One rank's pool, all poison."""
    pool = describe(shape, tp_rank, pp_rank, cp_rank)
    return Held(pool, tuple(np.full(region.size_bytes, POISON, np.uint8) for region in pool.regions))


def describe(shape: Shape, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0) -> Pool:
    """The record of one rank's pool."""
    planes, sizes = _Planes(shape, tp_rank, pp_rank, cp_rank).described()
    return Pool(
        engine=Engine(kind="oracle", version="0", id=shape.layout),
        model=Model(
            name=shape.model,
            layers=tuple(_layer(shape, layer) for layer in range(shape.layers)),
            depth=shape.layers - shape.drafts if shape.drafts else 0,
            drafts=tuple(layer for layer in _layers(shape, pp_rank) if layer >= shape.layers - shape.drafts),
            draft=shape.draft,
        ),
        shard=Shard(
            tp_rank=cp_rank * shape.tp_size + tp_rank,
            tp_size=shape.tp_size * shape.cp_size,
            pp_rank=pp_rank,
            pp_size=shape.pp_size,
            cp_rank=cp_rank,
            cp_size=shape.cp_size,
            cp_interleave=shape.cp_interleave,
        ),
        groups=tuple(
            Group(
                kind=kind,
                block_tokens=shape.tokens_of(kind),
                blocks=shape.blocks,
                window=shape.window if kind in ("sliding", "chunked") else 0,
                begins_inside=shape.begins_inside and kind in ("sliding", "chunked"),
            )
            for kind in shape.groups
        ),
        regions=tuple(Region(size) for size in sizes),
        planes=tuple(planes),
    )


def _layer(shape: Shape, layer: int) -> Layer:
    kind = shape.kind(layer)
    if kind == "state":
        return Layer(kind="state", kv_heads=1, key_width=1, value_width=0)
    return Layer(
        kind="mla" if shape.is_mla else kind,
        kv_heads=shape.kv_heads,
        key_width=shape.key_width,
        value_width=shape.value_width,
        rope_width=shape.rope_width,
        window=shape.window if kind in ("sliding", "chunked") else 0,
    )


def _layers(shape: Shape, pp_rank: int) -> range:
    assert shape.pp_size <= shape.layers
    if not shape.pp_layers:
        return split(shape.layers, pp_rank, shape.pp_size)
    assert len(shape.pp_layers) == shape.pp_size and sum(shape.pp_layers) == shape.layers
    first = sum(shape.pp_layers[:pp_rank])
    return range(first, first + shape.pp_layers[pp_rank])


def codecs_of(shape: Shape) -> dict[str, Codec]:
    """The codec of each part of an attention layer, without the plane's scales. Parts of one row are in this order."""
    widths = {"latent": shape.key_width} if shape.is_mla else {"k": shape.key_width, "v": shape.value_width}
    found: dict[str, Codec] = {}
    for part, width in widths.items():
        element_bytes = ELEMENT_BYTES.get(shape.codec, 1)
        row_bytes = ROW_BYTES.get(shape.codec) or width * element_bytes // (2 if shape.codec in HALF else 1)
        found[part] = Codec(name=shape.codec, width=width, element_bytes=element_bytes, row_bytes=row_bytes)
        if shape.codec in ROW_SCALES:
            found[f"{part}_scale"] = Codec(name="fp32", width=1, element_bytes=4, row_bytes=4)
        elif shape.codec in SCALE_BLOCK or shape.codec == "fp8_ds_v4":
            scales = width // SCALE_BLOCK[shape.codec] if shape.codec in SCALE_BLOCK else 8
            found[f"{part}_scale"] = Codec(name="opaque", width=scales, element_bytes=1, row_bytes=scales)
    return found


class _Planes:
    """The planes of one rank, and the sizes of its regions."""

    def __init__(self, shape: Shape, tp_rank: int, pp_rank: int, cp_rank: int) -> None:
        self._shape = shape
        self._tp_rank = tp_rank
        self._state_rank = cp_rank * shape.tp_size + tp_rank  # a state's heads are cut by all ranks of a stage
        self._layers = _layers(shape, pp_rank)
        self._heads = split(shape.kv_heads, tp_rank, shape.tp_size)
        self._axes = LAYOUTS[shape.layout]
        self._planes: list[Plane] = []
        self._sizes: list[int] = []
        self._regions: dict[tuple[int, str], int] = {}

    def described(self) -> tuple[list[Plane], list[int]]:
        attention = [layer for layer in self._layers if self._shape.kind(layer) != "state"]
        assert "L" not in self._axes or len({self._shape.tokens_of(self._shape.kind(each)) for each in attention}) < 2
        for layer in self._layers:
            if layer in attention:
                self._attention(layer, attention.index(layer), len(attention))
                for more in self._shape.more:
                    if layer in (more.layers or self._layers):
                        self._more(layer, more)
            else:
                self._state(layer)
        return self._planes, self._sizes

    def _attention(self, layer: int, index: int, layers: int) -> None:
        shape, axes, heads = self._shape, self._axes, self._heads
        codecs = codecs_of(shape)
        tokens = shape.tokens_of(shape.kind(layer))
        for part, codec in codecs.items():
            strides, size = _strides(shape, codecs, tokens, len(heads), layers, part)
            own = part.removesuffix("_scale") if shape.codec in ROW_SCALES else part
            region = self._region(layer if "L" not in axes else -1, own if "P" not in axes else "", size)
            token_axis, element_axis = _inner_axes(shape, tokens, part, codec, strides)
            self._add(
                *(layer, part, heads, shape.kv_heads, _scaled(shape, part, heads, codec)),
                region=region,
                offset=shape.pad_bytes + index * strides["L"] + strides["P"],
                block_stride=strides["B"],
                token_axis=token_axis,
                head_stride=strides["H"],
                element_axis=element_axis,
            )

    def _more(self, layer: int, more: More) -> None:
        shape = self._shape
        heads = split(more.heads, self._tp_rank, shape.tp_size) if more.is_cut else range(more.heads)
        tokens = shape.tokens_of(shape.kind(layer))
        page, size = min(more.page_tokens or tokens, tokens), ELEMENT_BYTES.get(more.codec, 1)
        rows = more.width * size
        codec = Codec(
            name=more.codec, width=more.width, element_bytes=size, row_bytes=rows, scale_codec=more.scale_codec
        )
        codecs = {more.part: codec}
        if more.codec in ROW_SCALES:
            codecs[f"{more.part}_scale"] = Codec(name=more.scale_codec, width=1, element_bytes=4, row_bytes=4)
        in_page = page // more.row_tokens
        page_bytes = in_page * len(heads) * sum(codec.row_bytes for codec in codecs.values())
        offset = shape.pad_bytes
        for part, codec in codecs.items():
            self._add(
                *(layer, part, heads, more.heads, codec),
                region=self._region(layer, more.part, shape.blocks * (tokens // page) * page_bytes),
                offset=offset,
                block_stride=tokens // page * page_bytes,
                token_axis=(Step(tokens // page, page_bytes), Step(in_page, codec.row_bytes)),
                head_stride=in_page * codec.row_bytes,
                element_axis=(Step(codec.row_bytes // codec.element_bytes, codec.element_bytes),),
                row_tokens=more.row_tokens,
            )
            offset += in_page * len(heads) * codec.row_bytes

    def _state(self, layer: int) -> None:
        """One row of each part per block. The convolution is rows of all channels, or the reverse where heads are."""
        shape = self._shape
        name: CodecName = shape.codec if shape.codec in ELEMENT_BYTES else "bf16"
        size = ELEMENT_BYTES[name]
        ranks = self._state_rank, shape.tp_size * shape.cp_size
        held = {part: split(heads, *ranks) for part, (heads, _) in STATES.items()}
        block = sum(len(held[part]) * width for part, (_, width) in STATES.items()) * size + shape.pad_bytes
        channels = sum(len(held[part]) * STATES[part][1] for part in ("conv_x", "conv_b")) // CONV_ROWS
        row, channel = (size, CONV_ROWS * size) if "hnd" in shape.layout else (channels * size, size)
        offset = begin = shape.pad_bytes
        for part, (total, width) in STATES.items():
            each = width // CONV_ROWS
            axis: tuple[Step, ...] = (Step(CONV_ROWS, row), Step(each, channel))
            stride = each * channel
            if part == "state":
                axis, stride, offset = (Step(width, size),), width * size, begin + channels * CONV_ROWS * size
            self._add(
                *(layer, part, held[part], total),
                Codec(name=name, width=width, element_bytes=size, row_bytes=width * size),
                region=self._region(layer, "", block * shape.blocks),
                offset=offset,
                block_stride=block,
                token_axis=(Step(1, 0),),
                head_stride=stride,
                element_axis=axis,
            )
            offset += len(held[part]) * stride

    def _add(self, layer: int, part: str, heads: range, total_heads: int, codec: Codec, **lies: Any) -> None:
        whose: dict[str, Any] = {"first_head": heads.start, "heads": len(heads), "total_heads": total_heads}
        group = self._shape.groups.index(self._shape.kind(layer))
        self._planes.append(Plane(layer=layer, part=part, group=group, codec=codec, **whose, **lies))

    def _region(self, layer: int, part: str, size: int) -> int:
        region = self._regions.setdefault((layer, part), len(self._regions))
        if region == len(self._sizes):
            self._sizes.append(self._shape.pad_bytes + size)
        return region


def _scaled(shape: Shape, part: str, heads: range, codec: Codec) -> Codec:
    """The codec with its scales. `Shape.scales` has one for all heads or one for each; only these codecs have any."""
    scales = (shape.scales or {}).get(part, ())
    if codec.name not in PLANE_SCALED:
        scales = ()
    scales = scales[heads.start : heads.stop] if len(scales) > 1 else scales
    return msgspec.structs.replace(codec, scales=scales)


def _strides(
    shape: Shape, codecs: Mapping[str, Codec], tokens: int, heads: int, layers: int, part: str
) -> tuple[dict[str, int], int]:
    """The stride in bytes of each axis for this part (for P: where the part begins), and the region's size."""
    counts = {"L": layers, "B": shape.blocks, "T": tokens, "H": heads}
    own = {name: name.removesuffix("_scale") if shape.codec in ROW_SCALES else name for name in codecs}
    row_bytes = {name: sum(codecs[each].row_bytes for each in codecs if own[each] == name) for name in own.values()}
    sizes = {name: codecs[name].element_bytes for name in row_bytes}
    strides = {axis: 0 for axis in "LPBTHE"}
    strides["P"] = codecs[own[part]].row_bytes if own[part] != part else 0
    for axis in reversed(LAYOUTS[shape.layout]):
        if axis == "P":
            names = list(row_bytes)
            strides["P"] += sum(sizes[name] for name in names[: names.index(own[part])])
            sizes = {name: sum(sizes.values()) for name in names}
        elif axis == "*":
            assert shape.codec not in ROW_SCALES
            sizes = {name: tokens * size for name, size in row_bytes.items()}
        elif axis == "E":
            strides["E"] = codecs[part].element_bytes
            sizes = dict(row_bytes)
        else:
            if axis == "B":
                sizes = {name: size + shape.pad_bytes for name, size in sizes.items()}
            strides[axis] = sizes[own[part]]
            sizes = {name: size * counts[axis] for name, size in sizes.items()}
    return strides, sizes[own[part]]


def _inner_axes(
    shape: Shape, tokens: int, part: str, codec: Codec, strides: Mapping[str, int]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    element, row_bytes = codec.element_bytes, codec.row_bytes
    count = row_bytes // element
    if shape.layout == "cpu_vec":
        if part == "k":
            return (Step(tokens, element),), (Step(count, tokens * element),)
        return (Step(tokens, row_bytes),), (Step(count, element),)
    if shape.layout == "cpu_amx":
        assert element == 2
        if part == "k":
            return (Step(tokens // 16, 16 * row_bytes), Step(16, 4)), (Step(count // 2, 64), Step(2, 2))
        return (Step(tokens // 2, 64), Step(2, 2)), (Step(count // 16, tokens * 32), Step(16, 4))
    return (Step(tokens, strides["T"]),), (Step(count, element),)
