"""How fast the kernels fill and empty a slot, beside a device copy of the same bytes in the same run.

    python bench/kernels.py [--mib 128 1024 4096] [--smoke]

Llama-8B's shape: 32 layers, K and V, 8 heads of 128 numbers, blocks of 16 tokens at random places. GB/s count bytes
read plus bytes written. --smoke runs everything tiny under Triton's interpreter, without a GPU, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvbridge_kernels.codecs_ref import DTYPES, Cast, Number
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.places import Places
from kvbridge_kernels.prepared_copy import PreparedCopy
from kvbridge_kernels.segment import Segment, Span
from kvbridge_kernels.tables import Work
from record import RESULTS, write

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


def seconds_of(action: Callable[[int], object]) -> float:
    """The median time of a call on the GPU. All rounds are enqueued before the first is read."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUNDS)]
    for i in range(3):
        action(i)
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)
    for i, (begin, end) in enumerate(events):
        begin.record()
        action(i)
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3


def measure(case: Case, memory_bytes: int, room: torch.Tensor, works: Sequence[Work]) -> float:
    """Seconds of one call. `room` is split into the slot and a pool, of which a part is moved."""
    from kvbridge_kernels.gather import gather
    from kvbridge_kernels.scatter import scatter

    move = gather if case.kernel == "gather" else scatter
    slot_bytes = room.numel() // 3
    pool, slot = room[slot_bytes:], room[:slot_bytes]
    chunks = [chunk(case, memory_bytes, pool, seed) for seed in range(3)]
    span = Span(slot.data_ptr(), chunks[0][-1].slot_end)
    assert span.size_bytes <= slot_bytes
    sums = torch.zeros(1, dtype=torch.int64, device=room.device) if case.has_sums else None

    def action(i: int) -> None:
        move(chunks[i % 3], span, sums, works[i])

    if room.device.type == "cpu":
        began = time.perf_counter()
        action(0)
        return time.perf_counter() - began
    return seconds_of(action)


def one_block(room: torch.Tensor, case: Case) -> dict[str, float]:
    """For a chunk of one block: the time that the call takes its thread, and the time until the slot is filled."""
    from kvbridge_kernels.gather import gather

    segments = chunk(case, 2 * LAYERS * BLOCK * HEADS * WIDTH * DTYPES[case.memory].itemsize, room[: 1 << 30])
    span = Span(room[1 << 30 :].data_ptr(), segments[-1].slot_end)
    sums, work = torch.zeros(1, dtype=torch.int64, device=room.device), Work(room.device)
    prepared, found = PreparedCopy(segments, span.size_bytes), {}
    for name, moved in (("segments", lambda: segments), ("prepared", lambda: prepared.at(prepared.places))):
        called, done = [], []
        for _ in range(300):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            gather(moved(), span, sums, work)
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


def run(sizes: Sequence[int], smoke: bool) -> dict[str, Any]:
    device = "cpu" if smoke else "cuda"
    largest = max(sizes) * MIB
    room = torch.randint(0, 120, (6 * largest,), dtype=torch.uint8, device=device)
    works = [Work(device, 8 << 20) for _ in range(ROUNDS)]
    copies, rows = {}, []
    for mib in sizes:
        half = mib * MIB
        copies[mib] = half / (1.0 if smoke else seconds_of(partial(copied, room, half)))
        for case in CASES:
            row = figures(case, mib, measure(case, half, room, works), copies[mib])
            if smoke:
                continue
            goal = f" (goal {row['goal']})" if row["goal"] else ""
            speed = f"{row['us']:9.0f} us {row['read_and_written_gb_s']:7.0f} GB/s read and written"
            print(f"{case.name:44} {mib:5} MiB {speed} {row['of_copy']:6.3f} of copy{goal}", flush=True)
            rows.append(row)
    found = {"copy_payload_gb_s": {mib: rate / 1e9 for mib, rate in copies.items()}, "moves": rows}
    if not smoke:
        found["one_block"] = {case.name: one_block(room, case) for case in (CASES[4], CASES[8])}
        found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[128, 1024, 4096], help="MiB of engine memory per chunk")
    parser.add_argument("--smoke", action="store_true", help="tiny and interpreted; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    given = parser.parse_args()
    if given.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        run([2], True)
        return
    found = run(given.mib, False)
    print("device copy, payload GB/s:", {mib: round(rate) for mib, rate in found["copy_payload_gb_s"].items()})
    print("one block of 64 planes:", found["one_block"])
    write("kernels", found, given.out)


if __name__ == "__main__":
    main()
