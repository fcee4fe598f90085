"""Real agents carry requests between unequal pools: every row is as the oracle says, and nothing else is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Withdraw
from kvbridge_proto.pool import GroupKind

from kvbridge.loopback.messages import number_of
from testing.agents import ANSWER_S, is_at_rest
from testing.oracle import More, Shape, fill, mismatch, mla, put_rows, rows_at, take_rows
from testing.pairs import Bench, Benches
from testing.pools import Held
from testing.proc import Stopwatch
from testing.waiting import wait_for

# Of sparse attention: every rank has them whole, and one layer has none. Pages of 64, as the kernels want them.
INDEX = More("index_key", width=128, codec="fp8_row_scale", page_tokens=64, layers=(0, 2))
ROWS = More("index_key", width=128, layers=(1, 2))  # MiniMax M3's: plain rows beside K and V
PAIRS = {
    "nhd 16 tp2 -> hnd 64 tp1": (Shape("nhd", tp_size=2), Shape("hnd", block_tokens=64, blocks=8)),
    "cross-layer 64 tp1 -> packed 16 tp2": (
        Shape("cross_layer", block_tokens=64, blocks=8),
        Shape("packed", tp_size=2),
    ),
    "column-major 32 -> column-major 128": (
        Shape("cpu_vec", block_tokens=32, key_width=32, value_width=32, blocks=16),
        Shape("cpu_vec", block_tokens=128, key_width=32, value_width=32, blocks=6),
    ),
    "equal (folded)": (Shape("cpu_vec", block_tokens=32), Shape("cpu_vec", block_tokens=32)),
    "pp2 -> tp2": (Shape("nhd", pp_size=2), Shape("hnd", tp_size=2)),
    "index keys 64 tp1 -> 128 tp2": (
        mla(layers=3, block_tokens=64, blocks=6, more=(INDEX,)),
        mla(layers=3, block_tokens=128, blocks=6, tp_size=2, more=(INDEX,)),
    ),
    "plain index keys 64 tp1 -> hnd 128 tp2": (
        Shape("nhd", layers=3, block_tokens=64, blocks=6, more=(ROWS,)),
        Shape("packed_hnd", layers=3, block_tokens=128, blocks=6, tp_size=2, more=(ROWS,)),
    ),
}


SLOTS, PAGES = PAIRS["plain index keys 64 tp1 -> hnd 128 tp2"]
ROUTES = ("nixl", "pull")


@pytest.mark.proves("G1", "G3")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", PAIRS)
def test_carries_every_row_and_writes_nothing_else(name: str, route: str, bench_of: Benches) -> None:
    bench = bench_of(*PAIRS[name], routes=f"{route},host")
    bench.carries("r", *_tables(bench, 90), range(90))
    bench.went_by(route)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_carries_what_lies_behind_a_prefix_that_the_receiver_has(ranks: tuple[int, int], bench_of: Benches) -> None:
    """48 tokens, three blocks of 16: the receiver's second block of 32 has some of them, and keeps them."""
    shapes = (Shape("nhd", tp_size=ranks[0]), Shape("hnd", block_tokens=32, blocks=16, tp_size=ranks[1]))
    bench = bench_of(*shapes)
    sender_table, receiver_table = _tables(bench, 90)
    bench.fill(sender_table, range(48, 90))
    behind = {"first": 3, "first_token": 48}
    bench.offer("r", sender_table[3:], 90, **behind)
    bench.want("r", receiver_table, range(48, 90))
    bench.done("r")
    bench.check(receiver_table, range(48, 90))
    bench.offer("before", sender_table[3:], 90, **behind)
    bench.want("before", receiver_table, range(47, 90))
    for engine in bench.receivers:
        assert engine.failed("before", "tokens_missing") == "first_token: wanted 47, offered from 48"
    for engine in bench.senders:
        assert engine.released("before").code == "tokens_missing"
    bench.offer("all of it", [], 90, first_token=90)
    bench.want("all of it", receiver_table, range(90, 90), blocks=())
    bench.done("all of it")
    bench.check(receiver_table, range(48, 90))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_index_keys_behind_a_prefix_leave_the_receivers_own_as_they_are(
    ranks: tuple[int, int], bench_of: Benches
) -> None:
    """Every rank's, and in a block that has some of both: 80 tokens of a page of 64 and one of 128."""
    ours, theirs = (replace(shape, tp_size=tp) for shape, tp in zip((SLOTS, PAGES), ranks, strict=True))
    bench = bench_of(ours, theirs)
    sender_table, receiver_table = _tables(bench, 200)
    bench.fill(sender_table, range(200))
    bench.offer("r", sender_table, 200)
    bench.want("r", receiver_table, range(80, 200))
    bench.done("r")
    bench.check(receiver_table, range(80, 200))


