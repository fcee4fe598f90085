"""A latent is cut where the two sides differ, and only there: into the same parts on both sides, every byte once."""

from __future__ import annotations

import msgspec
import pytest
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Plane, Pool, Step

from kvbridge.errors import PeerError
from kvbridge.geometry.check import extent
from kvbridge.geometry.coalesce import coalesce
from kvbridge.geometry.latent_parts import LATENT_FP8, is_cuttable, latent_parts
from kvbridge.geometry.plan import plan
from kvbridge.geometry.plane_pair import pair_planes
from kvbridge.geometry.wire import PLAIN
from testing.oracle import at
from testing.pools import describe, mla

ALL = (Take(0, 2, 0, 1),)
ROWS = {"bf16": 1152, "fp16": 1152, "fp32": 2304, "fp8_e4m3": 576, "fp8_e5m2": 576, "int8": 576, "fp8_ds_mla": 656}
assert {*ROWS} == {*PLAIN, LATENT_FP8}


def latent_pool(name: str, scales: tuple[float, ...] = (), block_tokens: int = 16) -> Pool:
    return describe(mla(name, scales={"latent": scales}, block_tokens=block_tokens, pad_bytes=16))


def covered(plane: Plane, place: int) -> list[int]:
    """Every byte of the plane's rows at one place, from the region's start."""
    codec = plane.codec
    return [
        plane.offset + at(plane.token_axis, place) + head * plane.head_stride + at(plane.element_axis, element) + byte
        for head in range(plane.heads)
        for element in range(codec.row_bytes // codec.element_bytes)
        for byte in range(codec.element_bytes)
    ]


@pytest.mark.parametrize(("name", "row_bytes"), ROWS.items())
def test_tiles_and_rope_are_every_byte_once(name: str, row_bytes: int) -> None:
    pool = latent_pool(name)
    for plane in pool.planes:
        tiles, rope = latent_parts(plane)
        planes = [tiles.plane, rope.plane, *([tiles.scale] if tiles.scale else [])]
        found = sorted(byte for each in planes for byte in covered(each, 3))
        start = plane.offset + 3 * row_bytes
        assert found == list(range(start, start + row_bytes))
        for each in planes:
            assert (each.region, each.block_stride, each.token_axis) == (
                plane.region,
                plane.block_stride,
                plane.token_axis,
            )
            assert extent(each, pool.groups[0]) <= extent(plane, pool.groups[0])


def test_the_packed_row_is_cut_where_its_parts_begin() -> None:
    """656 bytes from byte 16 on: 512 fp8 in tiles of 128, 4 fp32 scales, 64 bf16."""
    (plane, _) = latent_pool("fp8_ds_mla").planes
    tiles, rope = latent_parts(plane)
    assert tiles.scale is not None and rope.scale is None
    cuts = [(each.offset, each.heads, each.head_stride, each.codec.name, each.codec.width)
            for each in (tiles.plane, tiles.scale, rope.plane)]  # fmt: skip
    assert cuts == [(16, 4, 128, "fp8_row_scale", 128), (528, 4, 4, "fp32", 1), (544, 1, 0, "bf16", 64)]


@pytest.mark.parametrize("packed_is_sender", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp32", "fp8_e4m3", "int8"])
def test_a_pair_is_tiles_under_scales_and_rope(name: str, packed_is_sender: bool) -> None:
    scales = (0.25,) if name in ("fp8_e4m3", "int8") else ()
    packed, plain = latent_pool("fp8_ds_mla"), latent_pool(name, scales, block_tokens=32)
    sender, receiver = (packed, plain) if packed_is_sender else (plain, packed)
    pairs = pair_planes(sender, receiver, ALL)
    assert len(pairs) == 4
    for tiles, rope in (pairs[:2], pairs[2:]):
        own = tiles.sender_scale if packed_is_sender else tiles.receiver_scale
        assert own is not None and own.codec.name == "fp32"
        assert (tiles.sender_scale is None) != (tiles.receiver_scale is None)
        assert (tiles.heads, tiles.wire.name, tiles.wire.width, tiles.wire.scales) == (4, name, 128, scales)
        assert rope.sender_scale is rope.receiver_scale is None and (rope.heads, rope.wire.width) == (1, 64)
        narrow = name if scales else "bf16"
        assert (rope.wire.name, rope.wire.scales) == (narrow, scales)
    folded = coalesce(pairs, sender, receiver, 0, 1 << 20)
    assert sum(pair.wire.name == "opaque" for pair in folded) == (2 if name == "bf16" else 0)
    assert sum(pair.sender_scale is not None or pair.receiver_scale is not None for pair in folded) == 2


def test_moves_of_tiles_say_where_their_scales_are() -> None:
    packed, plain = latent_pool("fp8_ds_mla"), latent_pool("bf16")
    planned = plan(plain, packed, ALL, 0, 40, 1 << 20)
    assert sum(pair.receiver_scale is not None for pair in planned.pairs) == 2
    assert (
        plan(plain, packed, ALL, 0, 40, 1 << 20).digest
        == planned.digest
        != plan(plain, plain, ALL, 0, 40, 1 << 20).digest
    )


@pytest.mark.parametrize("name", ROWS)
def test_equal_sides_are_not_cut(name: str) -> None:
    sender, receiver = latent_pool(name), latent_pool(name, block_tokens=32)
    pairs = pair_planes(sender, receiver, ALL)
    assert [(pair.heads, pair.wire.name, pair.wire.row_bytes) for pair in pairs] == [(1, name, ROWS[name])] * 2
    assert {pair.wire.name for pair in coalesce(pairs, sender, receiver, 0, 1 << 20)} == {"opaque"}


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla"])
def test_only_one_head_of_dense_rows_is_cut(name: str) -> None:
    (plane, _) = latent_pool(name).planes
    codec, change = plane.codec, msgspec.structs.replace
    assert is_cuttable(plane)
    count = codec.row_bytes // codec.element_bytes
    spread = (Step(count, codec.element_bytes * 16),)
    for wrong in (
        change(plane, element_axis=spread),
        change(plane, element_axis=(Step(2, count // 2 * codec.element_bytes), Step(count // 2, codec.element_bytes))),
        change(plane, heads=2, total_heads=2),
        change(plane, codec=change(codec, width=codec.width - 60)),
        change(plane, codec=change(codec, name="nvfp4_ds_mla")),
        change(plane, codec=change(codec, row_bytes=codec.row_bytes - 16)),
    ):
        assert not is_cuttable(wrong)


def test_refuses_a_take_of_latents_that_cannot_be_cut() -> None:
    packed, plain = latent_pool("fp8_ds_mla"), latent_pool("bf16")
    change = msgspec.structs.replace
    spread = tuple(change(plane, element_axis=(Step(288, 4), Step(2, 2))) for plane in plain.planes)
    for sender, receiver in ((packed, change(plain, planes=spread)), (change(plain, planes=spread), packed)):
        with pytest.raises(PeerError, match="rows of layer 0 latent cannot be cut into tiles"):
            pair_planes(sender, receiver, ALL)
