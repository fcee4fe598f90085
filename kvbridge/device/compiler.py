"""Compiles kernels on a thread of its own, so that who moves something else does not wait.

Triton keeps what it compiles in a cache that outlives the process (TRITON_CACHE_DIR).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from kvbridge_kernels.launch import Kernel, Launch
from kvbridge_kernels.tables import Work

from . import driver
from .copier import Compiling


class Compiler:
    """For one GPU. On the caller's thread, but for what it compiles."""

    def __init__(self, gpu: driver.Gpu) -> None:
        self._thread = ThreadPoolExecutor(1, "kvbridge-compiler", lambda: _use(gpu))
        self._begun: dict[Kernel, Future[None]] = {}

    def begin(self, launches: Sequence[Launch], work: Work) -> Compiling:
        """Compile what these need and is not being compiled yet. Raises what was wrong when it was tried before."""
        under_way = []
        for launch in launches:
            begun = self._begun.get(launch.kernel)
            if begun is not None and begun.done():
                del self._begun[launch.kernel]
                if (error := begun.exception()) is not None:
                    raise error
                continue  # since it was found missing
            if begun is None:
                begun = self._begun[launch.kernel] = self._thread.submit(launch.prepare, work)
            under_way.append(begun)
        return Compiling(lambda: all(each.done() for each in under_way))

    def call(self, compiles: Callable[[], None]) -> None:
        """Have this called on the thread. Nobody waits for it; what it raises is lost."""
        self._thread.submit(compiles)

    def close(self) -> None:
        """Wait for what is being compiled, and begin nothing more. Idempotent."""
        self._thread.shutdown(cancel_futures=True)


def _use(gpu: driver.Gpu) -> None:
    """What is launched for no tiles waits for nobody's stream."""
    torch.cuda.set_device(gpu.ordinal)
    torch.cuda.set_stream(torch.cuda.ExternalStream(driver.new_stream(gpu), gpu.ordinal))  # type: ignore[no-untyped-call]
