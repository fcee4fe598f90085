"""A TCP proxy on loopback between two agents' control sockets, on its own thread, which can spoil what passes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

PIECE = 1 << 16


class Proxy:
    """Faults are attributes, set at any time; they hold for connections there are and those to come.

    `delay_s` holds every piece back; a `is_swallowing` one takes and answers nothing (half-open); `duplicates` and
    `truncates` spoil so many of the next pieces.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.is_swallowing = False
        self.duplicates = self.truncates = 0
        self.pieces = 0
        self.spoilt = 0
        self._target = ("", 0)
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())

    def through(self, address: str) -> str:
        """Where to dial to be taken to `address`."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, *, is_reset: bool) -> int:
        """End all connections, by RST or by FIN; how many that were."""
        return self._call(self._cut(is_reset))

    def heal(self) -> None:
        self.delay_s, self.is_swallowing, self.duplicates, self.truncates = 0.0, False, 0, 0

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, what: Coroutine[Any, Any, Any]) -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(what, self._loop)
        return done.result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        pair = (writer, there_writer)
        self._open.add(pair)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        self._open.discard(pair)
        for each in pair:
            each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE):
            self.pieces += 1
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(self._spoil(piece))
            await writer.drain()
        raise ConnectionResetError  # one direction ended: so does the other

    def _spoil(self, piece: bytes) -> bytes:
        how: Callable[[bytes], bytes] | None = None
        if self.is_swallowing:
            how = lambda whole: b""  # noqa: E731
        elif self.duplicates:
            self.duplicates -= 1
            how = lambda whole: whole * 2  # noqa: E731
        elif self.truncates:
            self.truncates -= 1
            how = lambda whole: whole[: len(whole) // 2]  # noqa: E731
        self.spoilt += how is not None
        return how(piece) if how else piece

    async def _cut(self, is_reset: bool) -> int:
        cut = list(self._open)
        for writer in (each for pair in cut for each in pair):
            if is_reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            else:
                writer.close()
        return len(cut)

    async def _close(self) -> None:
        self._server.close()
        await self._cut(False)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
