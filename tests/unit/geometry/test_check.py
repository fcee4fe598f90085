"""Invalid pools are refused with the field and both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import Codec, Group, Shard, Step

from kvbridge.geometry.check import rescaled
from kvbridge.geometry.compat import Incompatible, check_pool, extent, verdict
from testing.oracle import Shape, describe, mla

SHAPE = Shape(key_width=32, value_width=16)
change = msgspec.structs.replace


def test_groups_that_cannot_be_are_named() -> None:
    pool = describe(replace(SHAPE, kinds=("full", "state")))
    one, state = pool.groups
    assert "plane 2 (layer 1 conv_x): token_axis: counts 1, block_tokens 16" in check_pool(
        change(pool, groups=(one, change(state, kind="full")))
    )
    assert "plane 2 (layer 1 conv_x): group: 1 is full, the model's kind state" in check_pool(
        change(pool, groups=(one, change(state, kind="full")))
    )
    assert check_pool(change(pool, groups=(change(one, kind="sliding"), state))) == ("window: 0, group 0 is sliding",)


def test_a_plane_of_an_unknown_layer_is_no_pool() -> None:
    pool = describe(SHAPE)
    unknown = change(pool, model=change(pool.model, layers=(pool.model.layers[0], None)))
    assert check_pool(unknown)[0].endswith("layer: 1 has a plane, the model says nothing of it")


def test_a_period_beyond_bounds_is_no_pool() -> None:
    pool = describe(SHAPE)
    assert check_pool(change(pool, shard=Shard(cp_size=2, cp_interleave=1 << 15))) == ()
    assert check_pool(change(pool, shard=Shard(cp_size=3, cp_interleave=1 << 15))) == (
        "cp_interleave: 32768, with cp_size 3 a period of 98304 tokens, at most 65536",
    )


@pytest.mark.parametrize("codec", ["fp8_row_scale", "mxfp8_e4m3", "nvfp4", "int4_row_scale"])
def test_scaled_rows_without_their_scales_are_no_pool(codec: Any) -> None:
    pool = describe(replace(SHAPE, codec=codec, value_width=32))
    assert check_pool(pool) == ()
    lacking = change(pool, planes=tuple(plane for plane in pool.planes if plane.part != "v_scale"))
    assert f"layer 0 v: part: {codec} needs a plane v_scale, there is none" in check_pool(lacking)
    orphan = change(pool, planes=tuple(plane for plane in pool.planes if plane.part != "v"))
    assert "layer 0 v_scale: part: scales of nothing, must be of scaled rows" in check_pool(orphan)
    plain = tuple(plane for plane in describe(replace(SHAPE, value_width=32)).planes)
    beside = tuple(plane for plane in pool.planes if plane.part == "k_scale")
    expected = "layer 0 k_scale: part: scales of bf16, must be of scaled rows"
    assert expected in check_pool(change(pool, planes=(*plain, *beside)))


@pytest.mark.parametrize(
    ("codec", "changes", "expected"),
    [
        ("fp8_row_scale", {"offset": 34}, "stride: 34 bytes to a scale, must be a multiple of 4"),
        ("fp8_row_scale", {"head_stride": 70}, "stride: 70 bytes to a scale, must be a multiple of 4"),
        ("fp8_row_scale", {"heads": 2}, "heads: 2 of the scales, 4 of the rows"),
        ("fp8_row_scale", {"codec": Codec(name="bf16", width=1, element_bytes=2, row_bytes=2)},
         "scales: 1 x bf16, must be 1 x fp32"),
        ("int8_row_scale", {"codec": Codec(name="fp32", width=2, element_bytes=4, row_bytes=8)},
         "scales: 2 x fp32, must be 1 x fp32"),
        ("mxfp8_e4m3", {"codec": Codec(name="opaque", width=2, element_bytes=1, row_bytes=2)},
         "scales: opaque of 2 bytes, must be opaque of 1"),
        ("nvfp4", {"codec": Codec(name="fp32", width=1, element_bytes=4, row_bytes=4)},
         "scales: fp32 of 4 bytes, must be opaque of 2"),
    ],
)  # fmt: skip
def test_a_plane_of_scales_that_cannot_be_is_named(codec: Any, changes: dict[str, Any], expected: str) -> None:
    pool = describe(replace(SHAPE, codec=codec, layout="packed_hnd"))
    assert pool.planes[1].part == "k_scale"
    broken = change(pool, planes=(pool.planes[0], change(pool.planes[1], **changes), *pool.planes[2:]))
    assert f"layer 0 k: {expected}" in check_pool(broken)


ODD = "stride: {} bytes to a scale, must be a multiple of 4"  # the latent of 656 bytes has fp32 scales inside


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        (mla("fp8_ds_mla"), {"row_bytes": 640}, "row_bytes: 640, fp8_ds_mla has 656"),
        (mla("fp8_ds_mla"), {"width": 512}, "width: 512, fp8_ds_mla has 576"),
        (mla("fp8_ds_v4"), {"row_bytes": 584}, "row_bytes: 584, fp8_ds_v4 has 576"),
        (mla("nvfp4_ds_mla"), {"row_bytes": 353}, "row_bytes: 353, nvfp4_ds_mla has 352"),
        (mla("bf16"), {"width": 575}, "width: 575, the model's key_width 576"),
        (mla("fp8_ds_mla"), {"offset": 2}, ODD.format(2)),
        (mla("fp8_ds_mla"), {"block_stride": 10498}, ODD.format(10498)),
        (mla("fp8_ds_mla"), {"token_axis": (Step(16, 658),)}, ODD.format(658)),
        (replace(SHAPE, codec="mxfp8_e4m3", key_width=48, value_width=32), {},
         "width: 48, mxfp8_e4m3 has scales of 32 numbers each"),
        (replace(SHAPE, codec="nvfp4", key_width=24, value_width=32), {},
         "width: 24, nvfp4 has scales of 16 numbers each"),
    ],
)  # fmt: skip
def test_a_packed_row_is_as_its_codec_says(shape: Shape, changes: dict[str, Any], expected: str) -> None:
    pool = describe(shape)
    plane, is_codec = pool.planes[0], changes.keys() <= {"row_bytes", "width"}
    broken = change(plane, codec=change(plane.codec, **changes)) if is_codec else change(plane, **changes)
    reasons = check_pool(change(pool, planes=(broken, *pool.planes[1:])))
    assert f"plane 0 (layer 0 {plane.part}): {expected}" in reasons


def test_k_and_v_have_as_many_scales() -> None:
    shape = replace(SHAPE, codec="int8", scales={"k": (2.0,), "v": (1.0, 2.0, 3.0, 4.0)})
    assert check_pool(describe(shape)) == tuple(f"scales: k has 1, v has 4 (layer {layer})" for layer in range(2))
    assert check_pool(describe(replace(SHAPE, codec="int8", scales={"k": (2.0,), "v": (4.0,)}))) == ()


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8_row_scale", "opaque"])
def test_only_8_bit_codecs_have_scales(codec: Any) -> None:
    pool = describe(replace(SHAPE, codec=codec))
    plane = pool.planes[0]
    said = f"scales: 1 for {codec}, only 8-bit codecs and nvfp4 have them"
    for scales, expected in (((1.0,), ()), ((2.0,), (said,))):
        scaled = change(plane, codec=change(plane.codec, scales=scales))
        found = [reason for reason in check_pool(change(pool, planes=(scaled, *pool.planes[1:]))) if "only" in reason]
        assert found == [f"plane 0 (layer 0 k): {each}" for each in expected]


def test_scales_are_replaced_where_they_are_named() -> None:
    pool = describe(replace(SHAPE, codec="int8", scales={"k": (2.0,), "v": (4.0,)}))
    found = rescaled(pool, [Scales(0, "v", (8.0,)), Scales(1, "k", (3.0,))])
    assert [plane.codec.scales for plane in found.planes] == [(2.0,), (8.0,), (3.0,), (4.0,)]
    assert change(found, planes=pool.planes) == pool


BF16 = Codec(name="bf16", width=32, element_bytes=2, row_bytes=64)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"group": 3}, "group: 3, the pool has 1"),
        ({"region": 9}, "region: 9, the pool has 4"),
        ({"layer": 2}, "layer: 2, the model has 2"),
        ({"offset": 1}, "end: byte 49153, region 0 has 49152 bytes"),
        ({"block_stride": 1 << 40}, f"end: byte {(11 << 40) + 4096}, region 0 has 49152 bytes"),
        ({"token_axis": (Step(8, 256),)}, "token_axis: counts 8, block_tokens 16"),
        ({"element_axis": (Step(31, 2),)}, "element_axis: counts 31 of 2 bytes, row_bytes 64"),
        ({"first_head": 2}, "heads: 4 from 2 on, total_heads 4"),
        ({"total_heads": 8}, "total_heads: 8, the model's kv_heads 4"),
        ({"block_stride": 0}, "stride: 0 bytes between 12 places that cover 2 bytes each"),
        ({"head_stride": 32}, "stride: 32 bytes between 4 places that cover 64 bytes each"),
        ({"codec": change(BF16, width=31)}, "width: 31, the model's key_width 32"),
        ({"codec": change(BF16, element_bytes=1)}, "element_bytes: 1, bf16 has 2"),
        ({"codec": change(BF16, row_bytes=128)}, "row_bytes: 128, 32 x bf16 are 64"),
        ({"codec": change(BF16, scales=(1.0, 2.0))}, "scales: 2, must be none, 1 or one for each of 4 heads"),
        ({"codec": change(BF16, scales=(0.0,))}, "scales: 0.0, must be a finite number above 0"),
        ({"codec": change(BF16, scales=(float("nan"),))}, "scales: nan, must be a finite number above 0"),
    ],
)
def test_a_plane_that_cannot_be_is_named_with_both_values(changes: dict[str, Any], expected: str) -> None:
    pool = describe(SHAPE)
    broken = change(pool, planes=(change(pool.planes[0], **changes), *pool.planes[1:]))
    assert f"plane 0 (layer {broken.planes[0].layer} k): {expected}" in check_pool(broken)
    found = verdict(pool, broken)
    assert isinstance(found, Incompatible) and any(reason.startswith("receiver plane 0") for reason in found.reasons)


def test_refuses_two_planes_for_one_part() -> None:
    pool = describe(SHAPE)
    assert check_pool(change(pool, planes=(*pool.planes, pool.planes[0]))) == ("part: layer 0 has two planes for k",)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_refuses_a_rank_outside_its_size(axis: str) -> None:
    pool = change(describe(SHAPE), shard=Shard(**{f"{axis}_rank": 2, f"{axis}_size": 2}))
    assert check_pool(pool) == (f"{axis}_rank: 2, {axis}_size 2",)


def test_the_extent_is_the_last_byte_of_the_last_row() -> None:
    pool = describe(SHAPE)
    assert [extent(plane, pool.groups[0]) for plane in pool.planes] == [region.size_bytes for region in pool.regions]
    assert extent(pool.planes[0], Group(kind="full", block_tokens=16, blocks=1)) == pool.planes[0].block_stride
