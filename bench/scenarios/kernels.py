"""How fast the kernels fill and empty a slot, beside a device copy of the same bytes in the same run.

Llama-8B's shape: 32 layers, K and V, 8 heads of 128 numbers, blocks of 16 tokens at random places. GB/s count bytes
read plus bytes written; `--mib` are those of engine memory in a chunk. `--smoke` runs everything tiny under Triton's
interpreter, without a GPU, and writes nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Places, Segment, Span
from kvbridge_kernels.tables import Work

from bench.gpu.timing import gpu_seconds
from bench.scenario import Bench
from bench.timing import seconds_of

LAYERS, HEADS, WIDTH, BLOCK = 32, 8, 128, 16
ROUNDS = 12
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel, the layout of blocks in memory, the codecs of memory and wire, and the goal."""

    kernel: str
    layout: str
    memory: str = "bf16"
    wire: str = "bf16"
    has_sums: bool = True
    goal: float = 0.90

    @property
    def name(self) -> str:
        codecs = self.memory if self.memory == self.wire and not self.is_cast else f"{self.memory} <-> {self.wire}"
        return f"{self.kernel} {self.layout} {codecs}" + (" + digest" if self.has_sums else "")

    @property
    def is_cast(self) -> bool:
        return self.memory != "bf16" or self.wire != "bf16"


CASES = [
    *(Case(kernel, layout, has_sums=False, goal=0.95) for kernel in ("gather", "scatter") for layout in ("NHD", "HND")),
    *(Case(kernel, layout) for kernel in ("gather", "scatter") for layout in ("NHD", "HND")),
    *(Case("gather", layout, "bf16", "fp8_e4m3") for layout in ("NHD", "HND")),
    *(Case("scatter", layout, "bf16", "fp8_e4m3") for layout in ("NHD", "HND")),
    *(Case(kernel, "NHD", "fp8_e4m3", "fp8_e4m3") for kernel in ("gather", "scatter")),
    Case("gather", "NHD", "fp8_e4m3", "bf16"),
    Case("scatter", "NHD", "fp8_e4m3", "bf16"),
]


