"""Cuts latent rows for conversion: tiles of the latent, each with a scale or without, and the rope. Pure.

`fp8_ds_mla` is 512 fp8 numbers in tiles of 128, the four fp32 scales of the tiles, and 64 bf16 numbers of rope: 656
bytes. To convert it to or from a plain row, the tiles become heads whose rows have scales of their own, and the rope
becomes a plain plane. No later code knows of latents.
"""

from __future__ import annotations

import msgspec
from kvbridge_proto.pool import Codec, Plane, Step

from ..values import Value
from .wire import PLAIN

LATENT_FP8 = "fp8_ds_mla"
TILE_WIDTH = 128
ROPE_WIDTH = 64


class LatentPart(Value):
    """One part of every row of a plane, all in one codec, as a plane. `scale` holds the scales of its rows."""

    plane: Plane
    scale: Plane | None


def is_cuttable(plane: Plane) -> bool:
    """True if `latent_parts` can cut the plane: one head, dense rows, plain or `fp8_ds_mla`, whole tiles and a rope."""
    codec = plane.codec
    steps = tuple(step for step in plane.element_axis if step.count > 1)
    tiles = codec.width - ROPE_WIDTH
    return (
        (
            codec.name in PLAIN
            or (codec.name == LATENT_FP8 and codec.row_bytes == tiles + _scale_bytes(tiles) + 2 * ROPE_WIDTH)
        )
        and steps == (Step(codec.row_bytes // codec.element_bytes, codec.element_bytes),)
        and plane.heads == plane.total_heads == 1
        and tiles > 0
        and tiles % TILE_WIDTH == 0
    )


def latent_parts(plane: Plane) -> tuple[LatentPart, LatentPart]:
    """The tiles as heads of TILE_WIDTH numbers, and the rope as one head. The parts of both sides form pairs."""
    assert is_cuttable(plane), f"layer {plane.layer} {plane.part}"
    codec = plane.codec
    width = codec.width - ROPE_WIDTH
    tiles = width // TILE_WIDTH
    if codec.name != LATENT_FP8:
        size = codec.element_bytes
        tile = _dense(codec.name, TILE_WIDTH, size, codec.scales)
        rope = _dense(codec.name, ROPE_WIDTH, size, codec.scales)
        return LatentPart(_cut(plane, 0, tiles, tile), None), LatentPart(_cut(plane, width * size, 1, rope), None)
    scale = _cut(plane, width, tiles, _dense("fp32", 1, 4), f"{plane.part}_scale")
    rope_at = width + _scale_bytes(width)
    return (
        LatentPart(_cut(plane, 0, tiles, _dense("fp8_row_scale", TILE_WIDTH, 1)), scale),
        LatentPart(_cut(plane, rope_at, 1, _dense("bf16", ROPE_WIDTH, 2)), None),
    )


def _scale_bytes(width: int) -> int:
    return width // TILE_WIDTH * 4


def _dense(name: str, width: int, size: int, scales: tuple[float, ...] = ()) -> Codec:
    return msgspec.convert(
        {"name": name, "width": width, "element_bytes": size, "row_bytes": width * size, "scales": scales}, Codec
    )


def _cut(plane: Plane, at: int, heads: int, codec: Codec, part: str = "") -> Plane:
    """`heads` rows side by side, beginning at byte `at` of each row of the plane."""
    return msgspec.structs.replace(
        plane,
        part=part or plane.part,
        offset=plane.offset + at,
        head_stride=codec.row_bytes if heads > 1 else 0,
        element_axis=(Step(codec.width, codec.element_bytes),),
        heads=heads,
        total_heads=heads,
        codec=codec,
        name="latent_part",
    )
