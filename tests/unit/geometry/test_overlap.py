"""Planes that share bytes are found, all of them and no others: compared with a map of every byte."""

from __future__ import annotations

import re
import time
from random import Random

import msgspec
import numpy as np
import pytest
from kvbridge_proto.pool import Codec, Group, Plane, Pool, Region, Step

from kvbridge.geometry.check import check_pool
from kvbridge.geometry.overlap import overlaps
from testing.pools import LAYOUTS, Shape, describe, mla

change = msgspec.structs.replace


def plane(offset: int, steps: list[tuple[int, int]], run: int, block: tuple[int, int], **more: int) -> Plane:
    """`steps` and `block` are (count, stride)."""
    heads, *tokens = steps
    return Plane(
        layer=more.get("layer", 0),
        part="k",
        group=more.get("group", 0),
        region=0,
        offset=offset,
        block_stride=block[1],
        token_axis=tuple(Step(*step) for step in tokens),
        head_stride=heads[1],
        element_axis=(Step(run, 1),),
        first_head=0,
        heads=heads[0],
        total_heads=heads[0],
        codec=Codec(name="opaque", width=run, element_bytes=1, row_bytes=run),
    )


def pool_of(planes: list[Plane], blocks: list[int]) -> Pool:
    return change(
        describe(Shape()),
        groups=tuple(Group(kind="full", block_tokens=1, blocks=count) for count in blocks),
        regions=(Region(1 << 40),),
        planes=tuple(planes),
    )


def bytes_of(one: Plane, blocks: int) -> list[set[int]]:
    """Of each block."""
    found = np.zeros(1, np.int64)
    for step in (Step(one.heads, one.head_stride), *one.token_axis, *one.element_axis):
        found = (found[:, None] + np.arange(step.count) * step.stride).ravel()
    return [set((found + one.offset + block * one.block_stride).tolist()) for block in range(blocks)]


def shared(pool: Pool) -> set[tuple[int, int]]:
    """The planes that share a byte that they must not, by looking at every byte."""
    held = [bytes_of(one, pool.groups[one.group].blocks) for one in pool.planes]
    found = set()
    for i, one in enumerate(pool.planes):
        for j, other in enumerate(pool.planes[:i]):
            is_laid_over = one.group != other.group and one.block_stride == other.block_stride
            for ours, mine in enumerate(held[i]):
                for theirs, its in enumerate(held[j]):
                    if mine & its and not (is_laid_over and ours == theirs):
                        found.add((min(one.layer, other.layer), max(one.layer, other.layer)))
    return found


def said(reason: str) -> tuple[int, int, int]:
    """Two layers and a byte."""
    found = re.fullmatch(r"layer (\d+) \w+ and layer (\d+) \w+: both hold byte (\d+) of region 0", reason)
    assert found, reason
    one, other, byte = map(int, found.groups())
    return min(one, other), max(one, other), byte


def nested(random: Random, group: int, layer: int, counts: list[int], like: Plane | None) -> Plane:
    """Strides in any order, each clearing what is below it; often those of another plane."""
    blocks = counts[group]
    if like is not None and blocks <= counts[like.group] and random.random() < 0.6:
        return change(like, layer=layer, group=group, offset=max(0, like.offset + random.randint(-40, 40)))
    run = random.randint(1, 4)
    covered, slots = run, []
    for count in (random.randint(1, 4), random.randint(1, 4), random.randint(1, 3), blocks):
        slots.append(count)
    order = random.sample(range(4), 4)
    strides = [0] * 4
    for which in order:
        stride = covered + random.choice((0, 1, 3, random.randint(0, 20), random.randint(20, 90)))
        if random.random() < 0.3:
            stride += -stride % 8
        strides[which] = stride
        covered += stride * (slots[which] - 1)
    steps = [(slots[which], strides[which]) for which in range(3)]
    return plane(random.randint(0, 120), steps, run, (blocks, strides[3]), layer=layer, group=group)


