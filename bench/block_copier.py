"""How fast a CPU's block copier gathers and scatters chunks, beside memcpy of the same bytes on the same machine.

    python bench/block_copier.py [--threads 1] [--pool-mib 256] [--chunk-mib 4]

Each layout has a pool in shared memory, with blocks in random order. Each call moves another part of it, so that the
pool's bytes come from memory and not from a cache. memcpy copies whole chunks, and short rows at random places cannot
be as fast. GB/s count the bytes of engine memory. Gather and scatter include the digest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from kvbridge_kernels.digest_ref import digest
from kvbridge_proto.pool import Codec, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step
from record import write

from kvbridge.device.copier import Moved
from kvbridge.device.copier_cpu import CpuBlockCopier
from kvbridge.device.handles import export
from kvbridge.device.memory import AttachedPool
from kvbridge.geometry.plan import Move

HEADS, WIDTH = 8, 128
DIGEST = "xxh3"  # on which two agents on CPUs agree
ROUNDS = 48
WIRES = {
    "bf16": Codec(name="bf16", width=WIDTH, element_bytes=2, row_bytes=2 * WIDTH),
    "fp8_e4m3": Codec(name="fp8_e4m3", width=WIDTH, element_bytes=1, row_bytes=WIDTH, scales=(0.37,)),
    "16 KiB": Codec(name="opaque", width=16 << 10, element_bytes=1, row_bytes=16 << 10),
    "64 KiB": Codec(name="opaque", width=64 << 10, element_bytes=1, row_bytes=64 << 10),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A pool of one plane. `order`: its axes in memory, the outermost first. In the slot E is always innermost."""

    name: str
    order: str
    block_tokens: int
    memory: str = "bf16"
    wire: str = "bf16"
    skip: int = 0

    @property
    def heads(self) -> int:
        return 1 if WIRES[self.memory].name == "opaque" else HEADS


LAYOUTS = (
    Layout("dense rows of 64 KiB (folded)", "BTHE", 1, "64 KiB", "64 KiB"),
    Layout("dense rows of 16 KiB (folded)", "BTHE", 1, "16 KiB", "16 KiB"),
    Layout("NHD, rows of 256 B, block 16", "BTHE", 16),
    Layout("NHD, token slots (block 1)", "BTHE", 1),
    Layout("HND, block 16", "BHTE", 16),
    Layout("HND, block 128", "BHTE", 128),
    Layout("K column-major, block 32", "BHET", 32),
    Layout("K column-major, block 128", "BHET", 128),
    Layout("K column-major, block 128, 57 tokens in", "BHET", 128, skip=57),
    Layout("NHD bf16 <-> fp8_e4m3 wire", "BTHE", 16, "bf16", "fp8_e4m3"),
    Layout("NHD fp8_e4m3 <-> fp8_e4m3 other scale", "BTHE", 16, "fp8_e4m3", "fp8_e4m3"),
    Layout("K column-major fp8 <-> fp8 same, block 128", "BHET", 128, "fp8_e4m3", "fp8_e4m3"),
    Layout("K column-major bf16 <-> fp8_e4m3 wire, block 32", "BHET", 32, "bf16", "fp8_e4m3"),
)


