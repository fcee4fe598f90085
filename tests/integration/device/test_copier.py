"""Moves between mapped memory and slots, one at a time; whole transfers are in test_carried.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kvbridge_kernels.segment import Span
from kvbridge_proto.pool import Codec, Step

from kvbridge.device import copier
from kvbridge.device.copier import CpuBlockCopier
from kvbridge.device.memory import AttachedPool, PartSide, Templates, runs
from kvbridge.errors import EngineError
from kvbridge.geometry.plan import Move, Part, any_tables, plan
from kvbridge.geometry.shard import assign
from testing.oracle import POISON, Held, Shape, block_table, build, fill, put_rows, table_of, tables_of
from tests.integration.device.attached import attached
from tests.integration.device.moving import Moves, gather, scatter

pytestmark = pytest.mark.proves("G2")

KINDS = ("xxh3", "sum64")


def moves_of(held: Held, tokens: range = range(16)) -> tuple[Move, ...]:
    takes = assign([held.pool], held.pool)
    planned = plan(held.pool, held.pool, takes[0], tokens.start, tokens.stop, 1 << 20)
    assert planned.chunks == 1
    tables = block_table(held.pool, table_of(held.pool, tokens.stop))
    return Part(planned, planned.chunk(0), tables, is_sender=True).moves()


def test_layers_of_one_buffer_move_in_one_call() -> None:
    held = build(Shape(layout="cross_layer", layers=7))
    odd = moves_of(held, range(3, 20))  # not on a border, so not folded by whole blocks
    plain = [replace(odd[0], plane=plane, slot_offset=4096 * i) for i, plane in enumerate(held.pool.planes)]
    assert sum(len(alike) for alike in runs(plain)) == 14
    assert len(list(runs(plain))) == 1
    assert len(list(runs([*plain[:3], *plain[4:]]))) == 2
    assert len(list(runs(plain[::-1]))) == 14  # backwards is no distance a batch can have


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


@pytest.mark.proves("T21")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_to_a_slot_that_was_found_right_reaches_no_block(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer with a key may write to our slots whenever it likes."""
    held = build(Shape())
    fill(held, table_of(held.pool, 16), range(16))
    moves, right = moves_of(held), getattr(copier, kind)
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

        monkeypatch.setattr(copier, kind, then_spoiled)
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


def test_a_pull_keeps_each_list_of_places_with_its_planes() -> None:
    """The sender's first and third plane are one segment, so they come before the second at both ends."""
    sent, held = build(Shape(layout="cross_layer", layers=3)), build(Shape(layers=3))
    tables = [np.array(places, np.int64) for places in ([0, 1, 2], [33, 34, 35], [50, 52, 54])]
    planes = [[plane for plane in each.pool.planes if plane.part == "k"] for each in (sent, held)]
    size = 2 * 3 * planes[0][0].codec.row_bytes
    ends = [
        [Move(planes[end][i], head, 2, planes[end][i].codec, i * size, tables[end * i]) for i, head in enumerate(heads)]
        for end, heads in enumerate(((0, 1, 0), (0, 0, 0)))
    ]
    with attached(sent) as (engine, sender), attached(held) as (_, pool):
        engine.memory[0][:] = np.random.default_rng(0).integers(0, 256, engine.memory[0].size)
        slots = [torch.zeros(3 * size, dtype=torch.uint8) for _ in range(2)]
        gather(sender, ends[0], slots[0])
        CpuBlockCopier().pull(sender, Moves(ends[0]), pool, Moves(ends[1]))
        gather(pool, ends[1], slots[1])
        assert torch.equal(*slots)


