"""Each part of a layer has heads, width, codec and page of its own, and travels by itself: against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Codec, Pool

from kvbridge.errors import PeerError
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.compat import Incompatible, Same, verdict
from kvbridge.geometry.plan import plan
from kvbridge.geometry.shard import assign, common
from testing.carried import carry
from testing.oracle import More, Shape, describe, mla
from testing.refusals import refused

RANKS = (1, 2, 4)
# Index keys: one head that every rank has whole, 64 tokens' keys, then their scales. Not every layer has them.
INDEX = More("index_key", width=128, codec="fp8_row_scale", page_tokens=64)
# A convolution's x is cut by heads, its B and C have fewer heads, one of them fewer than there are ranks.
CONVOLUTION = (More("x", heads=8, is_cut=True), More("b", heads=4, width=24, is_cut=True), More("c", width=24))
SHAPES = {
    "latents with index keys": mla(layers=4, more=(replace(INDEX, layers=(0, 2, 3)),)),
    "K and V with index keys": Shape(layers=3, layout="hnd", more=(replace(INDEX, codec="bf16", layers=(1, 2)),)),
    "parts with other heads": Shape(layers=2, kv_heads=2, layout="packed", more=CONVOLUTION),
    "parts of a window": Shape(layers=4, kinds=("full", "sliding"), window=20, more=(INDEX, *CONVOLUTION)),
}


def pools(shape: Shape) -> list[Pool]:
    return [describe(shape, tp) for tp in range(shape.tp_size)]


PAGES = ((64, 64), (128, 64), (64, 128), (16, 64), (128, 16))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("ours", "theirs"), [*itertools.product(RANKS, RANKS)])
def test_every_part_arrives_whatever_the_ranks_and_pages(shape: Shape, ours: int, theirs: int) -> None:
    """Each two of shape, ranks and pages are tried together; two of five pages in each test."""
    row = [*SHAPES.values()].index(shape) + 2 * RANKS.index(ours) + RANKS.index(theirs)
    for number in (row % 5, (row + 2) % 5):
        block, other = PAGES[number]
        sender = replace(shape, tp_size=ours, block_tokens=block, blocks=-(-150 // block) + 2)
        receiver = replace(shape, tp_size=theirs, block_tokens=other, blocks=-(-150 // other) + 2, pad_bytes=16)
        if shape.window and block % other:
            continue  # refused: a window's first block begins inside the receiver's
        first = (0, 64, 65, 0, 149)[number]
        carry(sender, receiver, range(first, 150), (1 << 15, 1 << 13, 1 << 17)[number % 3])


def test_a_part_that_every_rank_has_whole_comes_from_one_that_gives_other_rows() -> None:
    shape = Shape(kv_heads=8, more=(INDEX,))
    for receiver in pools(replace(shape, tp_size=2)):
        takes = assign(pools(replace(shape, tp_size=4)), receiver)
        mine = 2 * receiver.shard.tp_rank
        assert [sorted({take.part for take in each}) for each in takes[mine : mine + 2]] in (
            [["index_key", "k", "v"], ["k", "v"]],
            [["k", "v"], ["index_key", "k", "v"]],
        )
        assert not any(takes[index] for index in range(4) if index not in (mine, mine + 1))


@pytest.mark.parametrize(("senders", "receivers"), [*itertools.product((1, 2, 8), (1, 2, 8))])
def test_one_sender_serves_what_every_rank_has(senders: int, receivers: int) -> None:
    """Latents and index keys: each receiver asks one rank, and the receivers spread over the ranks."""
    shape, asked = SHAPES["latents with index keys"], set()
    for receiver in pools(replace(shape, tp_size=receivers)):
        givers = {index for index, each in enumerate(assign(pools(replace(shape, tp_size=senders)), receiver)) if each}
        assert len(givers) == 1
        asked |= givers
    assert len(asked) == min(senders, receivers)


def test_a_take_names_a_part_only_where_parts_differ() -> None:
    """So an older agent, which does not know of parts in takes, reads the takes of K and V."""
    plain = describe(Shape(layers=4))
    assert assign([plain], plain) == ((Take(0, 4, 0, 4),),) == (common(plain, plain),)
    latent = describe(SHAPES["latents with index keys"])
    expected = (Take(0, 1, 0, 1, "index_key"), Take(2, 4, 0, 1, "index_key"), Take(0, 4, 0, 1, "latent"))
    assert assign([latent], latent) == (expected,) == (common(latent, latent),)
    everywhere = describe(mla(layers=4, more=(INDEX,)))
    assert assign([everywhere], everywhere) == ((Take(0, 4, 0, 1),),)


def test_a_take_of_one_part_moves_only_that() -> None:
    pool = describe(SHAPES["parts with other heads"])
    for part, heads in {"k": 2, "v": 2, "x": 8, "b": 4, "c": 1}.items():
        pairs = plan(pool, pool, (Take(0, 2, 0, heads, part),), 1, 16, 1 << 16).pairs
        assert {(pair.receiver.layer, pair.receiver.part) for pair in pairs} <= {(0, part), (1, part)} and pairs


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        ((Take(0, 4, 0, 1, "index_key"),), "the receiver holds no layer 1 index_key"),
        ((Take(0, 1, 0, 1, "index_key_scale"),), "the receiver holds no layer 0 index_key_scale"),
        ((Take(0, 1, 0, 2, "index_key"),), "the sender holds heads [0, 1) of layer 0 index_key"),
        ((Take(0, 1, 0, 1), Take(0, 2, 0, 1, "latent")), "of latent overlaps layers [0, 1) heads [0, 1)"),
        ((Take(0, 1, 0, 1, "k"),), "the receiver holds no layer 0 k"),
    ],
)
def test_a_take_of_rows_that_are_not_there_or_twice_is_refused(takes: tuple[Take, ...], expected: str) -> None:
    pool = describe(SHAPES["latents with index keys"])
    with refused(PeerError, "bad_take") as caught:
        plan(pool, pool, takes, 0, 10, 1 << 16)
    assert expected in str(caught.value)


def test_another_width_or_other_heads_of_a_part_are_named() -> None:
    shape = Shape(more=(replace(INDEX, codec="bf16"), *CONVOLUTION))
    for changes, expected in (
        ({"width": 64}, "width: sender 128, receiver 64 (layer 0 index_key and 1 more); needs the same model"),
        ({"heads": 2}, "total_heads: sender 1, receiver 2 (layer 0 index_key and 1 more); needs the same model"),
    ):
        other = replace(shape, more=(replace(shape.more[0], **changes), *CONVOLUTION))
        found = verdict(describe(shape), describe(other))
        assert isinstance(found, Incompatible) and any(reason.startswith(expected) for reason in found.reasons)
    without = verdict(describe(replace(shape, more=CONVOLUTION)), describe(shape))
    assert isinstance(without, Incompatible)
    assert without.reasons[0].startswith("parts: sender b c k v x, receiver b c index_key k v x (layer 0 and 1 more)")


def test_scales_belong_to_their_rows() -> None:
    pool = describe(mla(more=(INDEX,)))
    assert not check_pool(pool)
    for changes, expected in (
        ({"heads": 2, "total_heads": 2}, "heads: 2 of the scales, 1 of the rows"),
        ({"total_heads": 4}, "total_heads: 4 of the scales, 1 of the rows"),
    ):
        assert f"layer 0 index_key: {expected}" in check_pool(changed(pool, "index_key_scale", **changes))


def test_the_codec_of_rows_names_that_of_their_scales() -> None:
    pool = describe(mla(more=(INDEX,)))
    codecs = {plane.part: plane.codec for plane in pool.planes}
    halves = msgspec.structs.replace(codecs["index_key"], scale_codec="fp16")
    rows = changed(pool, "index_key", codec=halves)
    assert "layer 0 index_key: scales: 1 x fp32, must be 1 x fp16" in check_pool(rows)
    fp16 = msgspec.convert({"name": "fp16", "width": 1, "element_bytes": 2, "row_bytes": 2}, Codec)
    both = changed(rows, "index_key_scale", codec=fp16)
    assert not check_pool(both) and verdict(both, both) == Same()
    for pools in ((both, pool), (pool, both)):
        found = verdict(*pools)
        assert isinstance(found, Incompatible) and found.reasons[0].startswith("scale_codec: sender fp")


def changed(pool: Pool, part: str, **changes: object) -> Pool:
    """The pool with other planes of one part."""
    planes = (msgspec.structs.replace(each, **changes) if each.part == part else each for each in pool.planes)
    return msgspec.structs.replace(pool, planes=tuple(planes))
