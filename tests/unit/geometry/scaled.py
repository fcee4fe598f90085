"""Pools of latents, and of rows whose scales are in planes of their own, built by hand."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from kvbridge_proto.pool import Codec, CodecName, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step

from kvbridge.geometry.wire import PLAIN
from tests.support.oracle import POISON, Held, Shape, describe

LATENT_WIDTH, ROPE_WIDTH = 576, 64


def latent_pool(
    name: CodecName, scales: tuple[float, ...] = (), layers: int = 2, block_tokens: int = 16, blocks: int = 8
) -> Pool:
    """MLA: one row of 576 numbers a token and layer, the layers in regions of their own."""
    size = PLAIN.get(name, 1)
    row = 656 if name == "fp8_ds_mla" else LATENT_WIDTH * size
    codec = Codec(name=name, width=LATENT_WIDTH, element_bytes=size, row_bytes=row, scales=scales)
    layer = Layer(kind="mla", kv_heads=1, key_width=LATENT_WIDTH, value_width=0, rope_width=ROPE_WIDTH)
    planes = tuple(
        Plane(
            layer=i,
            part="latent",
            region=i,
            offset=16 * i,
            block_stride=block_tokens * row,
            token_axis=(Step(block_tokens, row),),
            head_stride=0,
            element_axis=(Step(row // size, size),),
            first_head=0,
            heads=1,
            total_heads=1,
            codec=codec,
        )
        for i in range(layers)
    )
    return Pool(
        engine=Engine(kind="test", version="0", id=name),
        model=Model(name="latent", layers=(layer,) * layers),
        shard=Shard(),
        groups=(Group(kind="full", block_tokens=block_tokens, blocks=blocks),),
        regions=tuple(Region(16 * i + blocks * block_tokens * row) for i in range(layers)),
        planes=planes,
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """A codec of rows of `width` numbers, with the bytes of a row and of its scales."""

    name: CodecName
    row_bytes: int
    scale: Codec

    def codec(self, width: int) -> Codec:
        return Codec(name=self.name, width=width, element_bytes=1, row_bytes=self.row_bytes)


def kept_as(name: CodecName, width: int) -> Kept:
    if name.endswith("row_scale"):
        row = width // 2 if name.startswith("int4") else width
        return Kept(name, row, Codec(name="fp32", width=1, element_bytes=4, row_bytes=4))
    each = {"mxfp8_e4m3": (width, width // 32), "nvfp4": (width // 2, width // 16), "fp8_ds_v4": (width, 8)}[name]
    return Kept(name, each[0], Codec(name="opaque", width=each[1], element_bytes=1, row_bytes=each[1]))


def scaled_pool(shape: Shape, name: CodecName, tp_rank: int = 0, is_paged: bool = False) -> Pool:
    """The oracle's pool with rows of another codec, and their scales in planes of their own.

    Each plane has a region: a token's rows and then its scales, head by head; a block's, if `is_paged`.
    """
    regions: list[Region] = []
    planes: list[Plane] = []
    pool = describe(shape, tp_rank)
    for plane in pool.planes:
        kept, heads, tokens = kept_as(name, plane.codec.width), plane.heads, pool.groups[0].block_tokens
        token = heads * (kept.row_bytes + kept.scale.row_bytes)
        at = heads * kept.row_bytes * (tokens if is_paged else 1)
        for part, codec, offset in (
            (plane.part, kept.codec(plane.codec.width), 0),
            (f"{plane.part}_scale", kept.scale, at),
        ):
            stride = heads * codec.row_bytes if is_paged else token
            planes.append(
                msgspec.structs.replace(
                    plane,
                    part=part,
                    region=len(regions),
                    offset=offset,
                    block_stride=tokens * token,
                    token_axis=(Step(tokens, stride),),
                    head_stride=codec.row_bytes,
                    element_axis=(Step(codec.row_bytes // codec.element_bytes, codec.element_bytes),),
                    codec=codec,
                )
            )
        regions.append(Region(shape.blocks * tokens * token))
    return msgspec.structs.replace(pool, planes=tuple(planes), regions=tuple(regions))


def poisoned(pool: Pool) -> Held:
    return Held(pool, tuple(np.full(region.size_bytes, POISON, np.uint8) for region in pool.regions))
