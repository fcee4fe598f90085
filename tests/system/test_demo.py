"""The demo carries real bytes between real processes, and would notice a wrong one."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from demo.__main__ import demo as program
from demo.real import ACROSS, OF_VLLM, RealOutcome, compare, conclude, report
from demo.rows import write
from demo.servers import DemoServer
from demo.upgrade import Answer, Seen
from demo.upgrade import conclude as conclude_upgrade
from kvbridge.geometry.compat import check_pool
from kvbridge.loopback.pair import EnginePair, Side, zeros
from kvbridge.loopback.pools import Shape, describe, rows_of
from testing.agents import PYTHON
from testing.job_engine import DemoRequest, Job, JobEngine, tables
from testing.made_rows import POISON, first_difference, prepare

ROOT = Path(__file__).parents[2]
SMALL = Shape(name="small", axes="LPBTHE", block_tokens=16, blocks=12, layers=2, kv_heads=4, width=8)
SHAPES = [
    SMALL,
    Shape(name="hnd", axes="LPBHTE", block_tokens=8, blocks=20, layers=2, kv_heads=4, width=8, tp_size=2),
    Shape(name="packed", axes="LBHTPE", block_tokens=32, blocks=6, layers=2, kv_heads=4, width=8),
    Shape(name="cross", axes="BLPTHE", block_tokens=48, blocks=4, layers=2, kv_heads=4, width=8, codec="fp8_e4m3"),
]
REQUESTS = [DemoRequest(name="one", tokens=40, seed=1), DemoRequest(name="two", tokens=33, first_token=16, seed=2)]
CROSSED = [pair for pairs in (ACROSS | OF_VLLM).values() for pair in pairs]
AS_ALONE = RealOutcome(*CROSSED[0], 40, 163840.0, ((5, 6), (5, 6)), (5, 6), "", 0.5)


def demo(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """As `make demo` runs it, in a terminal that is wide enough for the times of a busy machine."""
    env = os.environ | {"COLUMNS": "120"}
    command = [PYTHON, "-m", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=env)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_synthetic_pools_are_pools(shape: Shape) -> None:
    for rank in range(shape.tp_size):
        assert check_pool(describe(shape, rank)) == ()


def fill(memory: torch.Tensor, shape: Shape, rank: int, table: list[int], request: DemoRequest) -> None:
    tokens = torch.arange(request.first_token, request.tokens)
    for rows in prepare(memory, shape, rank, table, tokens, "bf16", seed=request.seed):
        rows.put()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_planes_of_a_synthetic_pool_cover_its_memory_once(shape: Shape) -> None:
    memory = torch.full((shape.rank_bytes,), POISON, dtype=torch.uint8)
    whole = DemoRequest(name="whole", tokens=shape.blocks * shape.block_tokens)
    fill(memory, shape, 0, list(range(shape.blocks)), whole)
    assert len(set(tables(shape, [whole])["whole"])) == shape.blocks
    again = memory.clone()
    fill(again, shape, 0, list(range(shape.blocks)), whole)
    assert first_difference(memory, again, shape, 0) == ""


def engine(shape: Shape, rank: int = 0) -> JobEngine:
    addresses = ("tcp://127.0.0.1:1",) * shape.tp_size
    job = Job(role="receiver", shape=shape, rank=rank, socket="/nowhere", ranks=addresses, requests=REQUESTS)
    return JobEngine(job)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_verify_finds_every_changed_byte(shape: Shape) -> None:
    receiver = engine(shape, shape.tp_size - 1)
    for request in REQUESTS:
        fill(receiver.memory, shape, receiver.job.rank, receiver.tables[request.name], request)
    assert receiver.verify() == ""
    for place in range(0, shape.rank_bytes, shape.rank_bytes // 97):
        receiver.memory[place] ^= 1
        assert "1 elements differ" in receiver.verify()
        receiver.memory[place] ^= 1
    assert receiver.verify() == ""


def test_verify_says_where_it_is_wrong() -> None:
    receiver = engine(SMALL)
    for request in REQUESTS:
        fill(receiver.memory, SMALL, 0, receiver.tables[request.name], request)
    table = receiver.tables["two"]
    rows = SMALL.kv_heads * SMALL.width * 2
    receiver.memory[table[1] * 16 * rows + 3 * rows + 2 * SMALL.width * 2] ^= 1  # layer 0 k, token 19, head 2
    assert f"layer 0 k head 2 block {table[1]} token 3 element 0" in receiver.verify()


def test_doctor_and_bench_find_a_row_that_is_wrong_and_a_byte_beside_all_rows(tmp_path: Path) -> None:
    """Between other layouts. Nobody listens at the agents' sockets: the rows are copied here."""
    shapes = [SMALL, Shape(name="hnd", axes="LPBHTE", block_tokens=8, blocks=24, layers=2, kv_heads=4, width=8)]
    agent = SimpleNamespace(address="", socket=str(tmp_path / "none"))
    sender, receiver = sides = [Side(agent, each, zeros(each.rank_bytes, 1, "cpu")) for each in shapes]  # type: ignore[arg-type]
    pair, tokens = EnginePair(*sides), range(40)
    sender.engine.regions[0].random_(1, 256)
    planes = [rows_of(side.engine.regions, side.shape, side.table, tokens) for side in sides]
    for (_, sent, at), (_, came, there) in zip(*planes, strict=True):
        came[there] = sent[at]
    assert pair.difference(tokens) == ""
    (memory,) = receiver.engine.regions
    place = int(memory.nonzero()[-1])
    memory[place] ^= 1
    assert pair.difference(tokens) == "layer 1 v: rows are not those that were sent"
    assert pair.beside(range(39)) and pair.beside(tokens) == "" and not memory.any()
    memory[int(receiver.table[-1]) * 8 * 4 * 8 * 2] = 1  # a block of no request: layer 0 k
    assert pair.beside(tokens) == "memory of no request was written"
    for side in sides:
        side.engine.close()