def pool_of(layout: Layout, pool_bytes: int) -> Pool:
    codec = WIRES[layout.memory]
    if "other scale" in layout.name:
        codec = Codec(name="fp8_e4m3", width=WIDTH, element_bytes=1, row_bytes=WIDTH, scales=(0.5,))
    counts = {"T": layout.block_tokens, "H": layout.heads, "E": codec.row_bytes // codec.element_bytes}
    blocks = pool_bytes // (prod(counts.values()) * codec.element_bytes)
    strides, stride = {}, codec.element_bytes
    for axis in reversed(layout.order):
        strides[axis] = stride
        stride *= counts.get(axis, 1)
    plane = Plane(
        layer=0,
        part="k",
        offset=0,
        block_stride=strides["B"],
        token_axis=(Step(counts["T"], strides["T"]),),
        head_stride=strides["H"],
        element_axis=(Step(counts["E"], strides["E"]),),
        first_head=0,
        heads=layout.heads,
        total_heads=layout.heads,
        codec=codec,
    )
    kept = Layer(kind="full", kv_heads=layout.heads, key_width=codec.width, value_width=codec.width)
    return Pool(
        engine=Engine(kind="bench", version="0", id=layout.name),
        model=Model(name="bench", layers=(kept,)),
        shard=Shard(),
        groups=(Group(kind="full", block_tokens=layout.block_tokens, blocks=blocks),),
        regions=(Region(pool_bytes),),
        planes=(plane,),
    )


class OneMove:
    """A part with one move and no plan. All parts share one copy template."""

    pairs = template_key = object()

    def __init__(self, move: Move) -> None:
        self.move = move
        self.plan = self

    def moves(self) -> tuple[Move, ...]:
        return (self.move,)

    def places(self, group: int, unit_tokens: int) -> np.ndarray:
        return self.move.places


def moves_of(layout: Layout, pool: Pool, chunk_bytes: int) -> list[Any]:
    """Chunks of about `chunk_bytes` of engine memory, which together cover the whole pool in random order."""
    (plane,), (group,) = pool.planes, pool.groups
    tokens = chunk_bytes // (plane.heads * plane.codec.row_bytes)
    blocks = -(-(tokens + layout.skip) // group.block_tokens)
    shuffled = np.random.default_rng(0).permutation(group.blocks)
    found = []
    for first in range(0, group.blocks - blocks + 1, blocks):
        chosen = shuffled[first : first + blocks].astype(np.int64)
        places = (chosen[:, None] * group.block_tokens + np.arange(group.block_tokens)).reshape(-1)
        places = np.ascontiguousarray(places[layout.skip : layout.skip + tokens])
        found.append(OneMove(Move(plane, 0, plane.heads, WIRES[layout.wire], 0, places)))
    return found


def timed(action: Callable[[int], object]) -> float:
    """The lower quartile of a call's seconds. Other load only adds time, and no call finds its chunk in a cache."""
    seconds = []
    for i in range(ROUNDS):
        start = time.perf_counter()
        action(i)
        seconds.append(time.perf_counter() - start)
    return statistics.quantiles(seconds)[0]


def measure(layout: Layout, pool_bytes: int, chunk_bytes: int) -> tuple[float, float, float]:
    """GB/s of memcpy, gather (with its digest) and scatter for one layout."""
    pool = pool_of(layout, pool_bytes)
    memory = torch.randint(0, 120, (pool_bytes,), dtype=torch.uint8)
    handle, fd = export(memory.untyped_storage(), 0, 0)
    assert fd is not None
    copier = CpuBlockCopier()
    with copier.staging(chunk_bytes, 1) as staging, AttachedPool.open(pool, [handle], [fd]) as attached:
        os.close(fd)
        chunks = moves_of(layout, pool, chunk_bytes)
        size = chunks[0].move.size_bytes
        with attached.hold() as regions:
            (mapped,) = regions.memories
            assert isinstance(mapped, torch.Tensor)
            pages = mapped.view(-1, chunk_bytes)
            pages.view(torch.int64)[:, ::512].sum()  # touch it: the first time costs 100 ms per GiB
            order = np.random.default_rng(1).permutation(len(pages)).tolist()
            copied = timed(lambda i: copy(staging.span(0).on_cpu(), pages, order[i % len(order)]))
        slot = staging.span(0, size)

        def gather(i: int) -> Moved:
            copier.gather(attached, chunks[i % len(chunks)], slot, DIGEST)
            return over(copier)

        def scatter(i: int) -> Moved:
            copier.scatter(attached, chunks[i % len(chunks)], slot, DIGEST, expected)
            return over(copier)

        gathered = timed(gather)
        expected = digest(slot.on_cpu())
        scattered = timed(scatter)
    copied, gathered, scattered = (chunk_bytes / seconds / 1e9 for seconds in (copied, gathered, scattered))
    return copied, gathered, scattered


def over(copier: CpuBlockCopier) -> Moved:
    (moved,) = copier.poll()
    assert moved.failure is None, moved.failure
    return moved


def copy(slot: torch.Tensor, pages: torch.Tensor, page: int) -> None:
    slot.copy_(pages[page])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pool-mib", type=int, default=256)
    parser.add_argument("--chunk-mib", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    print(f"{'GB/s':50} {'memcpy':>8} {'gather':>8} {'scatter':>8}")
    for layout in LAYOUTS:
        memcpy, out, back = measure(layout, options.pool_mib << 20, options.chunk_mib << 20)
        print(f"{layout.name:50} {memcpy:8.1f} {out:8.1f} {back:8.1f}")
        rows.append(
            {"layout": layout.name, "memcpy": round(memcpy, 2), "gather": round(out, 2), "scatter": round(back, 2)}
        )
    slot = torch.randint(0, 255, (options.chunk_mib << 20,), dtype=torch.uint8)
    digest_rate = slot.numel() / timed(lambda i: digest(slot)) / 1e9
    print(f"{'digest (xxh3), in cache':50} {digest_rate:8.1f}")
    found = {"threads": options.threads, "chunk_mib": options.chunk_mib, "digest": round(digest_rate, 1)}
    write("block_copier", {"unit": "GB/s", **found, "rows": rows})


if __name__ == "__main__":
    main()
