"""The two ends of the host route alone: blocks -> pinned host slots, and back, with several chunks in flight.

The middle of that route is the network. This shows what the copier adds to a plain copy over PCIe: gathers and scatters
must hide behind the copies of other chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Pool

from bench.scenario import Bench
from kvbridge.device import driver
from kvbridge.device.copier_gpu import GpuBlockCopier
from kvbridge.device.mapping import HostMappings
from kvbridge.device.memory import AttachedPool
from kvbridge.device.staging import Span, Staging
from kvbridge.geometry.plan import Part, Planner
from kvbridge.geometry.shard import common
from kvbridge.geometry.tokens import BlockTable
from kvbridge.loopback.pools import Shape, describe

IN_FLIGHT = 4
SENDER = Shape(name="NHD", axes="LPBTHE", block_tokens=16, blocks=1 << 14, layers=32)
RECEIVER = Shape(name="HND", axes="LPBHTE", block_tokens=64, blocks=1 << 12, layers=32)


class OwnMemory(AttachedPool):
    """A pool in this process's own memory, used like an attached one."""

    def __init__(self, shape: Shape) -> None:
        layers = shape.layers_apart
        memories = [
            torch.randint(0, 255, (shape.rank_bytes // len(layers),), dtype=torch.uint8, device="cuda:0")
            for _ in layers
        ]
        super().__init__(describe(shape, 0, layers), HostMappings(), memories)


def parts(ours: Pool, theirs: Pool, is_sender: bool, slot_bytes: int, chunks: int) -> list[Part]:
    """The chunks of one long request, with blocks in random order."""
    planner, own = Planner(ours, theirs), ours if is_sender else theirs
    group = own.groups[0]
    order = torch.randperm(group.blocks, generator=torch.Generator().manual_seed(0)).tolist()
    tokens = group.blocks * group.block_tokens
    planned = planner.plan(common(ours, theirs), 0, tokens, slot_bytes)
    table = {0: BlockTable.of(group, Blocks(0, 0, tuple(order)))}
    return [Part(planned, planned.chunk(i % planned.chunks), table, is_sender) for i in range(chunks)]


def rate(copier: GpuBlockCopier, moves: Sequence[Callable[[], int]], size_bytes: int) -> float:
    """GB/s of all moves, IN_FLIGHT at a time: the best of three rounds after a warm-up round."""
    best = 0.0
    for i in range(4):
        began, left = time.perf_counter(), 0
        for move in moves:
            while left >= IN_FLIGHT:
                left -= len(copier.poll())
            move()
            left += 1
        while left:
            left -= len(copier.poll())
        if i:
            best = max(best, size_bytes / (time.perf_counter() - began) / 1e9)
    return best


def rates(chunk_bytes: int, chunks: int) -> dict[str, Any]:
    copier = GpuBlockCopier(driver.Gpu.open("cuda:0"), IN_FLIGHT + 1)
    sender, receiver = OwnMemory(SENDER), OwnMemory(RECEIVER)
    with (
        closing(copier.staging(chunk_bytes, IN_FLIGHT)) as slots,
        closing(Staging.pinned(chunk_bytes, IN_FLIGHT)) as host,
    ):
        found: dict[str, Any] = {"chunk_bytes": chunk_bytes, "chunks": chunks, "in_flight": IN_FLIGHT}
        out = parts(sender.pool, receiver.pool, True, chunk_bytes, chunks)
        into = parts(sender.pool, receiver.pool, False, chunk_bytes, chunks)

        def spans(i: int, part: Part) -> tuple[Span, Span]:
            size = part.chunk.size_bytes
            return slots.span(i % IN_FLIGHT, size), host.span(i % IN_FLIGHT, size)

        def gather(i: int, part: Part) -> int:
            slot, pinned = spans(i, part)
            return copier.gather(sender, part, slot, "sum64", pinned)

        def scatter(i: int, part: Part) -> int:
            slot, pinned = spans(i, part)
            return copier.scatter(receiver, part, slot, "sum64", 0, pinned)

        moved = sum(part.chunk.size_bytes for part in out)
        found["gather_to_host"] = rate(copier, [partial(gather, i, p) for i, p in enumerate(out)], moved)
        moved = sum(part.chunk.size_bytes for part in into)
        found["host_to_scatter"] = rate(copier, [partial(scatter, i, p) for i, p in enumerate(into)], moved)
        found["copy_to_host"], found["copy_from_host"] = copies(slots, host, chunks)
    copier.close()
    return found


def copies(slots: Staging, host: Staging, chunks: int) -> tuple[float, float]:
    """GB/s of the copy engine for the same slots, to host and from host."""
    stream, rates = torch.cuda.Stream(), []
    for copy, pair in (
        (driver.copy_to_host, lambda i: (host.address(i), slots.address(i))),
        (driver.copy_to_device, lambda i: (slots.address(i), host.address(i))),
    ):
        best = 0.0
        for _ in range(3):
            began = time.perf_counter()
            for i in range(chunks):
                copy(*pair(i % IN_FLIGHT), slots.slot_bytes, stream.cuda_stream)
            stream.synchronize()
            best = max(best, chunks * slots.slot_bytes / (time.perf_counter() - began) / 1e9)
        rates.append(best)
    return rates[0], rates[1]


def measure(bench: Bench, *, chunk_mib: int = 64, chunks: int = 24) -> dict[str, Any]:
    found = rates(chunk_mib << 20, chunks)
    found["goals"] = goals = []
    for what, rate, copy, least in (
        ("gather -> pinned host: >= 0.97 of a copy to host", "gather_to_host", "copy_to_host", 0.97),
        ("pinned host -> scatter: >= 0.96 of a copy from host", "host_to_scatter", "copy_from_host", 0.96),
    ):
        ratio = found[rate] / found[copy]
        measured, against = f"{ratio:.3f} ({found[rate]:.1f} GB/s)", f"copy {found[copy]:.1f} GB/s"
        goals.append({"goal": f"host route, {what}", "measured": measured, "against": against, "met": ratio >= least})
    return found