@pytest.mark.timeout(400)
def test_the_whole_demo() -> None:
    told = demo(timeout_s=380)
    assert told.returncode == 0, told.stderr + told.stdout
    assert told.stdout.count("exact") == 3
    assert "WRONG" not in told.stdout
    assert "codec bf16 -> fp8_e4m3" in told.stdout


@pytest.mark.cross
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flag", "pairs"), [("--vllm", 2), ("--cross", 5)])
def test_the_demo_of_real_engines(flag: str, pairs: int) -> None:
    told = demo(flag, timeout_s=580)
    assert told.returncode == 0, told.stdout + told.stderr
    rows = [line for line in told.stdout.splitlines() if "TP" in line]
    assert len(rows) == 3 * pairs, told.stdout  # prompts of each
    assert all(row.count("equal") == 2 for row in rows), told.stdout


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (AS_ALONE, ""),
        (replace(AS_ALONE, carried=(5, 7)), "decoded (5, 7), each engine alone (5, 6) and (5, 6)"),
        (replace(AS_ALONE, alone=((5, 6), (5, 7))), "decoded (5, 6), each engine alone (5, 6) and (5, 7)"),
        (replace(AS_ALONE, difference="layer 0 k: 1 of 160 rows differ"), "layer 0 k: 1 of 160 rows differ"),
        (replace(AS_ALONE, moved_bytes=0.0), "nothing was carried"),
    ],
    ids=["right", "token", "one engine alone", "row", "nothing"],
)
def test_cross_demo_ends_with_1_if_anything_is_wrong(outcome: RealOutcome, says: str) -> None:
    screen = StringIO()
    console = Console(file=screen, width=120)
    report(console, "both ways", [AS_ALONE, outcome])
    told = screen.getvalue()
    assert ("WRONG" in told) == (says not in ("", "nothing was carried"))
    assert not says or f"40 tokens, block 32 TP 1 to page 32 TP 1: {says}" in told
    with pytest.raises(typer.Exit) if says else nullcontext() as ended:
        conclude(console, [AS_ALONE, outcome])
    assert not says or (ended is not None and ended.value.exit_code == 1)


