"""How fast requests are gathered and scattered: between unequal sides beside equal ones, and in each layout.

One rank of the sender and one of the receiver carry whole plans through one slot of an agent's size. Blocks are in
random order. A gather and its scatter run one after the other. GB/s count bytes on the wire. `time` and `wire` are
ratios to the equal pair of the same model with the same tokens. A receiver that is one of eight shards takes an eighth
of the tokens. `copy` is that of a plain copy as large as the slot. `--device cuda:0` measures on a GPU.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.scenario import Bench
from bench.timing import seconds_of
from kvbridge.device.copier import BlockCopier, CpuBlockCopier, Moved
from kvbridge.geometry.plan import Part, Plan, plan
from kvbridge.geometry.shard import assign
from testing.carried import Mapped
from testing.oracle import Shape, block_table, describe, mla, tables_of
from testing.pools import LAYOUTS, ranks_of

SLOT_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
GQA = Shape(layers=16, kv_heads=8, key_width=128, value_width=128)
LATENT = mla(layers=27, block_tokens=64)


@dataclass(frozen=True, slots=True)
class Pair:
    """One line of the table. `like` is the equal pair that it is compared with."""

    name: str
    sender: Shape
    receiver: Shape
    like: str


CONVERSIONS = (
    Pair("bf16 -> bf16", GQA, GQA, "bf16 -> bf16"),
    Pair("bf16 -> fp8", GQA, replace(GQA, codec="fp8_e4m3", scales={"k": (0.05,), "v": (0.05,)}), "bf16 -> bf16"),
    Pair("bf16 -> fp8 row scales", GQA, replace(GQA, codec="fp8_row_scale"), "bf16 -> bf16"),
    Pair("bf16, CP 1 -> 8", GQA, replace(GQA, cp_size=8, cp_interleave=16), "bf16 -> bf16"),
    Pair("latent bf16 -> bf16", LATENT, LATENT, "latent bf16 -> bf16"),
    Pair("latent bf16, TP 8 -> 1", replace(LATENT, tp_size=8), LATENT, "latent bf16 -> bf16"),
    Pair("latent fp8_ds_mla -> bf16", replace(LATENT, codec="fp8_ds_mla"), LATENT, "latent bf16 -> bf16"),
    Pair("latent bf16 -> fp8_ds_mla", LATENT, replace(LATENT, codec="fp8_ds_mla"), "latent bf16 -> bf16"),
    Pair("latent bf16, CP 1 -> 8", LATENT, replace(LATENT, cp_size=8), "latent bf16 -> bf16"),
)
PAIRS = (
    *CONVERSIONS,
    *(
        Pair(layout, replace(GQA, layout=layout), replace(GQA, layout=layout), "bf16 -> bf16")
        for layout in LAYOUTS
        if layout != GQA.layout
    ),
    Pair("hnd -> nhd, block 128 -> 16", replace(GQA, layout="hnd", block_tokens=128), GQA, "bf16 -> bf16"),
)


class Side:
    """One engine rank with its own memory, and its parts of a plan."""

    def __init__(self, shape: Shape, ranks: tuple[int, int, int], tokens: int, device: str, seed: int) -> None:
        shape = replace(shape, blocks=-(-tokens // shape.block_tokens) + 8)
        self.pool = describe(shape, *ranks)
        memories = [torch.randint(0, 100, (r.size_bytes,), dtype=torch.uint8, device=device) for r in self.pool.regions]
        self.mapped = Mapped(self.pool, memories)
        self._tables = block_table(self.pool, tables_of(self.pool, tokens, seed), 0, tokens)

    def parts(self, planned: Plan, is_sender: bool) -> list[Part]:
        return [Part(planned, planned.chunk(i), self._tables, is_sender) for i in range(planned.chunks)]


def times(pair: Pair, tokens: int, rounds: int, copier: BlockCopier, device: str) -> tuple[int, float, float]:
    """Bytes on the wire, and the median seconds of gathering and of scattering them."""
    slot_bytes = SLOT_BYTES[device.partition(":")[0]]
    sender = Side(pair.sender, ranks_of(pair.sender)[0], tokens, device, 1)
    receiver = Side(pair.receiver, ranks_of(pair.receiver)[0], tokens, device, 2)
    takes = assign([describe(pair.sender, *ranks) for ranks in ranks_of(pair.sender)], receiver.pool)[0]
    planned = plan(sender.pool, receiver.pool, takes, 0, tokens, slot_bytes)
    assert planned.chunks, f"{pair.name}: the first ranks have nothing in common"
    gathering, scattering, kind = [], [], copier.digests[0]
    with closing(copier.staging(slot_bytes, 1)) as slots:
        for _ in range(rounds + 1):
            gathered = scattered = 0.0
            for ours, theirs in zip(sender.parts(planned, True), receiver.parts(planned, False), strict=True):
                slot = slots.span(0, ours.chunk.size_bytes)
                started = time.perf_counter()
                copier.gather(sender.mapped, ours, slot, kind)
                moved = over(copier)
                halfway = time.perf_counter()
                copier.scatter(receiver.mapped, theirs, slot, kind, moved.digest)
                over(copier)
                gathered += halfway - started
                scattered += time.perf_counter() - halfway
            gathering.append(gathered)
            scattering.append(scattered)
    return planned.total_bytes, statistics.median(gathering[1:]), statistics.median(scattering[1:])


def over(copier: BlockCopier) -> Moved:
    while not (moved := copier.poll()):
        pass
    assert moved[0].failure is None, moved[0].failure
    return moved[0]


def copier_of(device: str) -> BlockCopier:
    if device == "cpu":
        return CpuBlockCopier()
    from kvbridge.device.copier_gpu import GpuBlockCopier
    from kvbridge.device.driver import Gpu

    return GpuBlockCopier(Gpu.open(device), 4)


def measure(bench: Bench, *, device: str = "cpu", tokens: int = 2048, rounds: int = 5) -> dict[str, Any]:
    torch.set_num_threads(1)
    copier = copier_of(device)
    rows, whole = [], {}
    for pair in PAIRS:
        size, gathered, scattered = times(pair, tokens, rounds, copier, device)
        whole[pair.name] = size, gathered + scattered
        equal_bytes, equal_s = whole[pair.like]
        rows.append(
            {
                "pair": pair.name,
                "wire_bytes": size,
                "gather": round(size / gathered / 1e9, 2),
                "scatter": round(size / scattered / 1e9, 2),
                "ms": round((gathered + scattered) * 1e3, 3),
                "wire_of_equal": round(size / equal_bytes, 3),
                "time_of_equal": round((gathered + scattered) / equal_s, 3),
            }
        )
        bench.show(rows[-1])
    copier.close()
    bench.name += "" if device == "cpu" else "_gpu"
    found = {"unit": "GB/s", "device": device, "tokens": tokens, "copy": copy_rate(device, rounds), "rows": rows}
    bench.show({"what": "a plain copy, GB/s", "copy": found["copy"]})
    return found


def copy_rate(device: str, rounds: int) -> float:
    """GB/s of a plain copy as large as a slot."""
    ours, theirs = (torch.zeros(SLOT_BYTES[device.partition(":")[0]], dtype=torch.uint8, device=device) for _ in "ab")

    def copy(_: int) -> None:
        theirs.copy_(ours)
        if ours.is_cuda:
            torch.cuda.synchronize()

    return round(ours.numel() / statistics.median(seconds_of(copy, rounds, warm=1)) / 1e9, 2)
