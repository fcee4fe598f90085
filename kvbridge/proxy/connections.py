"""Accepts clients' connections, as many as there may be. The oldest that has asked nothing makes room for the next."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from ..errors import OperatorError
from .limits import BACKLOG, TOLD
from .metrics import ProxyMetrics
from .sparing import SparingLog

READ_S = 1.0  # for a client to read why it is not served
FULL = b'{"error": {"message": "too many connections", "type": "engine_error", "param": null, "code": "busy"}}'
ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(FULL), FULL)
)


class Connections:
    """Makes a protocol for each connection of `server`."""

    def __init__(self, server: web.Server, most: int, metrics: ProxyMetrics, sparing: SparingLog) -> None:
        self._server, self._most, self._metrics, self._sparing = server, most, metrics, sparing
        self._serving: set[web.RequestHandler] = set()  # those that have sent a whole request, until it is answered
        self._ending: set[web.RequestHandler] = set()  # they have been closed, which takes the loop a moment
        self._told = 0
        metrics.connections.set_function(lambda: len(server.connections))
        metrics.most_connections.set(most)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
        """Yields the address. Raises OperatorError if it cannot listen there."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        try:
            listener = await loop.create_server(self._accept, host, port, backlog=BACKLOG)
        except OSError as error:
            raise OperatorError("bad_address", f"listen: cannot serve on {host}:{port}: {error}") from None
        try:
            yield listener.sockets[0].getsockname()[:2]
        finally:
            listener.close()

    @contextmanager
    def serving(self, request: web.Request) -> Iterator[None]:
        """While this request, which has come whole, is answered: its connection is not closed for another one."""
        self._serving.add(request.protocol)
        try:
            yield
        finally:
            self._serving.discard(request.protocol)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """asyncio tells of each connection that it cannot accept, thousands of times a second."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return self._sparing.say("descriptors", f"cannot accept connections: {error}")
        loop.default_exception_handler(context)

    def _accept(self) -> asyncio.Protocol:
        every = self._server.connections
        if len(every) < self._most or self._has_room(every):
            return self._server()
        self._metrics.connections_ended.labels("refused").inc()
        self._sparing.say("full", f"busy: answered 503: all {self._most} connections have requests under way")
        return _Refused(self)

    def _has_room(self, every: Sequence[web.RequestHandler]) -> bool:
        """Whether there is, or is after the oldest connection that has not sent a whole request was closed."""
        self._ending.intersection_update(every)
        alive = [each for each in every if each.connected and each not in self._ending]
        if len(alive) < self._most:
            return True
        oldest = next((each for each in alive if each not in self._serving), None)
        if oldest is None or oldest.transport is None:
            return False
        self._metrics.connections_ended.labels("made_room").inc()
        self._ending.add(oldest)
        oldest.transport.abort()
        return True

    def tell(self, transport: asyncio.Transport) -> None:
        if self._told >= TOLD:
            return transport.abort()
        self._told += 1
        transport.write(ANSWER)
        asyncio.get_running_loop().call_later(READ_S, self._end, transport)

    def _end(self, transport: asyncio.Transport) -> None:
        self._told -= 1
        transport.abort()


class _Refused(asyncio.Protocol):
    """Answers before anything is asked, and reads on, so that the client can read the answer."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._connections.tell(transport)
