"""How far an engine's stream has come: a count in a shared page, written in stream order, read by its agent.

Used for every engine instead of CUDA's interprocess events: a page works across containers that share no /dev/shm, and
a dead engine leaves no stream of the agent waiting.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import threading

import torch

from ..errors import EngineError, OperatorError
from . import driver

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class EngineFence:
    """The engine's side, for one thread. `fd` is the page's, open until `close`; send it with Attach."""

    def __init__(self, device: str | torch.device) -> None:
        """Raises OperatorError `fence_unsupported` if the GPU cannot write in stream order."""
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._count = 0
        self._stream: torch.cuda.Stream | None = None
        self._gpu = driver.Gpu.open(str(self._device)) if self._device.type == "cuda" else None
        if self._gpu is not None and not self._gpu.has_stream_writes:
            raise OperatorError("fence_unsupported", f"{self._gpu.uuid}: its driver writes no 8 bytes in stream order")
        self.fd = os.memfd_create("kvbridge-fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._words = memoryview(self._page).cast("Q")
        self._barrier = threading.Lock()
        if self._gpu is not None:
            self._host = torch.frombuffer(self._page, dtype=torch.uint8).data_ptr()
            with self._gpu.current():
                self._address = driver.host_register(self._host, mmap.PAGESIZE)

    @property
    def upcoming(self) -> int:
        """What the next `mark` returns."""
        return self._count + 1

    def mark(self) -> int:
        """The next count. The page reaches it once all work enqueued on torch's current stream has finished.

        A count implies all counts before it. So a mark on another stream than the last makes that stream wait for the
        last one's work. Do not call it while a graph is captured.
        """
        self._count += 1
        if self._gpu is None:
            # Releasing and retaking the lock keeps the caller's earlier stores before the count, on any processor.
            with self._barrier:
                pass
            with self._barrier:
                self._words[0] = self._count
            return self._count
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        with self._gpu.current():
            driver.write_in_order(stream.cuda_stream, self._address, self._count)
        return self._count

    def close(self) -> None:
        """Waits for marks that are not written yet. Idempotent."""
        if self.fd < 0:
            return
        if self._gpu is not None:
            if self._stream is not None:
                self._stream.synchronize()
            with self._gpu.current():
                driver.host_unregister(self._host)
        self._words.release()
        self._page.close()
        os.close(self.fd)
        self.fd = -1


class FencePage:
    """The agent's side: only reads, never waits. One thread at a time."""

    def __init__(self, fd: int) -> None:
        """`fd` stays the caller's. EngineError `fence_unmappable` unless it is a sealed page of memory.

        If the engine could truncate the page, the agent's next read would kill the agent.
        """
        try:
            status = os.fstat(fd)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not stat.S_ISREG(status.st_mode) or not seals & fcntl.F_SEAL_SHRINK or status.st_size < mmap.PAGESIZE:
                reason = f"{status.st_size} bytes, seals {seals:#x}; must be a page of memory sealed against shrinking"
                raise EngineError("fence_unmappable", f"fence: {reason}")
            self._page = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise EngineError("fence_unmappable", f"fence: {error}") from error
        self._words = memoryview(self._page).cast("Q")

    def reached(self, count: int) -> bool:
        """Whether the work before that mark has finished. If so, its results are visible."""
        return self._words[0] >= count

    def close(self) -> None:
        """Idempotent. Do not call `reached` afterwards."""
        self._words.release()
        self._page.close()
