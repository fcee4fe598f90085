"""What plain copies reach on this machine. Runs as its own process.

For each path and size: the time of a single copy, as its caller sees it, and of one among many enqueued together, which
is the hardware's rate. The latter is the ceiling that results are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.processes import serve

LARGEST_PINNED = 1 << 30  # allocating pinned pages is slow
ALONE = 15
TOGETHER_S = 0.05


def measure(sender: str, receiver: str, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Measure every path in turn."""
    largest, devices = max(sizes), {sender, receiver}
    ours = torch.ones(largest, dtype=torch.uint8, device=sender)
    for path, device in (("inside", sender), ("between", receiver))[: len(devices)]:
        theirs = torch.zeros(largest, dtype=torch.uint8, device=device)
        for size in sizes:
            yield {"path": path, "bytes": size, **timed(theirs[:size], ours[:size], devices)}
        if not bool((theirs == 1).all()):
            raise RuntimeError(f"{path}: the copy is not what was copied")
        del theirs
    pinned = torch.zeros(min(largest, LARGEST_PINNED), dtype=torch.uint8, pin_memory=sender != "cpu")
    for size in sizes:
        if size <= pinned.numel():
            yield {"path": "to host", "bytes": size, **timed(pinned[:size], ours[:size], devices)}
            yield {"path": "from host", "bytes": size, **timed(ours[:size], pinned[:size], devices)}


def timed(target: torch.Tensor, source: torch.Tensor, devices: set[str]) -> dict[str, float]:
    """Seconds of a single copy (median) and of one among many."""
    for _ in range(2):
        target.copy_(source, non_blocking=True)
    alone = []
    for _ in range(ALONE):
        wait(devices)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(devices)
        alone.append(time.perf_counter() - began)
    alone_s = sorted(alone)[ALONE // 2]
    count = max(3, min(300, int(TOGETHER_S / alone_s)))
    began = time.perf_counter()
    for _ in range(count):
        target.copy_(source, non_blocking=True)
    wait(devices)
    return {"alone_s": alone_s, "together_s": (time.perf_counter() - began) / count}


def wait(devices: set[str]) -> None:
    for device in devices - {"cpu"}:
        torch.cuda.synchronize(device)


class Copies:
    """Every public method is a command."""

    def measured(self, sender: str, receiver: str, sizes: list[int]) -> dict[str, Any]:
        return {"copies": list(measure(sender, receiver, sizes))}


if __name__ == "__main__":
    serve(Copies())