@pytest.mark.proves("G24")
def test_finds_what_a_map_of_every_byte_finds() -> None:
    random = Random(13)
    kinds = {True: 0, False: 0}
    for _ in range(3000):
        groups = random.randint(1, 2)
        blocks = [random.randint(1, 5) for _ in range(groups)]
        planes: list[Plane] = []
        for layer in range(random.randint(2, 3)):
            group = random.randrange(groups)
            like = random.choice([None, *planes])
            planes.append(nested(random, group, layer, blocks, like))
        pool = pool_of(planes, blocks)
        expected, reasons = shared(pool), overlaps(pool)
        found = [said(reason) for reason in reasons]
        assert {(one, other) for one, other, _ in found} == expected, (pool.planes, pool.groups)
        for *layers, byte in found:
            for layer in layers:
                assert any(byte in block for block in bytes_of(planes[layer], blocks[planes[layer].group]))
        kinds[bool(expected)] += 1
    assert min(kinds.values()) > 500


LEGAL = [Shape(layout=layout, layers=3) for layout in LAYOUTS if layout != "cpu_amx"]
LEGAL += [Shape(layout="cpu_amx", layers=2, key_width=32, value_width=32)]
LEGAL += [Shape(layout=layout, key_width=32, value_width=32, codec=codec) for layout in ("nhd", "two_first", "packed")
          for codec in ("fp8_row_scale", "int4_row_scale", "mxfp8_e4m3", "nvfp4")]  # fmt: skip
LEGAL += [mla("fp8_ds_mla", layout="cross_layer"), mla("fp8_ds_v4"), Shape(kinds=("full", "state")), Shape(pad_bytes=3)]


@pytest.mark.parametrize("shape", LEGAL, ids=lambda shape: f"{shape.layout}-{shape.codec}-{shape.kinds[-1]}")
def test_layouts_of_engines_share_no_byte_until_a_plane_is_moved(shape: Shape) -> None:
    pool = describe(shape)
    assert check_pool(pool) == () == overlaps(pool)
    one, other, *rest = (each for each in pool.planes if each.group == 0)
    on_top = change(other, region=one.region, offset=one.offset)
    broken = change(pool, planes=(one, on_top, *rest, *(each for each in pool.planes if each.group)))
    assert f"layer {one.layer} {one.part} and layer {other.layer} {other.part}: both hold" in " ".join(overlaps(broken))


def test_groups_may_lie_over_each_other_block_by_block() -> None:
    pool = describe(Shape(layout="cross_layer", kinds=("full", "sliding"), window=20, layers=4))
    full = [each for each in pool.planes if each.group == 0]
    laid = [change(one, offset=two.offset) for one, two in zip(pool.planes[2:4], full, strict=False)]
    assert [one.group for one in laid] == [1, 1]
    over = change(pool, planes=(*full, *laid))
    assert overlaps(over) == ()
    ahead = change(laid[0], offset=laid[0].offset + laid[0].block_stride)
    assert overlaps(change(over, planes=(*full, ahead))) == (
        f"layer 0 k and layer 1 k: both hold byte {ahead.offset} of region 0",
    )
    wider = change(laid[0], block_stride=2 * laid[0].block_stride)
    assert overlaps(change(over, planes=(*full, wider)))


@pytest.mark.parametrize("layout", ["nhd", "two_first", "cross_layer", "cross_layer_hnd", "token_outer", "packed"])
def test_61_layers_are_judged_in_milliseconds(layout: str) -> None:
    pool = describe(Shape(layout=layout, layers=61, kv_heads=8, key_width=128, value_width=128, blocks=1000))
    began = time.process_time()
    assert overlaps(pool) == ()
    assert time.process_time() - began < 0.05


def test_what_would_take_long_is_refused_soon() -> None:
    one = plane(0, [(1, 0), (1 << 18, 2 * 999_983)], 1, (1, 0))
    other = plane(1, [(1, 0), (1 << 18, 2 * 999_979)], 1, (1, 0), layer=1)  # odd bytes, the other has even ones
    began = time.process_time()
    assert overlaps(pool_of([one, other], [1])) == (
        "layer 0 k and layer 1 k: lie across each other in too many ways to tell them apart",
    )
    everywhere = [plane(index % 3, [(1, 0), (4096, 1 << 20)], 1, (1, 0), layer=index) for index in range(20_000)]
    assert overlaps(pool_of(everywhere, [1]))
    assert time.process_time() - began < 3
