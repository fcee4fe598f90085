"""Whole transfers through mapped memory and slots, against the oracle and the slow codecs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kvbridge_kernels.digest_ref import digest as xxh3
from kvbridge_proto.pool import Codec, CodecName, Plane, Step

from kvbridge.device import porter_cpu
from kvbridge.device.batch import batches
from kvbridge.device.memory import AttachedPool
from kvbridge.device.pulls import Pulls
from kvbridge.errors import EngineError
from kvbridge.geometry.plan import Move, Plan, plan
from kvbridge.geometry.shard import assign
from tests.integration.device.attached import attached
from tests.integration.device.moving import gather, pull, scatter
from tests.support.oracle import (
    LAYOUTS,
    POISON,
    Held,
    Shape,
    block_table,
    build,
    build_all,
    fill,
    mismatch,
    places_of,
    put_rows,
    table_of,
    take_rows,
)
from tests.unit.kernels import slow_codecs as slow

TOKENS = 75  # ends inside a block of any size here
KINDS = ("xxh3", "sum64")


def carry(
    planned: Plan, source: AttachedPool, source_table: Sequence[int], sink: AttachedPool, sink_table: Sequence[int]
) -> None:
    """Every chunk through one poisoned slot, and pulled: both leave the same bytes in the sink's memory."""
    ours, theirs = block_table(source.pool, source_table), block_table(sink.pool, sink_table)
    pulls = Pulls()
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        slot = torch.full((chunk.size_bytes,), POISON, dtype=torch.uint8)
        kind = KINDS[index % 2]
        found = gather(source, planned.source_moves(chunk, ours), slot, kind)
        assert kind == "sum64" or found == xxh3(slot)
        before = copied(sink)
        assert scatter(sink, planned.sink_moves(chunk, theirs), slot, found, kind).failure is None
        wanted = copied(sink, before)
        summed = pull(pulls, chunk, planned, source, ours, sink, theirs)
        assert kind == "xxh3" or summed == found
        assert all(torch.equal(*pair) for pair in zip(copied(sink), wanted, strict=True))


