"""Coalescing makes rows longer if both sides agree. test_transfer shows that it never changes what arrives."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from kvbridge_proto.pool import Step

from kvbridge.geometry import plan as plans
from kvbridge.geometry.coalesce import LONGEST_BYTES, coalesce
from kvbridge.geometry.plane_pair import PlanePair, pair_planes
from kvbridge.geometry.shard import assign
from testing.carried import carry
from testing.oracle import Shape, describe
from testing.pools import More

SHAPE = Shape(layers=3, kv_heads=4, key_width=32, value_width=16, block_tokens=16)
KEY, VALUE = 64, 32  # bytes of a row


def folded(sender: Shape, receiver: Shape, first_token: int = 0, slot_bytes: int = 1 << 20) -> list[PlanePair]:
    ours, theirs = describe(sender), describe(receiver)
    (takes,) = assign([ours], theirs)
    return coalesce(pair_planes(ours, theirs, takes), ours, theirs, first_token, slot_bytes)


def forms(pairs: list[PlanePair]) -> list[tuple[int, int, int]]:
    """(heads, row bytes, tokens of a unit) of each different pair."""
    return sorted({(pair.heads, pair.wire.row_bytes, pair.unit_tokens) for pair in pairs})


BLOCK = 16 * 4 * (KEY + VALUE)


@pytest.mark.parametrize(
    ("layout", "pairs", "expected"),
    [
        ("nhd", 6, [(1, 16 * 4 * VALUE, 16), (1, 16 * 4 * KEY, 16)]),
        ("hnd", 6, [(1, 16 * 4 * VALUE, 16), (1, 16 * 4 * KEY, 16)]),
        ("two_first", 6, [(1, 16 * 4 * VALUE, 16), (1, 16 * 4 * KEY, 16)]),
        ("block_first", 3, [(1, BLOCK, 16)]),
        ("packed", 3, [(1, BLOCK, 16)]),
        ("packed_hnd", 3, [(1, BLOCK, 16)]),
        ("cross_layer", 1, [(1, 3 * BLOCK, 16)]),
        ("cross_layer_hnd", 1, [(1, 3 * BLOCK, 16)]),
        ("token_outer", 1, [(1, 3 * BLOCK, 16)]),
        ("cpu_vec", 3, [(1, BLOCK, 16)]),
        ("cpu_amx", 3, [(1, BLOCK, 16)]),
    ],
)
def test_equal_sides_move_whole_blocks(layout: str, pairs: int, expected: list[tuple[int, int, int]]) -> None:
    shape = replace(SHAPE, layout=layout)
    found = folded(shape, shape)
    assert len(found) == pairs and forms(found) == expected
    for pair in found:
        assert pair.sender.codec.name == "opaque" and pair.sender.token_axis == (Step(1, 0),)


@pytest.mark.parametrize(
    ("sender", "receiver", "first_token", "expected"),
    [
        # Another block size: what divides both blocks.
        ({"layout": "nhd"}, {"layout": "nhd", "block_tokens": 32}, 0, [(1, 64 * VALUE, 16), (1, 64 * KEY, 16)]),
        ({"layout": "nhd", "block_tokens": 32}, {"layout": "nhd"}, 16, [(1, 64 * VALUE, 16), (1, 64 * KEY, 16)]),
        ({"layout": "nhd"}, {"layout": "nhd", "block_tokens": 24}, 8, [(1, 32 * VALUE, 8), (1, 32 * KEY, 8)]),
        ({"layout": "packed_hnd"}, {"layout": "packed_hnd", "block_tokens": 32}, 0, [(4, 16 * (KEY + VALUE), 16)]),
        # A first token inside a block: whole tokens of all heads.
        ({"layout": "nhd"}, {"layout": "nhd", "block_tokens": 32}, 5, [(1, 4 * VALUE, 1), (1, 4 * KEY, 1)]),
        ({"layout": "nhd"}, {"layout": "nhd"}, 5, [(1, 4 * VALUE, 1), (1, 4 * KEY, 1)]),
        ({"layout": "packed"}, {"layout": "packed"}, 5, [(1, 4 * (KEY + VALUE), 1)]),
        ({"layout": "packed_hnd"}, {"layout": "packed_hnd", "block_tokens": 32}, 5, [(4, KEY + VALUE, 1)]),
        ({"layout": "nhd"}, {"layout": "nhd"}, 32, [(1, 64 * VALUE, 16), (1, 64 * KEY, 16)]),
        # K and V apart on one side, together on the other: planes stay apart.
        ({"layout": "nhd"}, {"layout": "block_first"}, 0, [(1, 64 * VALUE, 16), (1, 64 * KEY, 16)]),
        # Some of the heads: whole blocks of a head where heads are outside of tokens, else one token of those heads.
        ({"layout": "hnd"}, {"layout": "hnd", "tp_size": 2}, 0, [(1, 32 * VALUE, 16), (1, 32 * KEY, 16)]),
        ({"layout": "nhd"}, {"layout": "nhd", "tp_size": 2}, 0, [(1, 2 * VALUE, 1), (1, 2 * KEY, 1)]),
        # Nothing in common but the rows.
        ({"layout": "nhd"}, {"layout": "hnd"}, 0, [(4, VALUE, 1), (4, KEY, 1)]),
        # A row that is not dense and no whole block: as it was.
        ({"layout": "cpu_vec"}, {"layout": "cpu_vec"}, 1, [(4, VALUE, 1), (4, KEY, 1)]),
        ({"layout": "cpu_vec"}, {"layout": "nhd"}, 0, [(4, VALUE, 1), (4, KEY, 1)]),
        # Padding between blocks does not matter, conversion does.
        ({"layout": "nhd", "pad_bytes": 64}, {"layout": "nhd"}, 0, [(1, 64 * VALUE, 16), (1, 64 * KEY, 16)]),
        ({"layout": "nhd"}, {"layout": "nhd", "codec": "fp8_e4m3"}, 0, [(4, VALUE // 2, 1), (4, KEY // 2, 1)]),
    ],
)
def test_folds_as_far_as_both_sides_agree(sender, receiver, first_token, expected) -> None:
    assert forms(folded(replace(SHAPE, **sender), replace(SHAPE, **receiver), first_token)) == expected


def test_other_scales_are_not_folded_equal_ones_are() -> None:
    shape = replace(SHAPE, codec="fp8_e4m3", scales={"k": (0.5,), "v": (1.0, 2.0, 3.0, 4.0)})
    other = replace(shape, scales={"k": (0.5, 0.5, 0.5, 0.5), "v": (1.0, 2.0, 3.0, 5.0)})
    by_part = {pair.receiver.part: pair.wire.name for pair in folded(shape, other)}
    assert by_part == {"k": "opaque", "v": "fp8_e4m3"}


def test_no_row_is_longer_than_a_slot_or_the_limit() -> None:
    shape = replace(SHAPE, layout="cross_layer", layers=64)
    for slot_bytes in (100, 1000, 10_000, 1 << 20):
        for pair in folded(shape, shape, slot_bytes=slot_bytes):
            assert pair.wire.row_bytes <= min(max(slot_bytes, KEY), LONGEST_BYTES)


def test_a_slot_smaller_than_a_block_is_filled_by_tokens() -> None:
    shape = replace(SHAPE, block_tokens=48)
    planned = plans.plan(describe(shape), describe(shape), assign([describe(shape)], describe(shape))[0], 0, 96, 2048)
    assert planned.chunks and {pair.unit_tokens for pair in planned.pairs} == {1}


def test_the_last_block_travels_whole_and_no_further() -> None:
    """Nobody else's block is touched: what is behind the last block stays poison (`mismatch` sees to it)."""
    for end in (33, 47, 48, 49):
        carry(SHAPE, SHAPE, range(16, end))


