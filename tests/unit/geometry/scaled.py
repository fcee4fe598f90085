"""Pools of rows whose scales lie behind all rows of a token, or of a block."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from kvbridge_proto.pool import Codec, CodecName, Plane, Pool, Region, Step

from testing.oracle import POISON, Held, Shape, describe


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
