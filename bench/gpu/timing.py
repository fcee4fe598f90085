"""Times of calls on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM = 3
AHEAD_CYCLES = 20_000_000  # in which the host enqueues all rounds


def gpu_seconds(action: Callable[[int], object], rounds: int) -> float:
    """The median time of a call on the GPU. All rounds are enqueued before the first is read.

    `action` gets the number of the round.
    """
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for i in range(WARM):
        action(i)
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    for i, (begin, end) in enumerate(events):
        begin.record()
        action(i)
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3
