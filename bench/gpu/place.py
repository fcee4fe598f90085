"""Where a GPU bench runs, and how long it may: on one or two GPUs, or on the processor for a rehearsal."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvbridge_proto.peer import ROUTES

from bench.scenario import Bench
from kvbridge.doctor.routes import ON_GPU
from kvbridge.loopback.pools import Shape

MIB = 1 << 20
Extent = Literal["smoke", "quick", "full"]
PACKAGES = ("torch", "triton", "nixl", "cuda-bindings", "numpy", "pyzmq", "uvloop")
# Sizes in tokens of the shape; a Llama-8B token is 128 KiB: 1 MiB to 8 GiB.
TOKENS: dict[Extent, tuple[int, ...]] = {
    "smoke": (8, 64, 512),
    "quick": (8, 1024, 16384),
    "full": (8, 64, 256, 1024, 4096, 16384, 65536),
}


@dataclass(slots=True)
class Place:
    """`sender` and `receiver` are torch devices: equal on a machine with one GPU, "cpu" in a rehearsal."""

    bench: Bench
    sender: str
    receiver: str
    extent: Extent
    budget_s: float
    agent_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.sender != "cpu"

    @property
    def shape(self) -> Shape:
        """vLLM's defaults, NHD and block 16, of Llama-8B; fewer layers in a rehearsal. Memory says how many blocks."""
        return Shape(name="bench", axes="LPBTHE", block_tokens=16, blocks=0, layers=32 if self.is_gpu else 4)

    @property
    def tokens(self) -> tuple[int, ...]:
        return TOKENS[self.extent]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(tokens * self.shape.token_bytes for tokens in self.tokens)

    @property
    def routes(self) -> tuple[str, ...]:
        return tuple(route for route in ROUTES if self.is_gpu or route not in ON_GPU)

    def is_time_for(self, what: str, seconds: float) -> bool:
        left_s = self.budget_s - self.bench.spent_s
        if left_s < seconds:
            self.bench.problem(what, f"skipped: {left_s:.0f} s left, it takes about {seconds:.0f}")
        return left_s >= seconds


def versions() -> dict[str, str]:
    """The versions, besides the commit, that figures depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of every GPU. Empty if there is no nvidia-smi."""
    fields = ("name", "memory.total", "driver_version")
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    return [dict(zip(fields, (part.strip() for part in line.split(",")), strict=True)) for line in found if line]


def cores() -> int:
    return len(os.sched_getaffinity(0))
