"""Layers that do not keep every token: what the next query sees is carried, and nothing else is read or written."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Group, GroupKind, Region, Shard, Step

from kvbridge.cache_kinds import CACHE_KINDS, needed, start_of
from kvbridge.device.copier import CpuBlockCopier
from kvbridge.geometry.plan import ALIGN, Part, Planner, plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.tokens import BlockTable
from testing.carried import OnCpu, carried, carry, move
from testing.matrix import Case
from testing.oracle import (
    Shape,
    block_table,
    describe,
    fill,
    first_seen,
    mismatch,
    places_of,
    rows,
    rows_at,
    tables_of,
    take_rows,
)
from testing.pools import POISON, STATES, Held, More, build
from tests.unit.geometry.test_plan import plan_between

ROW_BYTES = 4 * (8 + 8) * 2  # of a token and layer: heads, K and V, bf16
HYBRID = Shape(layers=4, kinds=("full", "sliding"), window=20)
STATEFUL = Shape(layers=3, kinds=("full", "state", "sliding"), window=20)
NEVER: dict[str, Any] = {"never_cached": True}
OF_FOUR = Shape(layers=3, kinds=("full", "sliding"), window=20, more=(More("of_4", row_tokens=4, layers=(0, 2)),))


def test_every_kind_on_the_wire_has_its_row() -> None:
    assert tuple(CACHE_KINDS) == get_args(GroupKind)


@pytest.mark.parametrize("first", [0, 16, 40, 61, 70])
def test_only_the_window_travels(first: int) -> None:
    """80 tokens: the query at 80 sees 61 and on, from the block that begins at 48."""
    for receiver in (HYBRID, replace(HYBRID, layout="hnd", tp_size=2)):
        carry(HYBRID, receiver, range(first, 80))
    planned = plan_between(HYBRID, HYBRID, range(first, 80))
    assert planned.total_bytes == ROW_BYTES * 2 * (80 - first + 80 - max(first, 48))


@pytest.mark.parametrize(
    ("kind", "sender", "receiver"),
    [
        *((kind, *blocks) for kind in ("sliding", "chunked") for blocks in ((16, 16), (32, 16), (48, 8), (16, 1))),
        ("chunked", 8, 32),
        ("chunked", 12, 16),
    ],
)
def test_no_row_of_a_block_that_is_kept_stays_as_it_was(kind: str, sender: int, receiver: int) -> None:
    """At any length: what the receiver keeps it may take for other requests, whole."""
    shape, copier = Shape(layers=1, kv_heads=1, kinds=(kind,), window=32, blocks=90), CpuBlockCopier()
    for end in range(1, 80):
        case = Case(replace(shape, block_tokens=sender), replace(shape, block_tokens=receiver), 0, end, 1 << 12)
        theirs, wrong = carried(case, 0, OnCpu(copier))
        assert not wrong
        table = tables_of(theirs.pool, end, 2)[0]
        needed = max(0, end - 31) if kind == "sliding" else end // 32 * 32
        for entry in range(needed // receiver, -(-end // receiver)):
            tokens = range(entry * receiver, min(end, (entry + 1) * receiver))
            for plane in theirs.pool.planes:
                found = take_rows(theirs, plane, places_of(table, tokens, receiver))
                assert np.array_equal(found, rows(plane, tokens, is_tame=True)), (end, entry)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@pytest.mark.parametrize(("sender", "receiver"), [(16, 48), (8, 16), (16, 16)])
def test_a_window_may_begin_inside_a_block_that_nobody_else_gets(kind: str, sender: int, receiver: int) -> None:
    """Then exactly what the next query sees travels, whatever the blocks."""
    shape = replace(HYBRID, kinds=("full", kind), blocks=24)
    theirs = replace(shape, layout="hnd", block_tokens=receiver, begins_inside=True)
    for end in (1, 31, 32, 33, 79, 80, 81):
        carry(replace(shape, block_tokens=sender), theirs, range(end))
        needed = end % HYBRID.window if kind == "chunked" else min(end, HYBRID.window - 1)
        *_, last = plan_between(replace(shape, block_tokens=sender), theirs, range(end)).group_plans
        assert last.end - last.first == needed or (not needed and last.kind == "full")


def test_blocks_before_the_window_are_not_read() -> None:
    """Neither side's table has entries there."""
    pools = {True: describe(HYBRID), False: describe(replace(HYBRID, block_tokens=8, blocks=24))}
    tables = {side: block_table(pool, tables_of(pool, 80, 1), 0, 80) for side, pool in pools.items()}
    assert (tables[True][1].first_block, tables[False][1].first_block, tables[True][0].first_block) == (3, 7, 0)
    planned = plan_between(HYBRID, replace(HYBRID, block_tokens=8, blocks=24), range(80))
    for side, index in itertools.product(pools, range(planned.chunks)):
        for each in Part(planned, planned.chunk(index), tables[side], side).moves():
            group = pools[side].groups[each.plane.group]
            blocks = each.places // (group.block_tokens // each.unit_tokens)
            assert set(blocks) <= set(tables[side][each.plane.group].ids)


