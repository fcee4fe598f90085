"""The grid of chunks, what a chunk contains, the wire codec, and the digest that two agents compare."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbridge_proto.peer import Take

from kvbridge.errors import OperatorError, PeerError
from kvbridge.geometry import group_plan
from kvbridge.geometry.plan import ALIGN, Part, Plan, Planner, plan
from kvbridge.geometry.shard import assign
from testing.oracle import Shape, block_table, build, describe, table_of

SHAPE = Shape(layers=3, key_width=16, value_width=24)


def plan_between(sender: Shape, receiver: Shape, tokens: range, slot_bytes: int = 4096) -> Plan:
    ours, theirs = describe(sender), describe(receiver)
    (takes,) = assign([ours], theirs)
    return plan(ours, theirs, takes, tokens.start, tokens.stop, slot_bytes)


@settings(max_examples=100)
@given(
    layouts=st.tuples(*[st.sampled_from(["nhd", "hnd", "cpu_vec", "cross_layer", "packed"])] * 2),
    blocks=st.tuples(*[st.sampled_from([1, 8, 16, 48, 128])] * 2),
    first=st.integers(0, 200),
    tokens=st.integers(1, 800),
    slot_bytes=st.integers(48, 1 << 18),
)
def test_the_grid_covers_every_token_of_every_pair_once(layouts, blocks, first, tokens, slot_bytes) -> None:
    one, two = (
        replace(SHAPE, layout=layout, block_tokens=block, blocks=4)
        for layout, block in zip(layouts, blocks, strict=True)
    )
    planned = plan_between(one, two, range(first, first + tokens), slot_bytes)
    counted = np.zeros((len(planned.pairs), 2), np.int64)
    counted[:, 1] = first
    total, end_token = 0, 0
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        band = counted[chunk.first_pair : chunk.end_pair]
        assert len(band) and (band[:, 1] == chunk.first_local).all() and chunk.first_local < chunk.end_local
        band[:, 1] = chunk.end_local
        assert 0 < chunk.size_bytes <= slot_bytes
        assert chunk.needs_tokens >= end_token, "a later chunk must not be ready before an earlier one"
        end_token = chunk.needs_tokens
        total += chunk.size_bytes
    assert (counted[:, 1] == first + tokens).all()
    assert total == planned.total_bytes
    heads_bytes = sum((16 + 24) * 2 * SHAPE.kv_heads for _ in range(SHAPE.layers))
    tail = max(pair.unit_tokens for pair in planned.pairs)
    assert tokens * heads_bytes <= total <= (tokens + tail) * heads_bytes + planned.chunks * len(planned.pairs) * ALIGN


def test_rows_of_one_kind_share_chunks_where_a_prompt_needs_several() -> None:
    """Each kind costs a launch for each chunk that has some of it. A prompt of one chunk stays whole."""
    sender, receiver = replace(SHAPE, blocks=300), replace(SHAPE, blocks=150, block_tokens=2 * SHAPE.block_tokens)

    def kinds(tokens: int) -> list[set[int]]:
        planned = plan_between(sender, receiver, range(tokens), 1 << 20)
        chunks = [planned.chunk(index) for index in range(planned.chunks)]
        return [{pair.wire.row_bytes for pair in planned.pairs[each.first_pair : each.end_pair]} for each in chunks]

    assert [len(each) for each in kinds(128)] == [2]
    assert len(kinds(4096)) > 2 and {len(each) for each in kinds(4096)} == {1}


def test_the_digest_covers_the_order_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that lay the same rows into a slot in another order must not take each other's chunks."""
    found = set()
    for backwards in (False, True):
        monkeypatch.setattr(
            group_plan, "sorted", lambda pairs, key, now=backwards: sorted(pairs, key=key, reverse=now), raising=False
        )
        planned = plan_between(SHAPE, replace(SHAPE, block_tokens=2 * SHAPE.block_tokens), range(20), 1 << 20)
        assert planned.chunks == 1
        found.add((planned.digest, tuple(pair.receiver.part for pair in planned.pairs)))
    assert len({digest for digest, _ in found}) == len(found) == 2