def test_a_plan_that_is_used_with_other_memory_moves_what_is_there() -> None:
    """An engine attached again may have an equal pool, and so the same plan, whose moves are prepared already."""
    held = build(Shape())
    copier, moves = CpuBlockCopier(), Moves(moves_of(held))
    slot = Span((room := torch.zeros(moves.size_bytes, dtype=torch.uint8)).data_ptr(), moves.size_bytes)

    def rows(pool: AttachedPool) -> bytes:
        copier.gather(pool, moves, slot, "xxh3")
        return room.numpy().tobytes()

    with attached(held) as (first, one), attached(held) as (second, other), attached(held) as (third, last):
        for number, region in enumerate((*first.memory, *second.memory, *third.memory)):
            region[:] = np.random.default_rng(number).integers(0, 256, region.size)
        found = [rows(pool) for pool in (one, other, last)]
        assert len(set(found)) == 3
        for sender, target, expected in ((one, other, 0), (last, other, 2), (last, one, 2)):
            copier.pull(sender, moves, target, moves)
            assert rows(target) == found[expected]
    assert all(moved.failure is None for moved in copier.poll())


def await_source(copier: CpuBlockCopier, sender: AttachedPool, theirs: Any, pool: AttachedPool, ours: Any) -> None:
    """As a GPU's copier does."""
    with sender.hold() as sent, pool.hold() as held:
        sides = PartSide(sender, sent, theirs), PartSide(pool, held, ours)
        copier._templates.await_source(*sides, ours.chunk.size_bytes)


@pytest.mark.parametrize("awaited", ["it", "it, for other blocks", "it, of other memory", "too many"])
def test_a_pull_that_was_prepared_reads_what_its_sender_names_then(awaited: str) -> None:
    """Until then any blocks stand for the sender's, and nothing moves. What was prepared for another is not used."""
    shapes = Shape(layout="hnd", block_tokens=32, kinds=("full", "state")), Shape(kinds=("full", "state"))
    sent, held = map(build, shapes)
    (takes,) = assign([sent.pool], held.pool)
    planned = plan(sent.pool, held.pool, takes, 0, 40, 1 << 20)
    theirs, ours = (block_table(pool, tables_of(pool, 40, seed=7)) for pool in (sent.pool, held.pool))
    others = block_table(held.pool, tables_of(held.pool, 40, seed=8))
    with attached(sent) as (engine, sender), attached(sent) as (_, stranger), attached(held) as (own, pool):
        for region in engine.memory:
            region[:] = np.random.default_rng(1).integers(0, 256, region.size)

        def pulled(copier: CpuBlockCopier) -> list[bytes]:
            for chunk in map(planned.chunk, range(planned.chunks)):
                copier.pull(sender, Part(planned, chunk, theirs, True), pool, Part(planned, chunk, ours, False))
            found = [region.tobytes() for region in own.memory]
            for region in own.memory:
                region[:] = POISON
            return found

        right = pulled(CpuBlockCopier())
        copier, stand_ins = CpuBlockCopier(), any_tables(planned, sent.pool)
        plans = [planned]
        if awaited == "too many":
            plans += [replace(planned) for _ in range(Templates.KEPT_AWAITED)]
        for each in plans:
            for chunk in map(each.chunk, range(each.chunks)):
                target = Part(each, chunk, others if awaited == "it, for other blocks" else ours, False)
                source = stranger if awaited == "it, of other memory" else sender
                await_source(copier, source, Part(each, chunk, stand_ins, True), pool, target)
        assert all((region == POISON).all() for region in own.memory)
        assert planned.chunks == 2 and pulled(copier) == right


def test_nothing_is_kept_of_memory_that_is_forgotten() -> None:
    held = build(Shape())
    copier, moves = CpuBlockCopier(), Moves(moves_of(held))
    room = torch.zeros(moves.size_bytes, dtype=torch.uint8)
    with attached(held) as (_, one), attached(held) as (_, other):
        copier.gather(one, moves, Span(room.data_ptr(), room.numel()), "xxh3")
        copier.pull(other, moves, one, moves)
        await_source(copier, other, moves, one, moves)
        with one.hold() as regions:
            kept = weakref.ref(regions[0])
        del regions
        copier.forget(one)
        one.close()
        gc.collect()
        is_kept = kept() is not None  # pytest would print what is kept, which is unmapped
        assert not is_kept


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