@pytest.mark.parametrize(
    ("layout", "first_token", "field", "value"),
    [
        ("packed_hnd", 5, "head_stride", 3200),
        ("packed_hnd", 5, "token_axis", (Step(16, 192),)),
        ("packed", 5, "token_axis", (Step(16, 768),)),
        ("packed", 0, "block_stride", 1 << 16),
        ("packed", 0, "region", 7),
    ],
)
def test_planes_that_only_begin_side_by_side_stay_apart(layout, first_token, field, value) -> None:
    """V follows K at the first row, on both sides; at a later row, head or block it does not on one of them."""
    shape = replace(SHAPE, layers=1, layout=layout)
    whole = describe(shape)
    key, kept = whole.planes
    apart = msgspec.structs.replace(whole, planes=(key, msgspec.structs.replace(kept, **{field: value})))
    (takes,) = assign([whole], whole)
    for sender, receiver, count in ((whole, whole, 1), (whole, apart, 2), (apart, whole, 2), (apart, apart, 2)):
        pairs = coalesce(pair_planes(sender, receiver, takes), sender, receiver, first_token, 1 << 20)
        assert len(pairs) == count


@pytest.mark.parametrize("has_said_so", [True, False], ids=["one page", "said plainly"])
def test_a_page_that_is_a_whole_block_moves_with_its_scales(has_said_so: bool) -> None:
    """Also if one side describes it as one page of so many tokens. A block of two pages is moved row by row."""
    index = More("index_key", width=32, codec="fp8_row_scale", page_tokens=16)
    shape = replace(SHAPE, layers=1, more=(index,))
    sender = receiver = describe(shape)
    if not has_said_so:
        planes = tuple(msgspec.structs.replace(each, token_axis=each.token_axis[-1:]) for each in sender.planes)
        receiver = msgspec.structs.replace(sender, planes=planes)
    (takes,) = assign([sender], receiver)
    pairs = coalesce(pair_planes(sender, receiver, takes), sender, receiver, 0, 1 << 20)
    (page,) = (pair for pair in pairs if pair.receiver.part == "index_key")
    assert len(pairs) == 3 and (page.wire.row_bytes, page.unit_tokens) == (16 * (32 + 4), 16)

    two = replace(shape, block_tokens=32)
    assert (1, 32, 1) in forms(folded(two, two))


def test_a_block_that_is_tiled_otherwise_is_moved_row_by_row() -> None:
    """Elements lie alike on both sides and both blocks are dense, but tokens follow another order."""
    shape = replace(SHAPE, layers=1, kv_heads=1, layout="cpu_vec")
    sender = describe(shape)
    key = sender.planes[0]
    turned = msgspec.structs.replace(key, token_axis=(Step(8, 2), Step(2, 16)))
    receiver = msgspec.structs.replace(sender, planes=(turned, sender.planes[1]))
    (takes,) = assign([sender], receiver)
    assert {pair.wire.name for pair in coalesce(pair_planes(sender, sender, takes), sender, sender, 0, 1 << 20)} == {
        "opaque"
    }
    assert {
        pair.wire.name for pair in coalesce(pair_planes(sender, receiver, takes), sender, receiver, 0, 1 << 20)
    } == {"bf16", "opaque"}