@pytest.mark.parametrize(("sender", "receiver"), CROSSED, ids=lambda engine: engine.name)
def test_cross_demo_sees_a_wrong_row(sender: DemoServer, receiver: DemoServer, tmp_path: Path) -> None:
    """Where vLLM decodes, the prompt's last token is its own."""
    values = np.random.default_rng(1).normal(0, 1, (40, 4, 8)).astype("<f4").view(np.uint8)
    changed, last_changed = values.copy(), values.copy()
    changed[38, 3, 5] ^= 1
    last_changed[39, 3, 5] ^= 1
    is_last_seen = receiver.kind == "sglang"
    for taken, says in ((values, ""), (changed, "1 of"), (last_changed, "1 of" * is_last_seen), (values[:30], "of 40")):
        for side, engine, rows in (("prefill", sender, values), ("decode", receiver, taken)):
            for rank, part in enumerate(np.split(rows, engine.files, axis=1)):
                write(tmp_path, side, 7, rank, "fp32", {"0.k": part})
        said = compare(tmp_path, sender, receiver, 40)
        assert bool(said) == bool(says) and (says in said or "were given" in said), said
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flag", "engine"), [("--vllm", "vllm"), ("--cross", "vllm"), ("--cross", "sglang")])
def test_demo_of_real_engines_says_what_it_needs(tmp_path: Path, flag: str, engine: str) -> None:
    others = [] if engine == "vllm" else ["--vllm-python", str(_python(tmp_path / "good", 0))]
    app, chosen = typer.Typer(), f"--{engine}-python"
    app.command()(program)
    told = CliRunner().invoke(app, [flag, *others, chosen, str(tmp_path / "python")])
    assert told.exit_code == 1
    assert f"no_{engine}: no Python at {tmp_path}/python" in told.stderr
    told = CliRunner().invoke(app, [flag, *others, chosen, str(_python(tmp_path / "bare", 1))])
    assert told.exit_code == 1
    assert f"does not have both {engine} and kvbridge" in told.stderr


def _python(path: Path, code: int) -> Path:
    """Says whether it has what it is asked for, by its exit code."""
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return path


GOOD = Answer(0.3, tokens=100)
MANY = (GOOD,) * 8
NOTHING = Seen((), 0.0)


@pytest.mark.parametrize(
    ("step", "rest", "is_good", "said"),
    [
        (Seen(MANY, 600.0), NOTHING, True, "25% of the prompts computed again"),
        (Seen(MANY, 360.0), NOTHING, False, "40% of the prompts computed again"),  # too much of them after this step
        (Seen((*MANY[1:], replace(GOOD, is_wrong=True)), 800.0), NOTHING, False, "1 wrong"),
        (Seen((*MANY, Answer(9.5, failure="502")), 800.0), NOTHING, False, "17 requests: 1 failed, 0 wrong, slowest"),
        (NOTHING, NOTHING, False, "8 requests: 0 failed, 0 wrong"),  # both clients hung
        (Seen(MANY[1:], 700.0), NOTHING, False, "15 requests: 0 failed, 0 wrong"),
        (Seen(MANY, 800.0), Seen((Answer(60.0, failure="timed out"),), 0.0), False, "17 requests: 1 failed"),
    ],
)
def test_an_upgrade_is_good_if_nothing_failed_and_after_each_step_most_is_carried(
    step: Seen, rest: Seen, is_good: bool, said: str
) -> None:
    out = StringIO()
    with nullcontext() if is_good else pytest.raises(typer.Exit):
        conclude_upgrade(Console(file=out), [(NOTHING, Seen(MANY, 600.0)), (NOTHING, step)], rest)
    assert said in out.getvalue()
