"""Layers with a window between real agents. Bad inputs are refused by name, at start or for that request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Refused
from kvbridge_proto.pool import Pool

from testing.agents import OracleEngine, agent
from testing.oracle import Shape, build, mismatch
from testing.pairs import Bench, Benches

END, WINDOW = 100, 32  # the token after END sees those from 69 on, so windows are kept from 64 on in blocks of 16
SENDER = Shape("nhd", kinds=("full", "sliding"), window=WINDOW)
RECEIVER = replace(SENDER, layout="hnd", block_tokens=8, blocks=24)
GIVEN, WANTED = list(range(1, 8)), list(range(2, 15))


def asked(bench: Bench, request: str, offered: tuple[Blocks, ...], wanted: tuple[Blocks, ...]) -> None:
    bench.offer(request, GIVEN, END, blocks=offered)
    bench.want(request, WANTED, range(END), blocks=wanted)


def windows(shape: Shape, table: list[int]) -> tuple[Blocks, Blocks]:
    first = (END + 1 - shape.window) // shape.block_tokens
    return Blocks(0, 0, tuple(table)), Blocks(1, first, tuple(table[first:]))


OFFERED, NEEDED = windows(SENDER, GIVEN), windows(RECEIVER, WANTED)


def carries(bench: Bench, needed: tuple[Blocks, ...] = NEEDED, table: list[int] = WANTED) -> None:
    """All rows of the full layer come, and those of the other that must be there; nothing else is written."""
    before, end = bench.receiver.held.copy(), len(table) * bench.receiver_shape.block_tokens
    bench.fill(GIVEN, range(END))
    asked(bench, "good", OFFERED, needed)
    bench.done("good")
    assert not (wrong := mismatch(bench.receiver.held, before, table, range(END), range(END, end))), wrong


def test_requests_without_their_windows_blocks_fail_by_name_and_the_next_one_is_carried(bench_of: Benches) -> None:
    bench = bench_of(SENDER, RECEIVER)
    for name, offered, code, reason in (
        ("no window", OFFERED[:1], "missing_group", "group: 1 has no block table"),
        ("a third group", (*OFFERED, Blocks(2, 0, (1,))), "unknown_group", "group: got 2, the pool has 2"),
        ("a late window", (OFFERED[0], Blocks(1, 5, (6, 7))), "blocks_too_few", "the blocks hold [80, 112)"),
    ):
        bench.offer(name, GIVEN, END, blocks=offered)
        released = bench.sender.released(name)
        assert released.code == code and reason in released.reason, released
    for name, wanted, code, reason in (
        ("no window", NEEDED[:1], "missing_group", "group: 1 has no block table"),
        ("a third group", (*NEEDED, Blocks(2, 0, (1,))), "unknown_group", "group: got 2, the pool has 2"),
        ("a late window", (NEEDED[0], Blocks(1, 9, (5, 6, 7, 8))), "blocks_too_few", "the blocks hold [72, 104)"),
    ):
        bench.want(name, WANTED, range(END), blocks=wanted)
        assert reason in bench.receiver.failed(name, code)
    carries(bench)


def test_a_window_begins_inside_a_larger_block_that_nobody_else_gets(bench_of: Benches) -> None:
    """The token after END sees those from 69 on, inside the receiver's block of 64 to 95. The rest of it stays."""
    shape = replace(RECEIVER, block_tokens=32, begins_inside=True)
    carries(bench_of(SENDER, shape), windows(shape, WANTED[:4]), WANTED[:4])


def test_chunks_come_to_a_larger_block_that_divides_them(bench_of: Benches) -> None:
    sender, receiver = (replace(each, kinds=("full", "chunked")) for each in (SENDER, RECEIVER))
    larger = replace(receiver, block_tokens=WINDOW)
    carries(bench_of(sender, larger), windows(larger, WANTED[:4]), WANTED[:4])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 48}, "window: sender 32, receiver 48 (layer 1); needs the same model on both sides"),
        ({"kinds": ("full", "chunked")}, "kind: sender sliding 32, receiver chunked 32 (layer 1 k and 1 more); needs"),
        ({"kinds": ("full",), "window": 0}, "kind: sender sliding 32, receiver full (layer 1 k and 1 more); needs"),
        ({"block_tokens": 32}, "block_tokens: sender 16, receiver 32 (layer 1 k and 1 more); needs"),
    ],
)
def test_another_window_is_refused_by_name(changes: dict[str, Any], reason: str, bench_of: Benches) -> None:
    shape = replace(RECEIVER, **changes)
    bench = bench_of(SENDER, shape)
    asked(bench, "r", OFFERED, windows(shape, WANTED) if len(shape.groups) == 2 else NEEDED[:1])
    assert reason in bench.receiver.failed("r", "incompatible")


def test_a_decode_side_whose_prefill_side_lacks_the_windowed_layers_is_refused_by_name(bench_of: Benches) -> None:
    """As if it had described the full half of its pool only."""

    class Half(OracleEngine):
        def __init__(self, agent: Any, held: Any) -> None:
            super().__init__(agent, held)
            if agent.socket.stem.startswith("p"):
                self.pool = without_windows(self.pool)

    bench = bench_of(SENDER, RECEIVER, engine=Half)
    asked(bench, "r", OFFERED, NEEDED)
    assert "layers: sender 2, receiver 2 (layer 1); needs every layer of the decode side" in bench.receiver.failed(
        "r", "incompatible"
    )


def without_windows(pool: Pool) -> Pool:
    return msgspec.structs.replace(pool, planes=tuple(plane for plane in pool.planes if not plane.group))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda pool: msgspec.structs.replace(pool, groups=pool.groups[:1]), "group 1 of 1"),
        (lambda pool: msgspec.structs.replace(pool, groups=(pool.groups[0], no_window(pool))), "window: 0"),
    ],
)
def test_a_pool_without_the_group_of_its_windows_is_refused_at_start(changed: Any, reason: str, tmp_path: Path) -> None:
    with agent(tmp_path, "a") as running:
        engine = OracleEngine(running, build(SENDER))
        answer = engine.attach(pool=changed(engine.pool))
        engine.close()
    assert isinstance(answer, Refused) and any(reason in each for each in answer.reasons), answer


def no_window(pool: Pool) -> Any:
    return msgspec.structs.replace(pool.groups[1], window=0)
