"""The demo carries real bytes between real processes, and would notice a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbridge.demo.engine import Job, SyntheticEngine
from kvbridge.demo.pools import POISON, Request, Shape, describe, fill, first_difference, tables
from kvbridge.geometry.compat import check_pool

from .test_cli import kvbridge

SMALL = Shape(name="small", axes="LPBTHE", block_tokens=16, blocks=12, layers=2, kv_heads=4, width=8)
SHAPES = [
    SMALL,
    Shape(name="hnd", axes="LPBHTE", block_tokens=8, blocks=20, layers=2, kv_heads=4, width=8, tp_size=2),
    Shape(name="packed", axes="LBHTPE", block_tokens=32, blocks=6, layers=2, kv_heads=4, width=8),
    Shape(name="cross", axes="BLPTHE", block_tokens=48, blocks=4, layers=2, kv_heads=4, width=8, codec="fp8_e4m3"),
]
REQUESTS = [Request(name="one", tokens=40, seed=1), Request(name="two", tokens=33, first_token=16, seed=2)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_synthetic_pools_are_pools(shape: Shape) -> None:
    for rank in range(shape.tp_size):
        assert check_pool(describe(shape, rank)) == ()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_planes_of_a_synthetic_pool_cover_its_memory_once(shape: Shape) -> None:
    memory = torch.full((shape.rank_bytes,), POISON, dtype=torch.uint8)
    whole = Request(name="whole", tokens=shape.blocks * shape.block_tokens)
    fill(memory, shape, 0, list(range(shape.blocks)), whole, "bf16")
    assert len(set(tables(shape, [whole])["whole"])) == shape.blocks
    again = memory.clone()
    fill(again, shape, 0, list(range(shape.blocks)), whole, "bf16")
    assert first_difference(memory, again, shape, 0) == ""


def engine(shape: Shape, rank: int = 0) -> SyntheticEngine:
    addresses = ("tcp://127.0.0.1:1",) * shape.tp_size
    job = Job(role="sink", shape=shape, rank=rank, socket="/nowhere", ranks=addresses, requests=REQUESTS)
    return SyntheticEngine(job)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_verify_finds_every_changed_byte(shape: Shape) -> None:
    sink = engine(shape, shape.tp_size - 1)
    for request in REQUESTS:
        fill(sink.memory, shape, sink.job.rank, sink.tables[request.name], request, "bf16")
    assert sink.verify() == ""
    for place in range(0, shape.rank_bytes, shape.rank_bytes // 97):
        sink.memory[place] ^= 1
        assert "1 elements differ" in sink.verify()
        sink.memory[place] ^= 1
    assert sink.verify() == ""


def test_verify_says_where_it_is_wrong() -> None:
    sink = engine(SMALL)
    for request in REQUESTS:
        fill(sink.memory, SMALL, 0, sink.tables[request.name], request, "bf16")
    table = sink.tables["two"]
    rows = SMALL.kv_heads * SMALL.width * 2
    sink.memory[table[1] * 16 * rows + 3 * rows + 2 * SMALL.width * 2] ^= 1  # layer 0 k, token 19, head 2
    assert f"layer 0 k head 2 block {table[1]} token 3 element 0" in sink.verify()


def test_the_whole_demo() -> None:
    told = kvbridge("demo", timeout_s=100, COLUMNS="80")
    assert told.returncode == 0, told.stderr + told.stdout
    assert told.stdout.count("exact") == 3
    assert "WRONG" not in told.stdout
    assert "codec bf16 -> fp8_e4m3" in told.stdout


def test_vllm_demo_says_what_it_needs(tmp_path: Path) -> None:
    told = kvbridge("demo", "--vllm", "--vllm-python", tmp_path / "python")
    assert told.returncode == 1
    assert f"no_vllm: no Python at {tmp_path}/python" in told.stderr
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    told = kvbridge("demo", "--vllm", "--vllm-python", bare)
    assert told.returncode == 1
    assert "does not have both vllm and kvbridge" in told.stderr
