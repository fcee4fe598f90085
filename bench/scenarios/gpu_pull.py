"""How fast the pull kernel carries rows from one GPU's pool into another's, beside the copy engine in the same run.

Llama-8B's shape: 32 layers, K and V, 8 heads of 128 numbers, random blocks. First a small size of each case is checked
against the twin. The sender's pool is on the first GPU. The receiver's pool and the kernel are on the last. `call_us`
is what a call costs its thread. GB/s count the sender's bytes, which `--mib` chooses. `--smoke` only runs the checks,
under Triton's interpreter, and writes nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvbridge_kernels import launch_ref
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.field import Axis, Field, Mapped
from kvbridge_kernels.prepared import Placed, Prepared
from kvbridge_kernels.segment import Places, Segment
from kvbridge_kernels.tables import Kernels, Work

from bench.gpu.timing import gpu_seconds
from bench.scenario import Bench

LAYERS, HEADS, WIDTH = 32, 8, 128
MIB = 1 << 20
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Pool:
    """How one end keeps its rows. Each rank has `heads` of the 8 heads."""

    layout: str
    block_tokens: int
    codec: str = "bf16"
    heads: int = HEADS


@dataclass(frozen=True, slots=True)
class Case:
    """`ranks` senders, one after another, to one receiver."""

    name: str
    sender: Pool
    receiver: Pool
    ranks: int = 1


CASES = [
    Case("NHD 16 -> HND 64", Pool("NHD", 16), Pool("HND", 64)),
    Case("equal, NHD 16", Pool("NHD", 16), Pool("NHD", 16)),
    Case("TP 2 -> 1, NHD 16 -> HND 64", Pool("NHD", 16, heads=4), Pool("HND", 64), 2),
    Case("bf16 -> fp8, NHD 16 -> HND 64", Pool("NHD", 16), Pool("HND", 64, "fp8_e4m3")),
    Case("fp8 -> bf16, NHD 16 -> HND 64", Pool("NHD", 16, "fp8_e4m3"), Pool("HND", 64)),
]
SCALE = 0.37


def token_bytes(pool: Pool) -> int:
    """Bytes of a token in all planes."""
    return 2 * LAYERS * pool.heads * WIDTH * DTYPES[pool.codec].itemsize


def segments_of(
    pool: Pool, memory: torch.Tensor | Mapped, tokens: int, wire: str, heads: range, seed: int
) -> tuple[list[Segment], int]:
    """Segments, and the slot's bytes: some heads of `tokens` tokens in random blocks, two segments per layer."""
    size, block_tokens = DTYPES[pool.codec].itemsize, pool.block_tokens
    row = WIDTH * size
    block = block_tokens * pool.heads * row
    blocks = memory.numel() // (2 * LAYERS * block)
    table = torch.from_numpy(np.random.default_rng(seed).permutation(blocks)[: -(-tokens // block_tokens)])
    token = torch.arange(tokens)
    places = Places(table[token // block_tokens] * block_tokens + token % block_tokens)
    token_stride, head = (pool.heads * row, row) if pool.layout == "NHD" else (row, block_tokens * row)
    scale = torch.tensor([[SCALE]])
    cast = None
    if pool.codec != wire:
        ends = [Number(name, scale if name.startswith("fp8") else None) for name in (pool.codec, wire)]
        cast = Cast(ends[0], ends[1])
    found, pitch = [], len(heads) * tokens * WIDTH * DTYPES[wire].itemsize
    for layer in range(LAYERS):
        field = Field(
            memory, 2 * layer * blocks * block + heads.start * head, Axis(2, blocks * block), Axis(blocks, block),
            (Axis(block_tokens, token_stride),), Axis(len(heads), head), (Axis(WIDTH, size),), size,
        )  # fmt: skip
        found.append(Segment(field, places, 2 * layer * pitch, pitch, cast))
    return found, 2 * LAYERS * pitch


def chunks_of(
    case: Case, senders: Sequence[torch.Tensor | Mapped], receiver: torch.Tensor | Mapped, tokens: int
) -> list[Placed]:
    """A chunk from each sender rank."""
    wire = min(case.sender.codec, case.receiver.codec, key=lambda name: DTYPES[name].itemsize)
    found, count = [], case.sender.heads
    for rank, memory in enumerate(senders):
        ours, size = segments_of(case.sender, memory, tokens, wire, range(count), rank)
        theirs, _ = segments_of(case.receiver, receiver, tokens, wire, range(rank * count, (rank + 1) * count), 9)
        found.append(Prepared(ours, theirs, size).chunk)
    return found


def pool_bytes(pool: Pool, tokens: int) -> int:
    """Bytes of a pool with a few more blocks than these tokens need."""
    return (-(-tokens // 64) + 2) * 64 * token_bytes(pool)


def foreign(memory: torch.Tensor, device: torch.device) -> torch.Tensor | Mapped:
    """The memory as kernels on `device` see it."""
    return memory if device.type == "cpu" else Mapped(memory.data_ptr(), memory.numel(), device.index)


def check(case: Case, home: torch.device, device: torch.device, programs: int | None) -> None:
    """Check that bytes and digest equal the twin's, for tokens that end inside a block."""
    from kvbridge_kernels.launch import move

    tokens = 200 if device.type == "cuda" else 20
    rng = np.random.default_rng(1)
    contents = [
        torch.from_numpy(rng.integers(0x20, 0x48, pool_bytes(case.sender, tokens), dtype=np.uint8))
        for _ in range(case.ranks)
    ]
    wanted = torch.full((pool_bytes(case.receiver, tokens),), 0xA5, dtype=torch.uint8)
    found = wanted.to(device)
    held = [content.to(home) for content in contents]
    if home.type == "cuda":
        torch.cuda.synchronize(home)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    wanted_sums = torch.zeros(1, dtype=torch.int64)
    work = Work(device, 8 * MIB)
    for chunk in chunks_of(case, [foreign(each, device) for each in held], found, tokens):
        move(chunk, work, None, sums, None, programs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    for chunk in chunks_of(case, contents, wanted, tokens):
        launch_ref.move(chunk, Work("cpu"), None, wanted_sums)
    if not torch.equal(found.cpu(), wanted) or int(sums) != int(wanted_sums):
        raise SystemExit(f"{case.name}, {programs} programs: differs from the twin")


def called_us(action: Callable[[int], object]) -> float:
    """The median time that a call takes its thread while the GPU is idle."""
    found = []
    for i in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        action(i % ROUNDS)
        found.append((time.perf_counter_ns() - began) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(found)


class Pulls:
    """Both pools, large enough for the largest case, and the figures."""

    def __init__(self, home: torch.device, device: torch.device, largest: int) -> None:
        self.device, self.rows = device, list[dict[str, Any]]()
        room = largest + 512 * token_bytes(Pool("NHD", 16))
        self.ours = torch.randint(0, 120, (room,), dtype=torch.uint8, device=home)
        self.theirs = torch.zeros(2 * room, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(home)
        torch.cuda.synchronize(device)
        self.stream = torch.cuda.Stream()
        self.sums = torch.zeros(1, dtype=torch.int64, device=device)
        self.copies: dict[str, float] = {}

    def copy(self, mib: int) -> None:
        size = mib * MIB
        seconds = gpu_seconds(lambda _: self.theirs[:size].copy_(self.ours[:size], non_blocking=True), ROUNDS)
        self.copies[str(mib)] = size / seconds / 1e9
        print(f"copy engine {mib:5} MiB {self.copies[str(mib)]:7.1f} GB/s", flush=True)

    def pull(self, case: Case, mib: int, programs: int | None, has_sums: bool) -> dict[str, Any]:
        from kvbridge_kernels.launch import move

        tokens = mib * MIB // token_bytes(case.sender) // case.ranks
        share = self.ours.numel() // case.ranks // 256 * 256
        senders = [foreign(self.ours[i * share : (i + 1) * share], self.device) for i in range(case.ranks)]
        chunks = chunks_of(case, senders, self.theirs, tokens)
        kernels = Kernels()
        works = [Work(self.device, 8 * MIB, kernels=kernels) for _ in range(ROUNDS * len(chunks))]
        sums = self.sums if has_sums else None

        def action(i: int) -> None:
            for at, chunk in enumerate(chunks):
                move(chunk, works[i * len(chunks) + at], None, sums, torch.cuda.current_stream(), programs)

        seconds = gpu_seconds(action, ROUNDS)
        gb_s = mib * MIB / seconds / 1e9
        row = {
            "case": case.name, "mib": mib, "programs": programs, "digest": has_sums, "us": seconds * 1e6, "gb_s": gb_s,
            "of_copy": gb_s / self.copies[str(mib)], "call_us": called_us(action),
        }  # fmt: skip
        self.rows.append(row)
        return row


def measure(bench: Bench, *, mib: tuple[int, ...] = (2, 128, 2048), smoke: bool = False) -> dict[str, Any] | None:
    if smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        for case in CASES:
            check(case, torch.device("cpu"), torch.device("cpu"), 3)
        return None
    count = torch.cuda.device_count()
    home, device = torch.device("cuda", 0), torch.device("cuda", count - 1)
    torch.cuda.set_device(device)
    torch.zeros(1, device=home).copy_(torch.ones(1, device=device))  # makes torch enable peer access
    for case in CASES:
        for programs in (None, 33):
            check(case, home, device, programs)
    bench.say(f"all {len(CASES)} cases equal the twin; {home} -> {device}")
    pulls = Pulls(home, device, max(mib) * MIB)
    for size in mib:
        pulls.copy(size)
        for case in CASES:
            bench.show(pulls.pull(case, size, None, True))
        for programs in (None, 8, 16, 33, 66):
            bench.show(pulls.pull(CASES[0], size, programs, False))
        bench.show(pulls.pull(CASES[0], size, 33, True))
    found = {"gpus": [torch.cuda.get_device_name(i) for i in range(count)], "torch": torch.__version__}
    return {**found, "copy_gb_s": pulls.copies, "pulls": pulls.rows}
