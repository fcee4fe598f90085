"""Another tenant of a GPU: keeps it full and measures its own steps. Takes commands in lines of JSON.

A step of `gemm` is one 8192^3 bf16 matrix product. A step of `decode` is like a decode step of Llama-8B with 64
requests: 32 layers of 64-row products with large weights, and small kernels between them, in one CUDA graph. Two steps
are always enqueued, so that the GPU never waits for this process.
"""

from __future__ import annotations

import select
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.processes import answer

AHEAD = 2
ROWS, HIDDEN, INNER, LAYERS = 64, 4096, 14336, 32
LARGE = 8192


def gemm(device: str) -> Callable[[], None]:
    size = LARGE if device != "cpu" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b, c = torch.randn_like(a), torch.empty_like(a)

    def step() -> None:
        torch.mm(a, b, out=c)

    return step


def decode(device: str) -> Callable[[], None]:
    scale = 1 if device != "cpu" else 32
    hidden, inner, layers = HIDDEN // scale, INNER // scale, LAYERS // scale
    weights = [
        tuple(
            torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / rows**0.5
            for rows, columns in ((hidden, hidden), (hidden, hidden), (hidden, inner), (inner, hidden))
        )
        for _ in range(layers)
    ]
    x = torch.randn(ROWS, hidden, device=device, dtype=torch.bfloat16)

    def layer(y: torch.Tensor, q: torch.Tensor, o: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = y + torch.nn.functional.silu(y @ q) @ o
        y = y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(y.dtype)
        return y + torch.nn.functional.silu(y @ up) @ down

    def step() -> None:
        y = x
        for each in weights:
            y = layer(y, *each)

    if device == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(held: object = step) -> None:  # `held` keeps the weights alive, which the graph does not
        graph.replay()

    return replay


class Load:
    """Runs steps until it is told to stop."""

    def __init__(self) -> None:
        self._device = ""
        self._steps: list[tuple[float, float]] = []
        self._step: Callable[[], None] | None = None

    def start(self, kind: str, device: str) -> None:
        """Begin to run steps of this kind, after some warm-up steps that do not count."""
        self._device = device
        if device != "cpu":
            torch.cuda.set_device(device)
        self._step = {"gemm": gemm, "decode": decode}[kind](self._device)
        for _ in range(5):
            self._step()
        self._synchronize()
        self._steps = []

    def stop(self) -> dict[str, list[tuple[float, float]]]:
        """For every step: when it ended, on the monotonic clock, and the seconds since the one before ended."""
        self._step = None
        self._synchronize()
        return {"steps": self._steps}

    def run(self) -> None:
        """Serve commands. Between them, run steps."""
        ends: deque[Any] = deque()
        before: Any = None
        while True:
            if self._step is None:
                ends.clear()
                before = None
            if self._step is None or select.select([sys.stdin], [], [], 0)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                answer(self, line)
                continue
            self._step()
            ends.append(self._now())
            if len(ends) <= AHEAD:
                continue
            end = ends.popleft()
            seconds = self._between(before, end)
            if seconds is not None:
                self._steps.append((time.monotonic(), seconds))
            before = end

    def _now(self) -> Any:
        """An event or a time that marks this point in the GPU's work."""
        if self._device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, end: Any) -> float | None:
        if self._device == "cpu":
            return None if before is None else end - before
        end.synchronize()
        return None if before is None else before.elapsed_time(end) / 1e3

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        Load().run()
