"""Both ends of the unix socket for tests: a served path, raw and real engines connected to it, descriptors to send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.transport.local import LocalConnection, LocalServer
from kvbridge.transport.lock import Lock

INCARNATION = "0123456789abcdef"
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
# Says what it is told to, and shows what it hears.
SPEAKER = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(2 if sys.argv[2:] else 0.5)
try:
    s.connect(sys.argv[1])
    if sys.argv[2:]:
        s.send(bytes.fromhex(sys.argv[2]))
    print(s.recv(9999))
except TimeoutError:
    pass
except OSError as error:
    print(type(error))
"""


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[LocalServer]:
    with contextlib.closing(Lock(path, INCARNATION)) as lock:
        async with LocalServer(lock) as server:
            yield server


async def meet(server: LocalServer) -> tuple[socket.socket, LocalConnection]:
    """A raw engine's end, to say anything on, and the agent's."""
    engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    engine.connect(str(server.path))
    return engine, await server.accept()


async def join(server: LocalServer) -> tuple[EngineClient, LocalConnection]:
    """An engine's end as engines have it, and the agent's."""
    client = EngineClient(server.path)
    assert client.connect(1)
    return client, await server.accept()


async def heard_by(uid: int, path: Path, *said: str, gid: int = 65534) -> bytes:
    """What a process of this user is told at the socket, if anything is, when it says these bytes."""
    command = ["/usr/bin/env", "python3", "-c", SPEAKER, str(path), *said]
    became = {"user": uid, "group": gid, "extra_groups": ()}
    ran = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, timeout=60, **became)
    return ran.stdout


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