def test_a_want_of_nothing_but_a_past_chunk_has_no_chunks() -> None:
    shape = Shape(kinds=("chunked",), window=32)
    planned = plan_between(shape, shape, range(64))
    assert (planned.chunks, planned.total_bytes, planned.group_plans) == (0, 0, ())
    carry(shape, shape, range(64))


def overlaid(held: Held) -> Held:
    """All layers in one region for each part, blocks as large as the largest: each group uses blocks of its own."""
    pool = held.pool
    stride = max(plane.block_stride for plane in pool.planes)
    regions = {part: index for index, part in enumerate(sorted({plane.part for plane in pool.planes}))}
    planes = tuple(
        msgspec.structs.replace(plane, region=regions[plane.part], offset=0, block_stride=stride)
        for plane in pool.planes
    )
    size = stride * pool.groups[0].blocks
    whole = msgspec.structs.replace(pool, planes=planes, regions=(Region(size),) * len(regions))
    return Held(whole, tuple(np.full(size, POISON, np.uint8) for _ in regions))


def test_groups_with_other_block_sizes_overlay_the_same_bytes() -> None:
    """vLLM's hybrid pools: one buffer, and a block of it belongs to whichever group took it."""
    shape = replace(HYBRID, layers=2, group_tokens={"sliding": 32}, blocks=20)
    ours = {0: (3, 9, 0, 7, 12), 1: (1, 15, 2)}
    theirs = {0: (4, 2, 11, 10, 19), 1: (0, 18, 5, 6, 8, 13, 14, 16, 17, 1)}
    sender, receiver = (
        overlaid(build(each)) for each in (shape, replace(shape, layout="hnd", group_tokens={"sliding": 8}))
    )
    fill(sender, ours, range(80))
    before = receiver.copy()
    move([sender], ours, receiver, theirs, range(80), 1 << 12, OnCpu())
    assert not mismatch(receiver, before, theirs, range(80))


