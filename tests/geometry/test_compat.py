"""Verdicts: what is the same, what can be converted, and refusals that name the field and both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kvbridge_proto.pool import Codec, Group, Pool, Shard, Step

from kvbridge.geometry.check import MOST_REASONS
from kvbridge.geometry.compat import Convertible, Incompatible, Same, check_pool, extent, fingerprint, verdict
from tests.oracle import LAYOUTS, Shape, describe

SHAPE = Shape(key_width=32, value_width=16)
change = msgspec.structs.replace


def reasons(source: Pool, sink: Pool) -> tuple[str, ...]:
    found = verdict(source, sink)
    assert isinstance(found, Incompatible), found
    return found.reasons


def with_layers(pool: Pool, **changes: Any) -> Pool:
    return change(pool, model=change(pool.model, layers=tuple(change(layer, **changes) for layer in pool.model.layers)))


def with_planes(pool: Pool, **changes: Any) -> Pool:
    return change(pool, planes=tuple(change(plane, **changes) for plane in pool.planes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_a_pool_that_can_be(layout: str) -> None:
    for changes in ({}, {"tp_size": 3, "kv_heads": 7}, {"pad_bytes": 100}):
        pool = describe(replace(SHAPE, layout=layout, **changes))
        assert check_pool(pool) == ()
        assert verdict(pool, pool) == Same()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_tokens": 32}, "block_tokens: source 16, sink 32 (layer 0 k and 3 more)"),
        ({"codec": "fp8_e4m3"}, "codec: source bf16, sink fp8_e4m3 (layer 0 k and 3 more)"),
        ({"tp_size": 2}, "tp_size: source 1, sink 2"),
        ({"pp_size": 2}, "pp_size: source 1, sink 2"),
        (
            {"layout": "hnd"},
            "layout: source block > token > head > element, sink block > head > token > element (layer 0 k and 3 more)",
        ),
    ],
)
def test_says_what_is_converted(changes: dict[str, Any], expected: str) -> None:
    found = verdict(describe(SHAPE), describe(replace(SHAPE, **changes)))
    assert isinstance(found, Convertible)
    assert expected in found.changes


def test_says_that_scales_are_not_the_same() -> None:
    source, sink = (describe(replace(SHAPE, codec="int8", scales=scales)) for scales in (None, {"k": (2.0,)}))
    found = verdict(source, sink)
    assert found == Convertible(("scales: source none, sink 2 (layer 0 k and 1 more)",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"key_width": 64}, "key_width: source 32, sink 64 (layer 0 and 1 more)"),
        ({"value_width": 64}, "value_width: source 16, sink 64 (layer 0 and 1 more)"),
        ({"kv_heads": 8}, "kv_heads: source 4, sink 8 (layer 0 and 1 more)"),
        ({"layers": 3}, "layers: source 2, sink 3"),
        ({"model": "other"}, "model: source oracle, sink other"),
        ({"codec": "opaque"}, "codec: source bf16, sink opaque of 32 bytes (layer 0 k and 1 more)"),
    ],
)
def test_refuses_another_model(changes: dict[str, Any], expected: str) -> None:
    ours, theirs = describe(SHAPE), describe(replace(SHAPE, **changes))
    assert expected in reasons(ours, theirs)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("rope_width", 64, "rope_width: source 0, sink 64 (layer 0 and 1 more)"),
        ("window", 128, "window: source 0, sink 128 (layer 0 and 1 more)"),
        ("kind", "sliding", "kind: source full, sink sliding (layer 0 and 1 more)"),
    ],
)
def test_refuses_layers_of_another_kind(field: str, value: Any, expected: str) -> None:
    assert expected in reasons(describe(SHAPE), with_layers(describe(SHAPE), **{field: value}))


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_refuses_other_kinds_of_group_by_name(kind: Any) -> None:
    pool = describe(SHAPE)
    other = change(pool, groups=(change(pool.groups[0], kind=kind),))
    assert reasons(other, pool) == (f"kind: source {kind}, sink full; needs the same, or full at the source",)


def test_a_layer_that_one_side_does_not_know_is_not_compared() -> None:
    """A rank knows the layers of its own pipeline stage only."""
    first, last = (describe(replace(SHAPE, pp_size=2), pp_rank=rank) for rank in range(2))
    mine = change(first, model=change(first.model, layers=(first.model.layers[0], None)))
    yours = change(last, model=change(last.model, layers=(None, last.model.layers[1])))
    assert check_pool(mine) == check_pool(yours) == ()
    assert not isinstance(verdict(mine, yours), Incompatible)
    wide = describe(replace(SHAPE, key_width=96))
    assert "key_width: source 32, sink 96 (layer 0)" in reasons(mine, wide)


def test_a_plane_of_an_unknown_layer_is_no_pool() -> None:
    pool = describe(SHAPE)
    unknown = change(pool, model=change(pool.model, layers=(pool.model.layers[0], None)))
    assert check_pool(unknown)[0].endswith("layer: 1 has a plane, the model says nothing of it")


def test_a_period_beyond_bounds_is_no_pool() -> None:
    pool = describe(SHAPE)
    assert check_pool(change(pool, shard=Shard(cp_size=2, cp_interleave=1 << 19))) == ()
    assert check_pool(change(pool, shard=Shard(cp_size=3, cp_interleave=1 << 19))) == (
        "cp_interleave: 524288, with cp_size 3 a period of 1572864 tokens, at most 1048576",
    )


def test_a_packed_row_moves_to_its_like_only() -> None:
    rows = replace(SHAPE, codec="opaque", key_width=656, value_width=656)
    pool = describe(rows)
    assert verdict(pool, pool) == Same()
    packed = Codec(name="fp8_ds_mla", width=656, element_bytes=1, row_bytes=656)
    assert verdict(with_planes(pool, codec=packed), with_planes(pool, codec=packed)) == Same()
    assert reasons(pool, with_planes(pool, codec=packed)) == (
        "codec: source opaque of 656 bytes, sink fp8_ds_mla of 656 bytes (layer 0 k and 3 more)",
    )


def test_refuses_a_source_that_lacks_a_part() -> None:
    pool = describe(SHAPE)
    keys = change(pool, planes=tuple(plane for plane in pool.planes if plane.part == "k"))
    assert reasons(keys, pool) == ("parts: source k, sink k v (layer 0 and 1 more)",)
    assert verdict(pool, keys) == Same()


def test_the_fingerprint_is_of_the_model_alone() -> None:
    pool = describe(SHAPE)
    assert fingerprint(pool.model) == fingerprint(describe(replace(SHAPE, layout="hnd", tp_size=2)).model)
    assert fingerprint(pool.model) != fingerprint(describe(replace(SHAPE, key_width=64)).model)
    assert fingerprint(pool.model) != fingerprint(with_layers(pool, rope_width=1).model)


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
    assert isinstance(found, Incompatible) and any(reason.startswith("sink plane 0") for reason in found.reasons)


def test_refuses_two_planes_for_one_part_and_parts_of_other_heads() -> None:
    pool = describe(SHAPE)
    assert check_pool(change(pool, planes=(*pool.planes, pool.planes[0]))) == ("part: layer 0 has two planes for k",)
    other = change(pool.planes[1], heads=2)
    assert "heads: layer 0 has 2 from 0 on for v, 4 from 0 on for k" in check_pool(
        change(pool, planes=(pool.planes[0], other, *pool.planes[2:]))
    )


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_refuses_a_rank_outside_its_size(axis: str) -> None:
    pool = change(describe(SHAPE), shard=Shard(**{f"{axis}_rank": 2, f"{axis}_size": 2}))
    assert check_pool(pool) == (f"{axis}_rank: 2, {axis}_size 2",)


def test_reasons_fit_a_message() -> None:
    pool = with_planes(describe(replace(SHAPE, layers=100)), group=5)
    found = check_pool(pool)
    assert len(found) == MOST_REASONS + 1 <= 64
    assert found[-1] == f"and {200 - MOST_REASONS} reasons more"
    assert all(len(reason) <= 1024 for reason in reasons(pool, pool))


def test_the_extent_is_the_last_byte_of_the_last_row() -> None:
    pool = describe(SHAPE)
    assert [extent(plane, pool.groups[0]) for plane in pool.planes] == [region.size_bytes for region in pool.regions]
    assert extent(pool.planes[0], Group(kind="full", block_tokens=16, blocks=1)) == pool.planes[0].block_stride