def test_a_plan_of_any_length_is_made_at_once() -> None:
    """A peer names the tokens, before anything is known to be there."""
    wide = replace(SHAPE, block_tokens=2 * SHAPE.block_tokens)
    for end in (1 << 20, 1 << 40):
        planned = plan_between(SHAPE, wide, range(end), 1 << 20)
        assert planned.chunks > end >> 12 and (isinstance(planned.order, range) or len(planned.order) < 1 << 14)
        assert planned.chunk(planned.chunks - 1).needs_tokens == end
        with pytest.raises(IndexError, match=f"chunk: {planned.chunks} of {planned.chunks}"):
            planned.chunk(planned.chunks)


def test_a_chunk_lists_no_more_rows_than_a_copier_has_room_for() -> None:
    narrow = Shape(layers=1, kv_heads=1, key_width=2, value_width=2, block_tokens=16, blocks=1 << 13)
    wide = replace(narrow, layout="hnd", block_tokens=32, blocks=1 << 12)
    planned = plan_between(narrow, wide, range(1, 1 << 17), 1 << 20)  # within a block, so row by row
    listed = [chunk.end_local - chunk.first_local for chunk in map(planned.chunk, range(planned.chunks))]
    assert max(listed) * 8 * 2 * len({pair.wire.row_bytes for pair in planned.pairs}) <= (1 << 20) // 16


def test_a_long_prompt_fills_its_slots_and_begins_with_its_first_tokens() -> None:
    shape = Shape(layers=32, kv_heads=8, key_width=128, value_width=128, blocks=4096)
    planned = plan_between(shape, replace(shape, block_tokens=32), range(8000), 4 << 20)
    whole = planned.total_bytes / (4 << 20)
    assert whole <= planned.chunks <= 1.15 * whole
    assert planned.chunk(0).needs_tokens <= 512 and planned.chunk(planned.chunks - 1).needs_tokens == 8000


def test_pairs_of_a_chunk_are_aligned_and_apart() -> None:
    shape = replace(SHAPE, key_width=5, value_width=3)
    planned = plan_between(shape, replace(shape, layout="hnd", block_tokens=32), range(33), 1 << 12)
    receiver = describe(shape)
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        end = 0
        for move in Part(planned, chunk, block_table(receiver, table_of(receiver, 33)), is_sender=True).moves():
            assert move.slot_offset % ALIGN == 0 and end <= move.slot_offset < end + ALIGN
            end = move.slot_offset + move.size_bytes
        assert end <= chunk.size_bytes < end + ALIGN