@pytest.mark.parametrize("end", [1, 16, 17, 79, 80])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_state_takes_one_row(end: int, tp_size: int) -> None:
    shape = replace(STATEFUL, tp_size=tp_size)
    carry(shape, replace(shape, layout="hnd", group_tokens={"state": 48}), range(end))
    planned = plan_between(replace(shape, tp_size=1), replace(shape, tp_size=1), range(end))
    state = planned.group_plans[-1]
    assert (state.kind, state.first, state.end) == ("state", 0, 1)
    assert {pair.receiver.part for pair in state.pairs} == set(STATES)
    assert state.total_bytes == sum(-(-2 * heads * width // ALIGN) * ALIGN for heads, width in STATES.values())


def test_a_state_moves_whole_however_much_of_the_prompt_is_there() -> None:
    carry(STATEFUL, STATEFUL, range(64, 80))
    group_plans = plan_between(STATEFUL, STATEFUL, range(79, 80)).group_plans
    assert [(group_plan.kind, group_plan.end - group_plan.first) for group_plan in group_plans] == [
        ("full", 1),
        ("sliding", 1),
        ("state", 1),
    ]


def test_one_template_serves_every_state() -> None:
    """A state's form says nothing of the prompt's length; its place does."""
    pool = describe(STATEFUL)
    planner, (takes,) = Planner(pool, pool), assign([pool], pool)
    table, parts = tables_of(pool, 80), []
    for end in (32, 64):
        planned = planner.plan(takes, 0, end, 1 << 12)
        last = planned.chunk(planned.chunks - 1)
        parts.append(Part(planned, last, block_table(pool, table, 0, end), is_sender=True))
    assert {part.plan.group_plans[part.chunk.group_plan].kind for part in parts} == {"state"}
    assert parts[0].template_key == parts[1].template_key
    assert [part.places(1, 1).tolist() for part in parts] == [[table[1][1]], [table[1][3]]]


@pytest.mark.parametrize("slot_bytes", [1 << 12, 1 << 20])
@pytest.mark.parametrize("first", [0, 5, 16])
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (Shape(), Shape()),
        (Shape(), Shape(block_tokens=32)),
        (HYBRID, replace(HYBRID, block_tokens=32)),
        (HYBRID, replace(HYBRID, group_tokens={"sliding": 32})),
        (STATEFUL, STATEFUL),
        (STATEFUL, replace(STATEFUL, layout="hnd", group_tokens={"state": 48})),
        (OF_FOUR, replace(OF_FOUR, block_tokens=32)),
    ],
    ids=["whole blocks", "16 to 32", "window", "window of other blocks", "state", "state of other blocks", "four"],
)
def test_one_template_serves_only_chunks_of_one_form(
    sender: Shape, receiver: Shape, first: int, slot_bytes: int
) -> None:
    """Where whole blocks move, prompts of equally many; rows of several tokens are counted by themselves."""
    pools = {True: describe(sender), False: describe(receiver)}
    planner, (takes,) = Planner(pools[True], pools[False]), assign([pools[True]], pools[False])
    tables = {side: block_table(pool, tables_of(pool, 80)) for side, pool in pools.items()}
    forms: dict[object, list[tuple[object, ...]]] = {}
    plans = [planner.plan(takes, first, end, slot_bytes) for end in range(first + 1, 81)]
    for planned, side in itertools.product(plans, pools):
        for index in range(planned.chunks):
            part = Part(planned, planned.chunk(index), tables[side], side)
            form = [
                tuple(len(move.places) if each.name == "places" else getattr(move, each.name) for each in fields(move))
                for move in part.moves()
            ]
            assert forms.setdefault(part.template_key, form) == form


def test_one_template_serves_all_prompts_of_equally_many_blocks_if_these_move_whole() -> None:
    """A new one costs milliseconds of Python (64 planes), and prompts of one length are rare."""
    pool = describe(Shape())
    planner, (takes,), table = Planner(pool, pool), assign([pool], pool), tables_of(pool, 64)
    plans = [planner.plan(takes, 0, end, 1 << 20) for end in range(1, 64)]
    keys = {
        Part(each, each.chunk(0), block_table(pool, table, 0, each.end_token), is_sender=True).template_key
        for each in plans
    }
    assert len(keys) == 64 // pool.groups[0].block_tokens
    assert {each.chunks for each in plans} == {1}


def test_late_group_plans_come_last_and_need_all_tokens() -> None:
    planned = plan_between(STATEFUL, replace(STATEFUL, block_tokens=32), range(7, 80), 512)
    chunks = [planned.chunk(index) for index in range(planned.chunks)]
    assert [group_plan.kind for group_plan in planned.group_plans] == ["full", "sliding", "state"]
    assert [chunk.comes_last for chunk in chunks] == [index >= planned.early_chunks for index in range(planned.chunks)]
    assert 1 < planned.early_chunks < planned.chunks
    assert {chunk.needs_tokens for chunk in chunks[planned.early_chunks :]} == {80}
    assert chunks[0].needs_tokens < 80
    needs = [chunk.needs_tokens for chunk in chunks]
    assert needs == sorted(needs)
    assert sum(chunk.size_bytes for chunk in chunks) == planned.total_bytes
    covered = [(chunk.group_plan, pair) for chunk in chunks for pair in range(chunk.first_pair, chunk.end_pair)]
    assert {pair for _, pair in covered} == set(range(len(planned.pairs)))
    assert all(
        pair in planned.group_plans[group_plan].pairs for group_plan, at in covered for pair in [planned.pairs[at]]
    )


def test_groups_of_one_window_are_one_group_plan_and_others_are_not() -> None:
    pool = describe(replace(HYBRID, kinds=("full", "sliding", "chunked"), layers=3))
    group = pool.groups[1]
    for window, block, group_plans in ((20, 16, 3), (40, 16, 4), (20, 8, 4)):
        other = msgspec.structs.replace(group, window=window, block_tokens=block)
        planes = tuple(
            msgspec.structs.replace(plane, group=3, token_axis=(Step(block, plane.token_axis[0].stride),))
            if (plane.layer, plane.part) == (1, "v")
            else plane
            for plane in pool.planes
        )
        both = msgspec.structs.replace(pool, groups=(*pool.groups, other), planes=planes)
        (takes,) = assign([both], both)
        assert len(plan(both, both, takes, 0, 81, 1 << 12).group_plans) == group_plans


