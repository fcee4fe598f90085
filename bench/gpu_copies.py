"""What plain copies reach on this machine; a process of its own, told what to do by JSON as its argument.

Prints one line of JSON: for every path and size the time of a copy alone (as something that waits for it sees it) and
of one among many enqueued together (the rate of the hardware). The latter is the ceiling that results are held against.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

LARGEST_PINNED = 1 << 30  # pinned pages are slow to come by
ALONE = 15
TOGETHER_S = 0.05


def measure(sender: str, receiver: str, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Every path in turn."""
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


def timed(target: torch.Tensor, sender: torch.Tensor, devices: set[str]) -> dict[str, float]:
    """Seconds of a copy alone (median) and among many."""
    for _ in range(2):
        target.copy_(sender, non_blocking=True)
    alone = []
    for _ in range(ALONE):
        wait(devices)
        began = time.perf_counter()
        target.copy_(sender, non_blocking=True)
        wait(devices)
        alone.append(time.perf_counter() - began)
    alone_s = sorted(alone)[ALONE // 2]
    count = max(3, min(300, int(TOGETHER_S / alone_s)))
    began = time.perf_counter()
    for _ in range(count):
        target.copy_(sender, non_blocking=True)
    wait(devices)
    return {"alone_s": alone_s, "together_s": (time.perf_counter() - began) / count}


def wait(devices: set[str]) -> None:
    for device in devices - {"cpu"}:
        torch.cuda.synchronize(device)


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(list(measure(**json.loads(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