END, WINDOW = 100, 32  # the token after END sees those from 69 on


@pytest.mark.parametrize(("kind", "block_tokens"), [("sliding", 8), ("sliding", 32), ("chunked", 32)])
def test_of_a_layer_with_a_window_its_last_blocks_are_carried(
    kind: GroupKind, block_tokens: int, bench_of: Benches
) -> None:
    """A window may begin inside a larger block of the receiver, which nobody else gets: the rest of it stays."""
    sender = Shape("nhd", kinds=("full", kind), window=WINDOW)
    larger = {"begins_inside": kind == "sliding" and block_tokens > sender.block_tokens}
    receiver = replace(sender, layout="hnd", block_tokens=block_tokens, blocks=24, **larger)
    bench = bench_of(sender, receiver)
    given, wanted = list(range(1, 8)), list(range(2, 2 + -(-END // block_tokens)))
    bench.fill(given, range(END))
    bench.offer("r", given, END, blocks=_blocks(sender, given))
    bench.want("r", wanted, range(END), blocks=_blocks(receiver, wanted))
    bench.done("r")
    bench.check(wanted, range(END))


def _blocks(shape: Shape, table: list[int]) -> tuple[Blocks, Blocks]:
    first = (END + 1 - WINDOW) // shape.block_tokens
    return Blocks(0, 0, tuple(table)), Blocks(1, first, tuple(table[first:]))


def _tables(bench: Bench, tokens: int) -> tuple[list[int], list[int]]:
    """Block tables in no order, of which no block is the first of its pool."""
    tables = []
    for shape in (bench.sender_shape, bench.receiver_shape):
        needed = -(-tokens // shape.block_tokens)
        tables.append([shape.blocks - 1 - i for i in range(needed)])
    return tables[0], tables[1]


@pytest.fixture(params=ROUTES)
def bench(request: pytest.FixtureRequest, bench_of: Benches) -> Iterator[Bench]:
    wide = {"key_width": 64, "value_width": 64}
    sender, receiver = Shape("nhd", blocks=200, **wide), Shape("hnd", block_tokens=64, blocks=60, **wide)
    bench = bench_of(sender, receiver, routes=f"{request.param},host")
    yield bench
    bench.went_by(request.param)


def test_want_before_offer_and_chunks_while_the_prompt_is_computed(bench: Bench) -> None:
    table, wanted = list(range(100, 164)), list(range(5, 21))
    bench.want("r", wanted, range(1000))
    time.sleep(0.2)
    bench.fill(table, range(1000))
    bench.offer("r", table[:32], 500, is_last=False)
    wait_for(lambda: "role=receiver" in str(bench.receiver.agent.status.counters))  # it is not computed yet
    bench.offer("r", table[32:], 1000, first=32, is_more=True)
    bench.done("r")
    bench.check(wanted, range(1000))


def test_many_requests_at_once(bench: Bench) -> None:
    for i in range(32):
        tokens = range(1 + 3 * i)
        table, wanted = list(range(6 * i, 6 * i + 6)), [2 * i % 60, (2 * i + 1) % 60]
        bench.fill(table, tokens)
        if i % 2:
            bench.want(f"r{i}", wanted[: -(-len(tokens) // 64)], tokens)
        bench.offer(f"r{i}", table, len(tokens))
        if not i % 2:
            bench.want(f"r{i}", wanted[: -(-len(tokens) // 64)], tokens)
    for i in range(32):
        bench.done(f"r{i}")
    assert is_at_rest(bench.receiver.agent.status)


def test_a_request_that_ends_as_it_should_is_no_line_at_info(bench: Bench) -> None:
    bench.offer("back", [7], 16)
    bench.sender.client.send(Withdraw(number=number_of("back")))
    bench.sender.released("back")
    bench.carries("one", [7], [9], range(16))
    for engine in bench.engines:
        assert "attached: " in engine.agent.text() and "request=" not in engine.agent.text()


def test_drains_what_flows_and_then_stops(bench_of: Benches) -> None:
    bench = bench_of(drain_s=600)
    bench.want("r", [3], range(16))
    receiver = bench.receiver.agent
    wait_for(lambda: bench.sender.agent.status.transfers)
    receiver.process.terminate()
    wait_for(lambda: receiver.status.state == "draining")
    bench.receiver.want("late", bench.address, [4], range(16))
    bench.receiver.failed("late", "draining")
    bench.fill([5], range(16))
    bench.offer("r", [5], 16)
    bench.done("r")
    bench.check([3], range(16))
    assert receiver.process.wait(ANSWER_S) == 0


def test_a_sender_that_drains_gives_what_is_claimed_and_refuses_the_rest_at_once(bench_of: Benches) -> None:
    bench = bench_of(drain_s=600)
    sender, receiver = bench.sender, bench.receiver
    bench.offer("one", [0], 16)
    bench.want("one", [1], range(16))
    bench.done("one")
    bench.offer("two", [4], 16)
    bench.want("claimed", [3], range(16))
    wait_for(lambda: sender.agent.status.transfers)
    sender.agent.process.terminate()
    wait_for(lambda: sender.agent.status.state == "draining")
    bench.offer("late", [6], 16)
    assert sender.released("late").code == "draining"
    bench.want("late", [5], range(16))
    receiver.failed("late", "draining")
    bench.want("two", [7], range(16))
    bench.done("two")
    bench.fill([5], range(16))
    bench.offer("claimed", [5], 16)
    bench.done("claimed")
    bench.check([3], range(16))
    assert sender.agent.process.wait(ANSWER_S) == 0


def test_a_drain_ends_by_its_deadline(bench_of: Benches) -> None:
    bench = bench_of(drain_s=1)
    sender, receiver = bench.sender, bench.receiver
    bench.want("r", [3], range(16))
    wait_for(lambda: sender.agent.status.transfers)
    watch, began = Stopwatch(), time.monotonic()
    sender.agent.process.terminate()
    receiver.failed("r", "engine_left")
    assert time.monotonic() - began > 0.9 and watch.seconds() < 3
    assert sender.agent.process.wait(ANSWER_S) == 0


def test_a_rank_without_a_token_of_the_prompt_names_no_block(bench_of: Benches) -> None:
    """Neither side: under context parallelism the tokens may all lie on the first ranks."""
    sender, receiver = Shape("nhd", cp_size=2, cp_interleave=4), Shape("hnd", cp_size=2, cp_interleave=8)
    bench = bench_of(sender, receiver)
    bench.fill([2], range(4))
    for rank, engine in enumerate(bench.senders):
        engine.offer("r", [] if rank else [2], 4)
    for rank, engine in enumerate(bench.receivers):
        engine.want("r", bench.address, [3], range(4), **({"blocks": ()} if rank else {}))
    bench.done("r")
    bench.check([3], range(4))


@pytest.mark.parametrize("route", ROUTES)
def test_a_rank_without_a_token_of_the_prompt_gives_its_heads_of_a_state(route: str, bench_of: Benches) -> None:
    """Under context parallelism every rank has its heads of a state whole."""
    shape = Shape("nhd", kv_heads=1, kinds=("full", "state"), cp_size=4, cp_interleave=4)
    bench = bench_of(shape, replace(shape, layout="hnd", cp_size=2), routes=f"{route},host")
    given, wanted, tokens = {0: [2], 1: [5]}, {0: [3], 1: [7]}, range(6)
    for rank, engine in enumerate(bench.senders):
        fill(engine.held, given, tokens)
        rows = () if rank > 1 else (Blocks(0, 0, (2,)),)
        engine.offer("r", [], 6, blocks=(*rows, Blocks(1, 0, (5,))))
    bench.want("r", [], tokens, blocks=(Blocks(0, 0, (3,)), Blocks(1, 0, (7,))))
    bench.done("r")
    for engine, before in zip(bench.receivers, bench.before, strict=True):
        assert not (wrong := mismatch(engine.held, before, wanted, tokens)), wrong


def test_two_hundred_regions_are_mapped_each_in_its_place(bench_of: Benches) -> None:
    """A hundred layers with K and V apart; more descriptors than ride with one frame."""
    bench = bench_of(Shape(layers=100, blocks=4), Shape(layers=100, layout="hnd", blocks=4))
    assert len(bench.sender.pool.regions) == len(bench.receiver.pool.regions) == 200
    bench.carries("r", [2, 0], [3, 1], range(24))


# Rows of a draft model that the prefill side lacks:


NAN = 0xFF  # every bf16, fp16, fp32 and fp8 e4m3 number of such bytes is NaN
FORMS = {
    "nhd": (Shape("nhd"), Shape("nhd", layers=3, drafts=1)),
    "cross-layer, two layers, tp 2": (Shape("hnd"), Shape("cross_layer", layers=4, drafts=2, tp_size=2)),
    "cpu": (Shape("nhd", layers=1), Shape("cpu_vec", layers=2, drafts=1, block_tokens=32, key_width=8, value_width=8)),
    "row scales": (
        Shape("nhd", codec="fp8_row_scale"),
        Shape("hnd", layers=3, drafts=1, codec="fp8_row_scale", block_tokens=8, blocks=24),
    ),
}


def with_nan(bench: Bench) -> list[Held]:
    """All of the receivers' memory is NaN from now on. Returns copies."""
    for engine in bench.receivers:
        for region in engine.held.memory:
            region[:] = NAN
    return [engine.held.copy() for engine in bench.receivers]


def filled(before: Held, table: list[int], tokens: range, layers: int) -> Held:
    """What must be there: rows of the first layers as the oracle has them, zeros in the others, NaN in all else."""
    expected = before.copy()
    fill(expected, table, tokens)
    for plane in expected.pool.planes:
        if plane.layer >= layers:
            _, places = rows_at(expected.pool, plane.group, table, tokens)
            put_rows(expected, plane, places, np.zeros((len(places), plane.heads, plane.codec.row_bytes), np.uint8))
    return expected


@pytest.mark.parametrize("route", ["nixl", "pull"])
@pytest.mark.parametrize("name", FORMS)
def test_rows_of_the_prompt_are_zeros_and_nothing_else_is_written(name: str, route: str, bench_of: Benches) -> None:
    sender, receiver = FORMS[name]
    bench = bench_of(sender, receiver, routes=f"{route},host")
    given = list(range(sender.blocks))[: -(-96 // sender.block_tokens)]
    wanted = list(reversed(range(receiver.blocks)))[: -(-96 // receiver.block_tokens)]
    before, tokens = with_nan(bench), range(32, 96)  # whole blocks on both sides: no row after them may be written
    bench.fill(given, range(96))
    bench.offer("r", given, 96)
    bench.want("r", wanted, tokens)
    answers = [engine.answer("r") for engine in bench.receivers]
    assert [answer.unfilled_layers for answer in answers] == [receiver.drafts] * len(answers)
    bench.went_by(route)
    for engine, was in zip(bench.receivers, before, strict=True):
        expected = filled(was, wanted, tokens, sender.layers)
        for ours, theirs in zip(engine.held.memory, expected.memory, strict=True):
            assert np.array_equal(ours, theirs), f"byte {np.flatnonzero(ours != theirs)[0]}"


def test_a_failed_request_leaves_other_pages_alone_and_the_next_one_is_filled(bench_of: Benches) -> None:
    bench = bench_of(Shape("nhd"), Shape("hnd", layers=3, drafts=1))
    (before,) = with_nan(bench)
    bench.receiver.want("late", bench.address, [1, 2], range(32), deadline_s=0.3)
    assert bench.receiver.failed("late", "deadline")
    bench.fill([3, 4], range(32))
    bench.offer("r", [3, 4], 32)
    bench.want("r", [5, 6], range(32))
    bench.done("r")
    held = bench.receiver.held
    for plane in (plane for plane in held.pool.planes if plane.layer == 2):
        _, places = rows_at(held.pool, plane.group, [5, 6], range(32))
        assert not take_rows(held, plane, places).any()
        others = np.setdiff1d(np.arange(12 * 16), np.concatenate([places, np.arange(16, 48)]))
        assert np.array_equal(take_rows(held, plane, others), take_rows(before, plane, others))