def test_samples_have_a_chunk_of_every_group_plan() -> None:
    for sender, receiver in ((STATEFUL, STATEFUL), (STATEFUL, replace(STATEFUL, block_tokens=32))):
        for is_sender in (True, False):
            parts = Planner(describe(sender), describe(receiver)).samples(1 << 12, is_sender)
            kinds = {part.plan.group_plans[part.chunk.group_plan].kind for part in parts}
            assert kinds == {"full", "sliding", "state"}
            assert all(len(move.places) for part in parts for move in part.moves())


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_what_is_kept_is_what_the_oracle_says(kind: str) -> None:
    for window, end in itertools.product((1, 7, 16, 100), range(60)):
        for size, begins_inside in itertools.product((1, 2), (False, True)):
            group = Group(kind=kind, block_tokens=16, blocks=10, window=window, begins_inside=begins_inside)
            assert start_of(group, end, Shard(cp_size=size)) == first_seen(group, end, size)


@pytest.mark.parametrize(("kind", "window"), [("sliding", 20), ("chunked", 4)])
def test_what_no_prefix_cache_has_is_received_whole_whatever_is_local(kind: str, window: int) -> None:
    group = Group(kind=kind, block_tokens=8, blocks=10, window=window, never_cached=True)
    cached = msgspec.structs.replace(group, never_cached=False, begins_inside=True)
    for first, end in itertools.combinations(range(60), 2):
        assert needed(group, first, end, Shard()) == start_of(group, end, Shard())
        assert needed(cached, first, end, Shard()) == max(first, start_of(group, end, Shard()))
    pool = describe(replace(HYBRID, kinds=("full", kind), window=window))
    pool = msgspec.structs.replace(pool, groups=(pool.groups[0], msgspec.structs.replace(pool.groups[1], **NEVER)))
    (takes,) = assign([pool], pool)
    spans = [(each.first, each.end) for each in plan(pool, pool, takes, 77, 79, 1 << 12).group_plans]
    assert spans == [(77, 79), (start_of(pool.groups[1], 79, Shard()), 79)]


def _rows_of(ring: int, tokens: range) -> dict[int, int]:
    """What a ring's rows hold, by the engine's own rule, once these tokens are computed one after another."""
    return {token % ring: token for token in tokens}


@pytest.mark.parametrize("made_of", [2, 3, 4, 8])
def test_a_ring_is_carried_by_position_to_a_ring_of_any_other_length(made_of: int) -> None:
    """For every prompt of up to several rings: what the row that is not whole is made of so far, and nothing else.

    The sender may have computed the prompt's last token too, or have begun at a prefix, which ends where rows do.
    """
    for ours, theirs in itertools.product([made_of * n for n in (1, 2, 4)], repeat=2):
        groups = [Group(kind="chunked", block_tokens=n, blocks=9, window=made_of, **NEVER) for n in (ours, theirs)]
        for end in range(1, 3 * max(ours, theirs) + 2):
            first = start_of(groups[1], end, Shard())
            assert range(first, end) == range(end // made_of * made_of, end)
            places = [
                BlockTable.of(group, Blocks(0, first // group.block_tokens, (5,))).places(first, end).tolist()
                for group in groups
                if first < end
            ]
            for place, ring in zip(places, (ours, theirs), strict=False):
                assert place == [5 * ring + token % ring for token in range(first, end)]
            for begin, more in itertools.product(range(0, first + 1, made_of), (0, 1)):
                held = _rows_of(ours, range(begin, end + more))
                assert [held.get(token % ours) for token in range(first, end)] == [*range(first, end)]


def test_a_state_is_in_the_entry_of_its_last_token() -> None:
    pool = describe(STATEFUL)
    for end in (1, 16, 17, 80):
        table = tables_of(pool, 80)
        assert block_table(pool, table, 0, end)[1].last(end).tolist() == rows_at(pool, 1, table, range(end))[1].tolist()
        assert start_of(pool.groups[1], end, pool.shard) // 16 == (end - 1) // 16