def chunk(case: Case, memory_bytes: int, pool: torch.Tensor, seed: int = 0) -> list[Segment]:
    """A segment for each layer's K and each V, `memory_bytes` of engine memory in all, at random blocks of the pool."""
    size = DTYPES[case.memory].itemsize
    row = WIDTH * size
    block = BLOCK * HEADS * row
    blocks, wanted = pool.numel() // (2 * LAYERS * block), memory_bytes // (2 * LAYERS * block)
    chosen = np.random.default_rng(seed).permutation(blocks)[:wanted].astype(np.int64)
    places = Places(torch.from_numpy((chosen[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)))
    token, head = (HEADS * row, row) if case.layout == "NHD" else (row, BLOCK * row)
    cast = None
    if case.is_cast:
        scale = {True: torch.tensor([[0.37]]), False: None}
        rescaled = case.memory == case.wire
        cast = Cast(
            Number(case.memory, scale[case.memory.startswith("fp8")]),
            Number(case.wire, torch.tensor([[0.5]]) if rescaled else scale[case.wire.startswith("fp8")]),
        )
    segments, offset = [], 0
    for plane in range(2 * LAYERS):
        field = Field(
            pool, plane * blocks * block, Axis(1, 0), Axis(blocks, block), (Axis(BLOCK, token),), Axis(HEADS, head),
            (Axis(WIDTH, size),), size,
        )  # fmt: skip
        segments.append(Segment(field, places, offset, 0, cast))
        offset = segments[-1].slot_end
    return segments


def seconds(case: Case, memory_bytes: int, room: torch.Tensor, works: Sequence[Work]) -> float:
    """Seconds of one call. `room` is split into the slot and a pool, of which a part is moved."""
    from kvbridge_kernels.launch import move

    slot_bytes = room.numel() // 3
    pool, slot = room[slot_bytes:], room[:slot_bytes]
    chunks = [chunk(case, memory_bytes, pool, seed) for seed in range(3)]
    span = Span(slot.data_ptr(), chunks[0][-1].slot_end)
    assert span.size_bytes <= slot_bytes
    sums = torch.zeros(1, dtype=torch.int64, device=room.device) if case.has_sums else None

    def action(i: int) -> None:
        segments = chunks[i % 3]
        sources, targets = (segments, None) if case.kernel == "gather" else (None, segments)
        move(Prepared(sources, targets, span.size_bytes).chunk, works[i], span, sums)

    return seconds_of(action, 1)[0] if room.device.type == "cpu" else gpu_seconds(action, ROUNDS)


def one_block(room: torch.Tensor, case: Case) -> dict[str, float]:
    """For a chunk of one block: the time that the call takes its thread, and the time until the slot is filled."""
    from kvbridge_kernels.launch import move

    segments = chunk(case, 2 * LAYERS * BLOCK * HEADS * WIDTH * DTYPES[case.memory].itemsize, room[: room.numel() // 2])
    span = Span(room[room.numel() // 2 :].data_ptr(), segments[-1].slot_end)
    sums, work = torch.zeros(1, dtype=torch.int64, device=room.device), Work(room.device)
    prepared, found = Prepared(segments, None, span.size_bytes), {}
    places = prepared.memories[0].places
    for name, moved in (
        ("segments", lambda: Prepared(segments, None, span.size_bytes).chunk),
        ("prepared", lambda: prepared.at(places)),
    ):
        called, done = [], []
        for _ in range(300):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            move(moved(), work, span, sums)
            called.append((time.perf_counter_ns() - began) / 1e3)
            torch.cuda.synchronize()
            done.append((time.perf_counter_ns() - began) / 1e3)
        found[f"{name}_call_us_p50"] = statistics.median(called)
        found[f"{name}_done_us_p50"] = statistics.median(done)
    return found


def figures(case: Case, mib: int, seconds: float, copy_rate: float) -> dict[str, Any]:
    """A row of the results. `copy_rate`: payload bytes a second of a device copy."""
    memory_bytes = mib * MIB
    wire_bytes = memory_bytes // DTYPES[case.memory].itemsize * DTYPES[case.wire].itemsize
    share = (memory_bytes + wire_bytes) / seconds / (2 * copy_rate)
    return {
        "case": case.name,
        "mib": mib,
        "us": seconds * 1e6,
        "read_and_written_gb_s": (memory_bytes + wire_bytes) / seconds / 1e9,
        "of_copy": share,
        "goal": case.goal if mib >= 1024 else None,
    }


def copied(room: torch.Tensor, size: int, _: int) -> None:
    room[:size].copy_(room[2 * size : 3 * size])


def measure(bench: Bench, *, mib: tuple[int, ...] = (128, 1024, 4096), smoke: bool = False) -> dict[str, Any] | None:
    if smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        mib = (2,)
    device = "cpu" if smoke else "cuda"
    room = torch.randint(0, 120, (6 * max(mib) * MIB,), dtype=torch.uint8, device=device)
    works = [Work(device, 8 << 20) for _ in range(ROUNDS)]
    copies, rows = {}, []
    for each in mib:
        copies[str(each)] = each * MIB / (1.0 if smoke else gpu_seconds(partial(copied, room, each * MIB), ROUNDS))
        for case in CASES:
            rows.append(figures(case, each, seconds(case, each * MIB, room, works), copies[str(each)]))
            bench.show(rows[-1])
    if smoke:
        return None
    found = {"copy_payload_gb_s": {size: rate / 1e9 for size, rate in copies.items()}, "moves": rows}
    found["one_block"] = {case.name: one_block(room, case) for case in (CASES[4], CASES[8])}
    print("one block of 64 planes:", found["one_block"])
    return found | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
