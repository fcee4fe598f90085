"""One end of a NIXL transfer between two processes, for ceilings and baseline. Takes commands in lines of JSON.

The process allocates its own memory (by cudaMalloc on a GPU, which UCX's cuda_ipc needs). A write is timed from its
post until NIXL says that it is done. Making the request is not counted.
"""

from __future__ import annotations

import base64
import os
import random
import time
from typing import Any

import torch

from bench.gpu.processes import serve

PATIENCE_S = 60.0
PROGRESS_DELAY_US = 1000  # 0, NIXL's default, would keep a core spinning


class NixlEnd:
    """Every public method is a command."""

    def open(self, name: str, device: str, size_bytes: int, is_sender: bool) -> dict[str, Any]:
        """Allocate and register. Returns how to reach the memory. Allocates first: NIXL must find a CUDA context."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        import nixl._bindings as nixl

        if device != "cpu":
            torch.cuda.set_device(device)
        self._memory = (
            pattern(size_bytes, device) if is_sender else torch.zeros(size_bytes // 8, dtype=torch.int64, device=device)
        )
        if device != "cpu":
            torch.cuda.synchronize()
        self._nixl, self._index = nixl, self._memory.device.index or 0
        self._segment = nixl.DRAM_SEG if device == "cpu" else nixl.VRAM_SEG
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread, config.pthrDelay = True, False, PROGRESS_DELAY_US
        self._agent, self._known = nixl.nixlAgent(name, config), set[str]()  # peers whose descriptors are loaded
        self._backend = self._agent.createBackend("UCX", {})
        region = nixl.nixlRegDList(self._segment, [(self._base, size_bytes, self._index, "")])
        self._agent.registerMem(region, [self._backend])
        descriptor = self._agent.getLocalPartialMD(region, True, [self._backend])
        return {"descriptor": base64.b64encode(descriptor).decode(), "base": self._base, "index": self._index}

    def write(
        self, peer: str, descriptor: str, base: int, index: int, total_bytes: int, piece_bytes: int, repeats: int
    ) -> dict[str, list[float]]:
        """Write the first `total_bytes` to the peer in pieces of `piece_bytes`, in random order on both sides."""
        nixl = self._nixl
        if peer not in self._known:
            self._agent.loadRemoteMD(base64.b64decode(descriptor))
            self._known.add(peer)
        places = list(range(0, total_bytes, piece_bytes))
        if len(places) > 1:
            random.Random(0).shuffle(places)
        ours = nixl.nixlXferDList(self._segment, [(self._base + at, piece_bytes, self._index) for at in places])
        theirs = nixl.nixlXferDList(self._segment, [(base + at, piece_bytes, index) for at in places])
        request = self._agent.createXferReq(nixl.NIXL_WRITE, ours, theirs, peer, b"", [self._backend])
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            state = self._agent.postXferReq(request, b"")
            while state == nixl.NIXL_IN_PROG:
                if time.perf_counter() - began > PATIENCE_S:
                    raise RuntimeError(f"{len(places)} x {piece_bytes} bytes are not done in {PATIENCE_S:g} s")
                state = self._agent.getXferStatus(request)
            seconds.append(time.perf_counter() - began)
        self._agent.releaseXferReq(request)
        return {"seconds": seconds}

    def wipe(self) -> None:
        self._memory.zero_()
        if self._memory.is_cuda:
            torch.cuda.synchronize()

    def check(self, total_bytes: int) -> dict[str, bool]:
        """Whether the sender's first `total_bytes` are here, at the same places."""
        expected = pattern(total_bytes, str(self._memory.device))
        return {"is_right": torch.equal(self._memory[: total_bytes // 8], expected)}

    @property
    def _base(self) -> int:
        return self._memory.data_ptr()


def pattern(size_bytes: int, device: str) -> torch.Tensor:
    return torch.arange(1, size_bytes // 8 + 1, device=device).mul_(0x9E3779B97F4A7C1)


if __name__ == "__main__":
    serve(NixlEnd())
    os._exit(0)  # a NIXL agent that lost its peer may hang at exit
