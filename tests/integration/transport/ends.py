"""Both ends of the unix socket, for tests: a served path, raw and real engines on it, descriptors to send."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.transport.local import LocalConnection, LocalServer
from kvbridge.transport.lock import Lock

Story = Callable[[LocalServer], Awaitable[None]]
BOOT = "0123456789abcdef"


def run(path: Path, story: Story) -> None:
    async def tell() -> None:
        async with asyncio.timeout(20), served(path) as server:
            await story(server)

    asyncio.run(tell())


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[LocalServer]:
    with contextlib.closing(Lock(path, BOOT)) as lock:
        async with LocalServer(lock) as server:
            yield server


async def meet(server: LocalServer) -> tuple[socket.socket, LocalConnection]:
    """A raw engine's end, to say anything on, and the agent's."""
    engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    engine.connect(str(server.path))
    return engine, await server.accept()


async def polled(client: EngineClient, count: int = 1) -> list[object]:
    heard: list[object] = []
    while len(heard) < count and client.is_connected:
        heard += client.poll()
        await asyncio.sleep(0.001)
    return heard


def pipes(count: int) -> list[int]:
    """Write ends, told apart by `inode`."""
    ends = []
    for _ in range(count):
        read, write = os.pipe()
        os.close(read)
        ends.append(write)
    return ends


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def open_fds() -> int:
    gc.collect()  # what earlier tests left to it must not close between two counts
    return len(os.listdir("/proc/self/fd"))
