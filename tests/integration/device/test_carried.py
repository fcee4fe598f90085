"""Whole transfers by slots and by pulls of shapes that the matrix does not have; rows with a scale each."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Plane, Pool, Step

from kvbridge.device.memory import runs
from kvbridge.errors import EngineError
from kvbridge.geometry.plan import Move
from testing.carried import BothWays, carried
from testing.matrix import Case
from testing.oracle import LAYOUTS, POISON, Shape, build, describe, mla
from testing.pools import ranks_of
from tests.integration.device.attached import attached
from tests.integration.device.moving import gather, scatter

HYBRID = Shape(layers=4, kinds=("full", "sliding", "state", "chunked"), window=24, blocks=16)
CASES = {
    "tensor parallel": (Shape(tp_size=4, kv_heads=8), Shape(tp_size=1, kv_heads=8, layout="hnd", block_tokens=64)),
    "repeated heads": (Shape(tp_size=8, kv_heads=4), Shape(tp_size=2, kv_heads=4, layout="hnd")),
    "pipeline": (Shape(layers=7, pp_size=3), Shape(layers=7, pp_size=2, layout="cross_layer", block_tokens=8)),
    "context parallel": (Shape(cp_size=2), Shape(cp_size=4, cp_interleave=16, layout="hnd", block_tokens=8)),
    "context and tensor": (Shape(cp_size=2, tp_size=2), Shape(tp_size=4, layout="packed", block_tokens=32)),
    "windows and states": (HYBRID, replace(HYBRID, layout="hnd", block_tokens=8, blocks=24)),
    "states of two ranks": (replace(HYBRID, tp_size=2), replace(HYBRID, tp_size=2, block_tokens=8, blocks=24)),
    "latents": (mla("fp8_ds_mla", layers=3), mla("fp8_ds_mla", layers=3, block_tokens=64, pad_bytes=64)),
    "odd heads": (Shape(kv_heads=3, key_width=7, value_width=9), Shape(kv_heads=3, key_width=7, value_width=9,
                  layout="packed_hnd", block_tokens=24)),
    "scales beside rows": (Shape(codec="fp8_row_scale"), Shape(codec="fp8_row_scale", layout="hnd", tp_size=2)),
}  # fmt: skip
WIDE = Shape(key_width=16, value_width=32, blocks=8)
ODD = Shape(layout="cpu_vec", key_width=24, value_width=12, codec="fp8_e4m3", blocks=8)


@pytest.mark.proves("G4")
@pytest.mark.parametrize("name", CASES)
def test_shards_windows_and_states_are_pulled_and_written_to_where_they_belong(name: str) -> None:
    ours, theirs = CASES[name]
    for first, end in ((0, 75), (37, 75), (33, 34)):
        for rank in range(len(ranks_of(theirs))):
            assert carried(Case(ours, theirs, first, end), rank, BothWays())[1] == ""


@pytest.mark.parametrize("receiver", LAYOUTS)
@pytest.mark.parametrize("sender", ["nhd", "cpu_vec", "cpu_amx", "packed_hnd"])
def test_any_layout_becomes_any_other(sender: str, receiver: str) -> None:
    ours = replace(WIDE, layout=sender)
    theirs = replace(ours, layout=receiver, block_tokens=32, blocks=6)
    for first, end in ((0, 75), (37, 75), (32, 64), (5, 6)):
        assert carried(Case(ours, theirs, first, end), 0, BothWays())[1] == ""


@pytest.mark.parametrize(
    "case",
    [
        *(Case(replace(WIDE, layout=layout), replace(WIDE, layout=layout), 0, 75) for layout in LAYOUTS),
        *(Case(replace(WIDE, kv_heads=6, tp_size=ours), replace(WIDE, kv_heads=6, tp_size=theirs), 0, 75)
          for ours, theirs in ((2, 1), (1, 2), (4, 2), (3, 1), (8, 1))),
        *(Case(ODD, replace(ODD, block_tokens=24), 3, 60, slot_bytes) for slot_bytes in (64, 256, 1000, 1 << 20)),
    ],
)  # fmt: skip
def test_the_same_layout_other_ranks_and_slots_of_any_size(case: Case) -> None:
    for rank in range(len(ranks_of(case.receiver))):
        assert carried(case, rank, BothWays())[1] == ""


# Rows with a scale each:


SHAPE = Shape(kv_heads=4, key_width=16, value_width=32, blocks=6, codec="fp8_row_scale", layout="hnd")


def scaled_moves(pool: Pool) -> list[Move]:
    """Two heads of every K of a pool, as plain numbers."""
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    plain = msgspec.structs.replace(planes[0, "k"].codec, name="fp32", element_bytes=4, row_bytes=64)
    return [
        Move(planes[layer, "k"], 1, 2, plain, 4096 * layer, np.arange(5), 1, planes[layer, "k_scale"])
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