def test_only_the_blocks_of_a_chunk_are_needed() -> None:
    """A progressive sender gathers the first chunk while later blocks do not exist yet."""
    held = build(replace(SHAPE, blocks=40))
    planned = plan_between(replace(SHAPE, blocks=40), replace(SHAPE, layout="hnd"), range(600), 1 << 14)
    chunk = planned.chunk(0)
    blocks = -(-chunk.needs_tokens // 16)
    assert blocks < 38
    assert Part(planned, chunk, block_table(held.pool, table_of(held.pool, blocks * 16)), is_sender=True).moves()


def test_nothing_to_take_is_a_plan_without_chunks() -> None:
    pool = describe(SHAPE)
    for planned in (plan(pool, pool, (), 0, 100, 4096), plan_between(SHAPE, SHAPE, range(7, 7))):
        assert (planned.chunks, planned.total_bytes) == (0, 0)
        assert len(planned.digest) == 32


NARROW = {"codec": "fp8_e4m3", "scales": {"k": (0.5,), "v": (1.0, 2.0, 3.0, 4.0)}}


@pytest.mark.parametrize(
    ("sender", "receiver", "key_wire", "value_wire"),
    [
        ({}, {}, ("bf16", ()), ("bf16", ())),
        ({}, NARROW, ("fp8_e4m3", (0.5,)), ("fp8_e4m3", (3.0, 4.0))),
        (NARROW, {}, ("fp8_e4m3", (0.5,)), ("fp8_e4m3", (3.0, 4.0))),
        (NARROW, {"codec": "fp8_e5m2"}, ("fp8_e4m3", (0.5,)), ("fp8_e4m3", (3.0, 4.0))),
        ({"codec": "fp16"}, {}, ("fp16", ()), ("fp16", ())),
        ({}, {"codec": "fp32"}, ("bf16", ()), ("bf16", ())),
    ],
)
def test_the_narrower_codec_crosses_with_the_scales_of_its_heads(sender, receiver, key_wire, value_wire) -> None:
    ours = describe(replace(SHAPE, **sender))
    theirs = describe(replace(SHAPE, tp_size=2, block_tokens=32, **receiver), tp_rank=1)
    (takes,) = assign([ours], theirs)
    planned = plan(ours, theirs, takes, 3, 40, 1 << 20)
    tables = block_table(ours, table_of(ours, 40)), block_table(theirs, table_of(theirs, 40))
    gathers = Part(planned, planned.chunk(0), tables[0], is_sender=True).moves()
    scatters = Part(planned, planned.chunk(0), tables[1], is_sender=False).moves()
    for gather, scatter in zip(gathers, scatters, strict=True):
        assert gather.wire == scatter.wire and gather.heads == scatter.heads
        assert gather.is_bitwise == (gather.wire.name == gather.plane.codec.name)
        assert scatter.is_bitwise == (scatter.wire.name == scatter.plane.codec.name)
        if not gather.plane.name:
            expected = key_wire if gather.plane.part == "k" else value_wire
            assert (gather.wire.name, gather.wire.scales) == expected


def test_other_scales_are_not_bitwise() -> None:
    ours = replace(SHAPE, **NARROW)
    planned = plan_between(ours, replace(ours, scales={"k": (0.25,), "v": (1.0, 2.0, 3.0, 4.0)}), range(16), 1 << 20)
    receiver = describe(ours)
    moves = Part(planned, planned.chunk(0), block_table(receiver, table_of(receiver, 16)), is_sender=False).moves()
    assert {(move.plane.part, move.is_bitwise) for move in moves if not move.plane.name} == {("k", False)}
    assert {move.is_bitwise for move in moves if move.plane.name} == {True}


@pytest.mark.parametrize(
    ("takes", "reason"),
    [
        ((Take(0, 4, 0, 4),), "take: layers [0, 4) heads [0, 4), the receiver holds no layer 3"),
        ((Take(0, 1 << 40, 0, 4),), f"take: layers [0, {1 << 40}) heads [0, 4), the receiver holds no layer 3"),
        ((Take(0, 3, 0, 5),), "take: layers [0, 3) heads [0, 5), the sender holds heads [0, 4) of layer 0 k"),
        ((Take(0, 3, 2, 2),), "take: layers [0, 3) heads [2, 2) is empty"),
        ((Take(2, 1, 0, 2),), "take: layers [2, 1) heads [0, 2) is empty"),
        ((Take(0, 3, 0, 2), Take(2, 3, 1, 3)), "take: layers [2, 3) heads [1, 3) overlaps layers [0, 3) heads [0, 2)"),
    ],
)
def test_refuses_takes_that_cannot_be(takes: tuple[Take, ...], reason: str) -> None:
    pool = describe(SHAPE)
    with pytest.raises(PeerError) as refused:
        plan(pool, pool, takes, 0, 10, 4096)
    assert (refused.value.code, refused.value.reasons) == ("bad_take", (reason,))


@pytest.mark.parametrize("tokens", [(10, 9), (-1, 4)])
def test_refuses_tokens_that_cannot_be(tokens: tuple[int, int]) -> None:
    pool = describe(SHAPE)
    with pytest.raises(PeerError, match=f"end_token: {tokens[1]}, first_token: {tokens[0]}"):
        plan(pool, pool, (Take(0, 3, 0, 4),), *tokens, 4096)


def test_refuses_a_slot_that_holds_no_row() -> None:
    pool = describe(SHAPE)
    with pytest.raises(OperatorError) as refused:
        plan(pool, pool, (Take(0, 3, 0, 4),), 0, 10, 47)
    assert refused.value.code == "slot_too_small"
    assert refused.value.reasons == ("slot_bytes: 47, a row of layer 0 v has 48 bytes",)


DIGEST = """
from tests.unit.geometry.test_plan import *
shape = replace(SHAPE, layout="packed", kv_heads=7, layers=9, **NARROW)
senders = [describe(replace(shape, tp_size=3, layout="cpu_vec"), rank) for rank in range(3)]
receiver = describe(replace(shape, tp_size=2, pp_size=2), 1, 1)
takes = assign(senders, receiver)
print([plan(pool, receiver, each, 16, 5000, 9000).digest for pool, each in zip(senders, takes)])
"""


def test_another_process_derives_the_same_plan() -> None:
    root = Path(__file__).resolve().parents[3]
    said = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}:{root}/kernels:{root}/proto"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and said.pop().count(",") == 2


