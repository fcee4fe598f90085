"""A decoding engine with a draft model that the prefilling engine lacks: real agents fill its rows with zeros."""

from __future__ import annotations

import numpy as np
import pytest

from testing.oracle import Shape, fill, put_rows, rows_at, take_rows
from testing.pairs import Bench, Benches
from testing.pools import Held

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
