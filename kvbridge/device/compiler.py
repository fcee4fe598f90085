"""Compiles kernels on a thread of its own, so that other moves do not wait.

Triton keeps what it compiles in a cache that outlives the process (TRITON_CACHE_DIR).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from kvbridge_kernels.kernel import Kernel
from kvbridge_kernels.launch import Launch, prepare
from kvbridge_kernels.tables import Work

from . import driver
from .copier import Compiling


class Compiler:
    """The compiler for one GPU. Only the compilation itself runs on its own thread."""

    def __init__(self, gpu: driver.Gpu) -> None:
        self._thread = ThreadPoolExecutor(1, "kvbridge-compiler", lambda: _use(gpu))
        self._begun: dict[Kernel, Future[None]] = {}

    def begin(self, launches: Sequence[Launch], work: Work) -> Compiling:
        """Compile what these launches need, unless that is under way. Raises the error of an earlier attempt."""
        under_way = []
        for launch in launches:
            begun = self._begun.get(launch.kernel)
            if begun is not None and begun.done():
                del self._begun[launch.kernel]
                if (error := begun.exception()) is not None:
                    raise error
                continue  # compiled after the caller found it missing
            if begun is None:
                begun = self._begun[launch.kernel] = self._thread.submit(prepare, launch, work)
            under_way.append(begun)
        return Compiling(lambda: all(each.done() for each in under_way))

    def call(self, compiles: Callable[[], None]) -> None:
        """Call `compiles` on the thread, without waiting. What it raises is lost."""
        self._thread.submit(compiles)

    def close(self) -> None:
        """Wait for the compilation under way, and begin no other. Idempotent."""
        self._thread.shutdown(cancel_futures=True)


def _use(gpu: driver.Gpu) -> None:
    """Use a stream of the thread's own: the launch for no tiles must not wait for another stream."""
    torch.cuda.set_device(gpu.ordinal)
    torch.cuda.set_stream(torch.cuda.ExternalStream(driver.new_stream(gpu), gpu.ordinal))