def copied(pool: AttachedPool, put_back: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """All of the pool's memory, in which something else is put then."""
    with pool.hold() as regions:
        found = [memory.clone() for memory in regions.memories]
        for memory, content in zip(regions.memories, put_back or found, strict=True):
            memory.copy_(content)
    return found


def transfer(sources: Sequence[Held], sink: Held, tokens: range, slot_bytes: int = 1 << 15) -> str:
    """What is wrong in the sink's memory after a transfer; empty if nothing is."""
    ours, theirs = table_of(sources[0].pool, tokens.stop, seed=1), table_of(sink.pool, tokens.stop, seed=2)
    takes = assign([source.pool for source in sources], sink.pool)
    for source in sources:
        fill(source, ours, range(tokens.stop))
    before = sink.copy()
    with ExitStack() as stack:
        engine, pool = stack.enter_context(attached(sink))
        for source, taken in zip(sources, takes, strict=True):
            planned = plan(source.pool, sink.pool, taken, tokens.start, tokens.stop, slot_bytes)
            _, source_pool = stack.enter_context(attached(source))
            carry(planned, source_pool, ours, pool, theirs)
        tail = range(tokens.stop, len(theirs) * sink.pool.groups[0].block_tokens)
        return mismatch(engine, before, theirs, tokens, tail)


@pytest.mark.parametrize("tokens", [range(TOKENS), range(37, TOKENS), range(32, 64), range(5, 6)])
@pytest.mark.parametrize("sink", LAYOUTS)
@pytest.mark.parametrize("source", ["nhd", "cpu_vec", "cpu_amx", "packed_hnd"])
def test_any_layout_becomes_any_other(source: str, sink: str, tokens: range) -> None:
    ours = Shape(layout=source, key_width=16, value_width=32, block_tokens=16, blocks=8)
    theirs = replace(ours, layout=sink, block_tokens=32, blocks=6)
    assert transfer([build(ours)], build(theirs), tokens) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_on_both_sides(layout: str) -> None:
    shape = Shape(layout=layout, key_width=16, value_width=16)
    assert transfer([build(shape)], build(shape), range(TOKENS)) == ""


@pytest.mark.parametrize(("ours", "theirs"), [(2, 1), (1, 2), (4, 2), (3, 1), (8, 1)])
def test_other_ranks(ours: int, theirs: int) -> None:
    shape = Shape(layout="cpu_vec", kv_heads=6, key_width=16, value_width=16, tp_size=ours)
    for rank in range(theirs):
        assert transfer(build_all(shape), build(replace(shape, tp_size=theirs), rank), range(TOKENS)) == ""


@pytest.mark.parametrize("slot_bytes", [64, 256, 1000, 1 << 20])
def test_slots_of_any_size(slot_bytes: int) -> None:
    shape = Shape(layout="cpu_vec", key_width=24, value_width=12, codec="fp8_e4m3", blocks=8)
    assert transfer([build(shape)], build(replace(shape, block_tokens=24)), range(3, 60), slot_bytes) == ""


def numbers_of(stored: np.ndarray, codec: Codec) -> np.ndarray:
    """Bytes [place, head, row] as patterns [place, head, width]."""
    types = {1: np.uint8, 2: np.uint16, 4: np.float32}
    patterns = stored.view(types[codec.element_bytes])
    return patterns if codec.element_bytes == 4 else patterns.astype(np.int64)


def converted(stored: np.ndarray, old: Codec, new: Codec) -> np.ndarray:
    scales = [np.asarray(codec.scales or (1.0,), np.float32)[None, :, None] for codec in (old, new)]
    values = slow.decode(numbers_of(stored, old), old.name, scales[0] if old.scales else None)
    return slow.encode(values, new.name, scales[1] if new.scales else None)


SCALES = {"k": (0.5, 1.0, 0.3, 7.0), "v": (1.0, 0.25, 2.5, 0.04)}
OTHER = {"k": (0.11,), "v": (0.02,)}
CASES: list[tuple[CodecName, dict[str, tuple[float, ...]], CodecName, dict[str, tuple[float, ...]]]] = [
    ("bf16", {}, "fp8_e4m3", {}),
    ("bf16", {}, "fp8_e4m3", SCALES),
    ("fp8_e4m3", SCALES, "bf16", {}),
    ("fp8_e4m3", SCALES, "fp8_e4m3", OTHER),
    ("fp8_e4m3", SCALES, "fp8_e5m2", OTHER),
    ("fp16", {}, "bf16", {}),
    ("bf16", {}, "fp16", {}),
    ("fp32", {}, "fp8_e5m2", OTHER),
    ("int8", SCALES, "fp32", {}),
    ("bf16", {}, "int8", OTHER),
]


@pytest.mark.parametrize("layout", ["nhd", "cpu_vec"])
@pytest.mark.parametrize(("old", "old_scales", "new", "new_scales"), CASES)
def test_numbers_become_the_nearest_the_sink_can_hold(
    old: CodecName,
    old_scales: dict[str, tuple[float, ...]],
    new: CodecName,
    new_scales: dict[str, tuple[float, ...]],
    layout: str,
) -> None:
    """Every pattern an engine can hold, NaN and infinities too; half of the heads come from each of two ranks."""
    shape = Shape(layout=layout, layers=3, codec=old, scales=old_scales, tp_size=2, key_width=16, value_width=32)
    sources = build_all(shape)
    sink = build(replace(shape, codec=new, scales=new_scales, tp_size=1, block_tokens=32, blocks=4))
    rng = np.random.default_rng(3)
    ours, theirs = table_of(sources[0].pool, TOKENS, seed=1), table_of(sink.pool, TOKENS, seed=2)
    with ExitStack() as stack:
        engine, pool = stack.enter_context(attached(sink))
        for source, taken in zip(sources, assign([s.pool for s in sources], sink.pool), strict=True):
            for region in source.memory:
                region[:] = rng.integers(0, 256, region.size)
            planned = plan(source.pool, sink.pool, taken, 0, TOKENS, 1 << 15)
            _, source_pool = stack.enter_context(attached(source))
            carry(planned, source_pool, ours, pool, theirs)
            for plane in source.pool.planes:
                expect_converted(source, plane, ours, engine, theirs)


def expect_converted(source: Held, plane: Plane, ours: Sequence[int], engine: Held, theirs: Sequence[int]) -> None:
    (wanted,) = [p for p in engine.pool.planes if (p.layer, p.part) == (plane.layer, plane.part)]
    heads = slice(plane.first_head, plane.first_head + plane.heads)
    stored = take_rows(source, plane, places_of(ours, range(TOKENS), source.pool.groups[0].block_tokens))
    found = take_rows(engine, wanted, places_of(theirs, range(TOKENS), 32), heads)
    scales = wanted.codec.scales if len(wanted.codec.scales) <= 1 else wanted.codec.scales[heads]
    codec = msgspec.structs.replace(wanted.codec, scales=scales)
    expected = converted(stored, plane.codec, codec)
    agree = slow.same(numbers_of(np.ascontiguousarray(found), codec), expected, codec.name)
    assert agree.all(), f"layer {plane.layer} {plane.part}: {np.argwhere(~agree)[:3].tolist()}"


def moves_of(held: Held, tokens: range = range(16)) -> tuple[Move, ...]:
    takes = assign([held.pool], held.pool)
    planned = plan(held.pool, held.pool, takes[0], tokens.start, tokens.stop, 1 << 20)
    assert planned.chunks == 1
    tables = block_table(held.pool, table_of(held.pool, tokens.stop))
    return planned.source_moves(planned.chunk(0), tables)


def test_layers_of_one_buffer_move_in_one_call() -> None:
    held = build(Shape(layout="cross_layer", layers=7))
    odd = moves_of(held, range(3, 20))  # not on a border, so not folded by whole blocks
    plain = [replace(odd[0], plane=plane, slot_offset=4096 * i) for i, plane in enumerate(held.pool.planes)]
    assert sum(len(batch.moves) for batch in batches(plain)) == 14
    assert len(list(batches(plain))) == 1
    assert len(list(batches([*plain[:3], *plain[4:]]))) == 2
    assert len(list(batches(plain[::-1]))) == 14  # backwards is no distance a batch can have


def test_gaps_between_moves_become_zeros() -> None:
    held = build(Shape())
    first, *_ = moves_of(held)
    moves = [replace(first, slot_offset=48), replace(first, slot_offset=48 + first.size_bytes + 16)]
    slot = torch.full((moves[1].slot_offset + first.size_bytes + 8,), POISON, dtype=torch.uint8)
    with attached(held) as (engine, pool):
        for region in engine.memory:
            region[:] = 1
        gather(pool, moves, slot)
    ones = slot.numpy() == 1
    assert (slot.numpy()[~ones] == 0).all()
    assert ones.sum() == 2 * first.size_bytes
    assert not ones[:48].any() and not ones[-8:].any()


def test_no_moves_and_no_places_are_fine() -> None:
    held = build(Shape())
    with attached(held) as (_, pool):
        gather(pool, [], torch.zeros(0, dtype=torch.uint8))
        empty = replace(moves_of(held)[0], places=np.zeros(0, np.int64))
        slot = torch.full((16,), POISON, dtype=torch.uint8)
        gather(pool, [empty], slot)
        assert slot.max() == 0
        scatter(pool, [empty], slot)


def test_a_slot_need_not_begin_its_allocation() -> None:
    held = build(Shape(layout="cpu_vec"))
    fill(held, table_of(held.pool, 16), range(16))
    moves = moves_of(held)
    size = max(move.slot_offset + move.size_bytes for move in moves)
    with attached(held) as (_, pool):
        slots = [torch.zeros(size + 64, dtype=torch.uint8)[shift : shift + size] for shift in (0, 16, 1, 7)]
        digests = {gather(pool, moves, slot) for slot in slots}
        assert len(digests) == 1


def gathered(pool: AttachedPool, moves: Sequence[Move], kind: str) -> tuple[torch.Tensor, int]:
    """A slot as it arrives, and what its digest is said to be."""
    slot = torch.zeros(max(move.slot_offset + move.size_bytes for move in moves), dtype=torch.uint8)
    return slot, gather(pool, moves, slot, kind)


def wipe(engine: Held) -> list[bytes]:
    for region in engine.memory:
        region[:] = POISON
    return contents(engine)


def contents(engine: Held) -> list[bytes]:
    return [region.tobytes() for region in engine.memory]


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_bit_in_a_slot_fails_the_move_and_writes_nothing(kind: str) -> None:
    held = build(Shape())
    fill(held, table_of(held.pool, 16), range(16))
    moves = moves_of(held)
    with attached(held) as (engine, pool):
        slot, digest = gathered(pool, moves, kind)
        wiped = wipe(engine)
        slot[slot.numel() // 2] ^= 1
        failure = scatter(pool, moves, slot, digest, kind).failure
        assert failure is not None and failure[0] == "digest_mismatch" and f"{digest:016x}" in failure[1]
        assert contents(engine) == wiped
        slot[slot.numel() // 2] ^= 1
        assert scatter(pool, moves, slot, digest, kind).failure is None
        assert contents(engine) != wiped


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_to_a_slot_that_was_found_right_reaches_no_block(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer with a key may write to our slots whenever it likes."""
    held = build(Shape())
    fill(held, table_of(held.pool, 16), range(16))
    moves, right = moves_of(held), getattr(porter_cpu, kind)
    with attached(held) as (engine, pool):
        slot, digest = gathered(pool, moves, kind)
        wipe(engine)
        scatter(pool, moves, slot, digest, kind)
        expected = contents(engine)
        wipe(engine)

        def then_spoiled(*args: Any) -> int:
            found: int = right(*args)
            slot.fill_(POISON)
            return found

        monkeypatch.setattr(porter_cpu, kind, then_spoiled)
        assert scatter(pool, moves, slot, digest, kind).failure is None
        assert contents(engine) == expected and (slot == POISON).all()


def wrong_moves(good: Move) -> dict[str, Move]:
    plane, codec = good.plane, good.plane.codec
    farther = msgspec.structs.replace
    return {
        "place_outside_plane": replace(good, places=np.array([1 << 40], np.int64)),
        "plane_outside_region": replace(good, plane=farther(plane, offset=plane.offset + 1 + (1 << 50))),
        "move_outside_slot": replace(good, slot_offset=1 << 20),
        "heads_outside_plane": replace(good, first_head=plane.heads),
        "codec_not_convertible": replace(
            good, wire=Codec(name="int8_row_scale", width=codec.width, element_bytes=1, row_bytes=codec.row_bytes)
        ),
        "bad_plane": replace(good, plane=farther(plane, region=77)),
    }


@pytest.mark.parametrize("code", wrong_moves(moves_of(build(Shape()))[0]))
def test_refuses_a_wrong_move_before_a_byte_is_written(code: str) -> None:
    held = build(Shape())
    good = moves_of(held)
    slot = torch.full((1 << 16,), POISON, dtype=torch.uint8)
    with attached(held) as (engine, pool):
        before = engine.copy()
        slot[0] = POISON
        for move in (gather, scatter):
            with pytest.raises(EngineError) as caught:
                move(pool, [*good, wrong_moves(good[0])[code]], slot)
            assert caught.value.code == code
            assert (slot == POISON).all()
        for region, was in zip(engine.memory, before.memory, strict=True):
            assert np.array_equal(region, was)


def test_negative_places_are_refused() -> None:
    held = build(Shape())
    with attached(held) as (_, pool), pytest.raises(EngineError, match="places: from -1 to 3"):
        move = replace(moves_of(held)[0], places=np.array([3, -1], np.int64))
        gather(pool, [move], torch.zeros(1 << 16, dtype=torch.uint8))


def test_a_folded_place_counts_whole_blocks() -> None:
    """What folding makes: one dense row per block, codec opaque."""
    held = build(Shape(layout="nhd", layers=1))
    plane = held.pool.planes[0]
    row = plane.block_stride
    folded = msgspec.structs.replace(
        plane,
        token_axis=(Step(1, 0),),
        element_axis=(Step(row, 1),),
        heads=1,
        head_stride=0,
        codec=Codec(name="opaque", width=row, element_bytes=1, row_bytes=row),
    )
    move = Move(folded, 0, 1, folded.codec, 0, np.array([7, 2], np.int64))
    slot = torch.zeros(2 * row, dtype=torch.uint8)
    with attached(held) as (engine, pool):
        engine.memory[0][:] = np.random.default_rng(0).integers(0, 256, engine.memory[0].size)
        gather(pool, [move], slot)
        assert slot.numpy().tobytes() == b"".join(engine.memory[0][b * row : (b + 1) * row].tobytes() for b in (7, 2))
        with pytest.raises(EngineError, match="a plane of group 0 has 12"):
            gather(pool, [replace(move, places=np.array([12, 0], np.int64))], slot)


def test_rows_put_by_the_oracle_are_what_is_gathered() -> None:
    """The slot's order is [head][place][row]."""
    held = build(Shape(layout="cpu_vec", layers=1))
    plane = held.pool.planes[0]
    places = np.array([5, 6, 7, 40], np.int64)
    rows = np.arange(4 * 4 * plane.codec.row_bytes, dtype=np.uint8).reshape(4, 4, -1)  # [place, head, row]
    put_rows(held, plane, places, rows)
    move = Move(plane, 1, 2, plane.codec, 0, places)
    slot = torch.zeros(move.size_bytes, dtype=torch.uint8)
    with attached(held) as (_, pool):
        gather(pool, [move], slot)
    assert np.array_equal(slot.numpy(), rows[:, 1:3].transpose(1, 0, 2).reshape(-1))
