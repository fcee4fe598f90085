"""An engine in a process of its own, for tests: it holds GPU memory, exports it, writes it late, and dies when told.

`Engine` is the test's end. The other end is this module run as a program, which gets one command per datagram.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from kvbridge_proto.pool import Handle

ANSWER_S = 90.0
MESSAGE_BYTES = 1 << 20
LARGE = 3 << 20


class Told(Exception):
    """The engine raised; `code` as it said."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Engine:
    """Started with `environment` on top of ours; killed at the end."""

    def __init__(self, **environment: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        command = [sys.executable, "-m", "tests.system.gpu.engine", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **environment})
        theirs.close()
        self.fds: list[int] = []

    def ask(self, verb: str, *arguments: Any) -> Any:
        """What the verb returned; the fds it sent are kept in `fds`. Raises Told."""
        self._socket.send(json.dumps([verb, *arguments]).encode())
        answer, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 64)
        self.fds += fds
        told = json.loads(answer) if answer else {"code": "died", "text": "the engine died"}
        if "code" in told:
            raise Told(told["code"], told["text"])
        return told["value"]

    def export(self, kind: str, sizes: list[int]) -> tuple[Handle, ...]:
        """Handles of new memory, a region for each size; the fds of former exports are closed."""
        self.close_fds()
        return msgspec.json.decode(json.dumps(self.ask("export", kind, sizes)), type=tuple[Handle, ...])

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._socket.close()
        self.close_fds()


def pattern(size_bytes: int, seed: int, device: str) -> torch.Tensor:
    """Bytes that differ from place to place and from seed to seed."""
    places = torch.arange(size_bytes, dtype=torch.int64, device=device)
    return ((places * 2654435761 + seed * 40503) >> 13 & 0xFF).to(torch.uint8)


def free_bytes() -> int:
    """Of cuda:0."""
    from cuda.bindings import driver as cuda

    from kvbridge.device.driver import Gpu

    with Gpu.open("cuda:0").current():
        result, found, _ = cuda.cuMemGetInfo()
    assert result == 0, result
    return int(found)


def _done(answer: tuple[Any, Any]) -> Any:
    """What a call of the driver returned."""
    result, found = answer
    assert result == 0, result
    return found


class Program:
    """The engine itself."""

    def __init__(self) -> None:
        self.regions: list[torch.Tensor] = []
        self.kept: list[Any] = []
        self.fence: Any = None
        self.aside: Any = None

    def export(self, kind: str, sizes: list[int]) -> tuple[Any, list[int]]:
        from kvbridge.device.handles import export_all

        self.regions.clear()
        self.kept.clear()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()  # makes the context, which the driver's own calls need
        made = [getattr(self, f"make_{kind}")(size) for size in sizes]
        handles, fds = export_all(region.untyped_storage() for region in made)
        self.regions = made
        return json.loads(msgspec.json.encode(handles)), fds

    def make_torch(self, size_bytes: int) -> torch.Tensor:
        """Somewhere inside one of the caching allocator's blocks."""
        self.kept.append(torch.empty(LARGE, dtype=torch.uint8, device="cuda"))
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    def make_virtual(self, size_bytes: int, is_exportable: bool = True) -> torch.Tensor:
        """What vLLM's sleep mode does: one piece of physical memory, mapped."""
        from cuda.bindings import driver as cuda

        from kvbridge.device import driver
        from kvbridge.device.mapping import wrap

        gpu, location, properties = driver.Gpu.open("cuda:0"), cuda.CUmemLocation(), cuda.CUmemAllocationProp()
        location.type, location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal
        properties.type, properties.location = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location
        if is_exportable:
            kinds = cuda.CUmemAllocationHandleType
            properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        smallest = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with gpu.current():
            granule = int(_done(cuda.cuMemGetAllocationGranularity(properties, smallest)))
            whole = -(-size_bytes // granule) * granule
            address = driver.vmm_map(gpu, int(_done(cuda.cuMemCreate(whole, properties, 0))), whole)
        return wrap(address, size_bytes, gpu)

    def make_closed(self, size_bytes: int) -> torch.Tensor:
        return self.make_virtual(size_bytes, is_exportable=False)

    def make_managed(self, size_bytes: int) -> torch.Tensor:
        from cuda.bindings import driver as cuda

        everywhere = cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
        return self._made(size_bytes, _done(cuda.cuMemAllocManaged(size_bytes, everywhere)))

    def make_pooled(self, size_bytes: int) -> torch.Tensor:
        from cuda.bindings import driver as cuda

        return self._made(size_bytes, _done(cuda.cuMemAllocAsync(size_bytes, 0)))

    def _made(self, size_bytes: int, address: Any) -> torch.Tensor:
        from kvbridge.device.driver import Gpu
        from kvbridge.device.mapping import wrap

        torch.cuda.synchronize()
        return wrap(int(address), size_bytes, Gpu.open("cuda:0"))

    def write(self, seed: int) -> tuple[Any, list[int]]:
        for index, region in enumerate(self.regions):
            region.copy_(pattern(region.numel(), seed + index, "cuda"))
        torch.cuda.synchronize()
        return None, []

    def holds(self, seed: int) -> tuple[Any, list[int]]:
        """Whether every region has what `write` of that seed would have written."""
        found = [torch.equal(r, pattern(r.numel(), seed + i, "cuda")) for i, r in enumerate(self.regions)]
        return all(found), []

    def fence_page(self) -> tuple[Any, list[int]]:
        from kvbridge.device.fence import EngineFence

        self.fence = EngineFence("cuda:0")
        self.aside = torch.cuda.Stream()  # the first one makes a pool of them, which waits for the device
        self.aside.wait_stream(torch.cuda.current_stream())
        return None, [self.fence.fd]

    def write_late(self, seed: int, cycles: int) -> tuple[Any, list[int]]:
        """The count of a mark behind a long kernel and a write; returns before either has run."""
        ready = [pattern(region.numel(), seed + index, "cuda") for index, region in enumerate(self.regions)]
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        for region, values in zip(self.regions, ready, strict=True):
            region.copy_(values)
        self.kept.append(ready)
        return self.fence.mark(), []

    def mark_aside(self) -> tuple[Any, list[int]]:
        """A mark on another stream, which has nothing to do."""
        with torch.cuda.stream(self.aside):
            return self.fence.mark(), []


def main() -> None:
    program, channel = Program(), socket.socket(fileno=int(sys.argv[1]))
    while message := channel.recv(MESSAGE_BYTES):
        verb, *arguments = json.loads(message)
        try:
            value, fds = getattr(program, verb)(*arguments)
        except Exception as error:
            answer = {"code": getattr(error, "code", type(error).__name__), "text": str(error)}
            channel.send(json.dumps(answer).encode())
            continue
        socket.send_fds(channel, [json.dumps({"value": value}).encode()], fds)


if __name__ == "__main__":
    main()