WINDOWED = [replace(SHAPE, kinds=("full", "sliding"), window=window) for window in (20, 200)]


def test_the_digest_covers_how_chunks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of another version may cut them otherwise, and both speak of chunks by their numbers."""
    found = set()
    for piece_bytes in (group_plan.PIECE_BYTES, group_plan.PIECE_BYTES // 64):
        monkeypatch.setattr(group_plan, "PIECE_BYTES", piece_bytes)
        planned = plan_between(SHAPE, SHAPE, range(3000), 1 << 16)
        found.add((planned.digest, planned.chunks, planned.total_bytes))
    assert len({digest for digest, _, _ in found}) == len({chunks for _, chunks, _ in found}) == 2
    assert len({total_bytes for _, _, total_bytes in found}) == 1, "the rows are the same"


def test_whatever_a_slot_depends_on_changes_the_digest() -> None:
    receiver = replace(SHAPE, block_tokens=32)
    plans = [
        plan_between(SHAPE, receiver, range(100)),
        plan_between(SHAPE, receiver, range(101)),
        plan_between(SHAPE, receiver, range(1, 100)),
        plan_between(SHAPE, receiver, range(100), 8192),
        plan_between(replace(SHAPE, codec="fp16"), replace(receiver, codec="fp16"), range(100)),
        plan_between(SHAPE, replace(receiver, codec="fp8_e4m3"), range(100)),
        plan_between(SHAPE, replace(receiver, codec="fp8_e4m3", scales={"k": (2.0,)}), range(100)),
        plan_between(SHAPE, replace(receiver, block_tokens=24), range(100)),
        plan_between(SHAPE, replace(receiver, tp_size=2), range(100)),
        plan_between(SHAPE, replace(receiver, pp_size=2), range(100)),
        *(
            plan_between(windowed, replace(windowed, block_tokens=32, begins_inside=True), range(100))
            for windowed in WINDOWED
        ),
    ]
    assert len({planned.digest for planned in plans}) == len(plans)
    assert plan_between(SHAPE, receiver, range(100)).digest == plans[0].digest


@pytest.mark.parametrize(
    ("layout", "digest"),
    [("nhd", "559d8cc29357c8554852bb9b265f2931"), ("packed", "5f4d495f7b20efa517eadd3e2b753689")],
)
def test_without_units_the_plan_is_that_of_agents_that_move_none(layout: str, digest: str) -> None:
    """As 89aad16f derives it. Between equal blocks units change nothing."""
    sender = Shape(layout=layout, layers=4, block_tokens=32, blocks=40)
    for receiver, is_same in ((sender, True), (replace(sender, block_tokens=64), False)):
        ours, theirs = describe(sender), describe(receiver)
        (takes,) = assign([ours], theirs)
        without, units = (Planner(ours, theirs, moves).plan(takes, 0, 500, 1 << 20).digest for moves in (False, True))
        assert (without == units) is is_same
    assert without == digest
