"""Rows with a scale each: which moves are one call, and scales that do not belong to the rows."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Plane, Pool, Step

from kvbridge.device.templates import runs
from kvbridge.errors import EngineError
from kvbridge.geometry.plan import Move
from testing.oracle import POISON, Shape, build, describe
from tests.integration.device.attached import attached
from tests.integration.device.moving import gather, scatter

SHAPE = Shape(kv_heads=4, key_width=16, value_width=32, blocks=6, codec="fp8_row_scale", layout="hnd")


def scaled_moves(pool: Pool, heads: int = 2) -> list[Move]:
    """Two heads of every K of a pool, as plain numbers."""
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    plain = msgspec.structs.replace(planes[0, "k"].codec, name="fp32", element_bytes=4, row_bytes=64)
    return [
        Move(planes[layer, "k"], 1, heads, plain, 4096 * layer, np.arange(5), 1, planes[layer, "k_scale"])
        for layer in range(2)
    ]


def in_one_region(pool: Pool) -> Pool:
    """Its layers' K one after another, so that they are one batch."""
    size = pool.regions[0].size_bytes
    planes = [
        msgspec.structs.replace(plane, region=0, offset=plane.offset + plane.layer * size)
        for plane in pool.planes
        if plane.part.startswith("k")
    ]
    return msgspec.structs.replace(
        pool, planes=tuple(planes), regions=(msgspec.structs.replace(pool.regions[0], size_bytes=2 * size),)
    )


def test_layers_whose_scales_lie_alike_move_in_one_call() -> None:
    pool = in_one_region(describe(SHAPE))
    first, second = scaled_moves(pool)
    assert len(list(runs([first, second]))) == 1
    other = msgspec.structs.replace(second.scale, offset=second.scale.offset + 4)
    assert len(list(runs([first, replace(second, scale=other)]))) == 2
    assert len(list(runs([first, replace(second, scale=None)]))) == 2


def wrong_scales(good: Move) -> dict[str, Plane]:
    scale = good.scale
    assert scale is not None
    change = msgspec.structs.replace
    return {
        "fewer in a block": change(scale, token_axis=(Step(8, 4),)),
        "another region": change(scale, region=1),
        "outside of the region": change(scale, offset=1 << 30),
        "fewer heads": change(scale, heads=1),
        "another codec": change(scale, codec=change(scale.codec, name="opaque")),
    }


@pytest.mark.parametrize("what", wrong_scales(scaled_moves(describe(SHAPE))[0]))
def test_refuses_scales_that_are_not_those_of_the_rows(what: str) -> None:
    held = build(SHAPE)
    good = scaled_moves(held.pool)
    slot = torch.full((1 << 14,), POISON, dtype=torch.uint8)
    with attached(held) as (engine, pool):
        for move in (gather, scatter):
            with pytest.raises(EngineError) as caught:
                move(pool, [good[1], replace(good[0], scale=wrong_scales(good[0])[what])], slot)
            assert caught.value.code == ("plane_outside_region" if what == "outside of the region" else "bad_plane")
        assert (slot == POISON).all() and all((region == POISON).all() for region in engine.memory)
        bare = replace(good[0], scale=None)
        with pytest.raises(EngineError, match="codec: fp8_row_scale, on the wire fp32"):
            gather(pool, [bare], slot)
