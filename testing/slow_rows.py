"""What converted rows must be, row by row and by definition. Nothing here knows plans, latent parts or token shards.

Decodes a row's numbers from the bytes that the sender has for its coordinates, and encodes them as the receiver stores
them. If the receiver computes its own scales, only the numbers are compared: a number of 8 bits may be off by half a
step, where a step is a fraction of the largest number of its row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from kvbridge_proto.pool import Plane, Pool

from testing.oracle import Table, difference, put_rows, rows, rows_at, take_rows
from testing.pools import Held, Shape, describe
from tests.support.index_keys import rotated
from tests.unit.kernels.slow_codecs import decode, encode, same

ROW_SCALED = {"fp8_row_scale": "fp8_e4m3", "int8_row_scale": "int8"}
WORDS = {"bf16": "<u2", "fp16": "<u2", "fp32": "<f4"}
LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}
TILE, TILES, ROPE = 128, 4, 64  # numbers, in a row of fp8_ds_mla: 4 tiles of fp8, 4 scales, then rope in bf16
FP32 = 2.0**-22  # the relative error that fp32 arithmetic may have


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one plane, as bytes [token, head, row], and those of its scales."""

    plane: Plane
    stored: np.ndarray
    scales: np.ndarray | None

    def numbers(self) -> np.ndarray:
        """fp32 [token, head, number]."""
        name = self.plane.codec.name
        if name == "fp8_ds_mla":
            tiles = decode(self.stored[..., : TILE * TILES], "fp8_e4m3")
            scales = np.repeat(_words(self.stored[..., 512:528], "fp32"), TILE, axis=2)
            rope = decode(_words(self.stored[..., 528:], "bf16"), "bf16")
            return np.concatenate((tiles * scales, rope), axis=2)
        if name in ROW_SCALED:
            assert self.scales is not None
            return decode(self.stored, ROW_SCALED[name]) * self.row_scales()
        return decode(_words(self.stored, name), name, _plane_scales(self.plane))

    def row_scales(self) -> np.ndarray:
        """fp32 [token, head, 1]."""
        assert self.scales is not None
        words = _words(self.scales, "fp32")
        if self.plane.codec.scale_codec == "ue8m0_x4":
            words = ((words.view(np.uint32) & 0xFF) << 23).view(np.float32)
        return words


def rows_of(held: Held, plane: Plane, places: np.ndarray) -> Rows:
    """The rows at these places of a plane."""
    scales = _scales_of(held.pool, plane)
    return Rows(plane, take_rows(held, plane, places), None if scales is None else take_rows(held, scales, places))


def twin_of(sender: Shape, receiver: Shape, ranks: tuple[int, int, int]) -> Pool:
    """The pool of a rank that holds the same as this rank of the receiver, in the sender's codec, rotated or not."""
    given = {_unrotated(each.part): each for each in sender.more}
    more = tuple(
        replace(each, part=own.part, codec=own.codec, scale_codec=own.scale_codec)
        for each in receiver.more
        for own in (given.get(_unrotated(each.part), each),)
    )
    return describe(replace(receiver, codec=sender.codec, scales=sender.scales, layout="nhd", more=more), *ranks)


def wrong(
    twin: Pool,
    receiver: Held,
    before: Held,
    table: Table,
    tokens: range,
    tail: range,
    unfilled: Collection[int] = (),
) -> str:
    """How the receiver differs from `before` with the rows of `tokens` that `twin` would have. Empty if it does not.

    Rows of the layers `unfilled` must be zeros.
    """
    expected = before.copy()
    theirs = {(plane.layer, _unrotated(plane.part)): plane for plane in twin.planes}
    for plane in receiver.pool.planes:
        token, places = rows_at(receiver.pool, plane.group, table, tokens, plane.row_tokens)
        if plane.layer in unfilled:
            put_rows(expected, plane, places, np.zeros((len(places), plane.heads, plane.codec.row_bytes), np.uint8))
            continue
        if plane.part.endswith("_scale"):
            continue
        ours = theirs[plane.layer, _unrotated(plane.part)]
        scales, our_scales = _scales_of(receiver.pool, plane), _scales_of(twin, ours)
        stored = rows(ours, token, is_tame=True)
        given = Rows(ours, stored, None if our_scales is None else rows(our_scales, token, is_tame=True))
        is_copied = ours.codec == plane.codec and ours.part == plane.part
        found = given if is_copied else rows_of(receiver, plane, places)
        wanted = given.numbers() if found is not given else np.zeros(0, np.float32)
        if ours.part != plane.part:
            wanted = rotated(wanted)
        if found is not given and (not_near := np.argwhere(~_is_right(wanted, found)).tolist()):
            which, head, element = not_near[0]
            values = wanted[which, head, element], found.numbers()[which, head, element]
            place = f"layer {plane.layer} {plane.part} head {plane.first_head + head} token {token[which]}"
            return f"{place} element {element}: {values[0]} became {values[1]}, {len(not_near)} in all"
        put_rows(expected, plane, places, found.stored)
        if scales is not None:
            assert found.scales is not None
            put_rows(expected, scales, places, found.scales)
    return difference(receiver, expected, table, tokens, tail)


def _is_right(values: np.ndarray, found: Rows) -> np.ndarray:
    """Which numbers were converted correctly."""
    name = found.plane.codec.name
    if name in ROW_SCALED:
        return _is_near(values, found.numbers(), ROW_SCALED[name], found.plane.codec.scale_codec != "fp32")
    if name == "fp8_ds_mla":
        tiles, rope = np.split(values, [TILE * TILES], axis=2)
        tile = (*tiles.shape[:2], TILES, TILE)
        near = _is_near(tiles.reshape(tile), found.numbers()[..., : TILE * TILES].reshape(tile), "fp8_e4m3")
        exact = same(_words(found.stored[..., 528:], "bf16"), encode(rope, "bf16"), "bf16")
        return np.concatenate((near.reshape(tiles.shape), exact), axis=2)
    return same(_words(found.stored, name), encode(values, name, _plane_scales(found.plane)), name)


def _is_near(values: np.ndarray, found: np.ndarray, name: str, is_power: bool = False) -> np.ndarray:
    """Which numbers are within half a step. Each row has its own scale, rounded up to a power of two or not."""
    scale = np.abs(values).max(axis=-1, keepdims=True) / LARGEST[name]
    if is_power:
        scale = np.exp2(np.ceil(np.log2(np.maximum(scale, 1e-4 / LARGEST[name]).astype(np.float64))))
    bound = scale / 2 if name == "int8" else np.abs(values) / 16 + scale / 1024
    return np.abs(found - values) <= bound + np.abs(values) * FP32


def _unrotated(part: str) -> str:
    return part.removeprefix("rotated_")


def _words(stored: np.ndarray, name: str) -> np.ndarray:
    """Bytes as the patterns of a codec, one integer each (fp32: the numbers themselves)."""
    if name not in WORDS:
        return stored
    found = np.ascontiguousarray(stored).view(WORDS[name])
    return found if name == "fp32" else found.astype(np.int64)


def _plane_scales(plane: Plane) -> np.ndarray | None:
    """The plane's scales, shaped to fit [token, head, number]. None if it has none."""
    scales = plane.codec.scales
    return np.array(scales, np.float32)[None, :, None] if scales else None


def _scales_of(pool: Pool, plane: Plane) -> Plane | None:
    return next((p for p in pool.planes if (p.layer, p.part) == (plane.layer, f"{plane.part}_scale")), None)
