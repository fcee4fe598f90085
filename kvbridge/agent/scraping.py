"""Serves /metrics, /healthz, /status and /kept over HTTP.

Anybody who reaches the port may connect: connections are few and short. Its own threads answer; the loop makes only
/status.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ..errors import OperatorError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("kvbridge.metrics")

ALL_OPEN = 16
REQUEST_S = 5.0  # for a whole connection; Prometheus itself waits 10 s by default
POLL_S = 0.5
KEPT_S = 1.0
TEXT_PLAIN, JSON = "text/plain; charset=utf-8", "application/json"


def serve(
    registry: CollectorRegistry,
    why_ill: Callable[[], str],
    address: str,
    pages: Mapping[str, Callable[[], bytes]],
    request_s: float = REQUEST_S,
    lookups: Mapping[str, Callable[[str], bytes]] = MappingProxyType({}),
) -> Callable[[], None]:
    """Answer on `host:port`. Returns a function that stops it. Raises OperatorError.

    `why_ill` says why the agent needs a restart, or "". `pages` are further ones, in JSON, by their paths; so are
    `lookups`, which get the query. All are called on other threads; those of `pages` raise TimeoutError if they cannot
    be made, those of `lookups` ValueError if the query is wrong.
    """
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.removeprefix("[").removesuffix("]"), int(port), type=socket.SOCK_STREAM
        )[0]
        server = _server(family)((str(place[0]), int(port)), request_s)
    except (OSError, ValueError, OverflowError) as error:
        raise OperatorError("metrics_address", f"metrics: cannot serve on {address}: {error}") from None
    server.set_app(Pages(registry, why_ill, pages, lookups))
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="kvbridge-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return stop


class Pages:
    """The pages that are served. One thread makes one of them, at most once in KEPT_S; others wait for it.

    Making it holds the interpreter for more than a millisecond, and the loop and the data plane wait for that.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        why_ill: Callable[[], str],
        pages: Mapping[str, Callable[[], bytes]],
        lookups: Mapping[str, Callable[[str], bytes]],
    ) -> None:
        encode, kind = choose_encoder("")
        self._lookups = lookups
        self._looking_up = threading.Lock()  # one at a time, as they hold the interpreter
        self._why_ill = why_ill
        self._kept = {"/metrics": KeptPage(kind, lambda: encode(registry))}
        self._kept |= {path: KeptPage(JSON, make) for path, make in pages.items()}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        status, kind, text = "200 OK", TEXT_PLAIN, b"ok\n"
        path = environ["PATH_INFO"]
        if path == "/healthz":
            if why := self._why_ill():
                status, text = "503 Service Unavailable", f"{why}\n".encode()
        elif (kept := self._kept.get(path)) is not None:
            try:
                kind, text = kept.kind, kept.text()
            except TimeoutError:
                status, text = "503 Service Unavailable", b"the event loop does not come round\n"
        elif (lookup := self._lookups.get(path)) is not None:
            try:
                with self._looking_up:
                    kind, text = JSON, lookup(environ["QUERY_STRING"])
            except ValueError as error:
                status, text = "400 Bad Request", f"{error}\n".encode()
        else:
            status, text = (
                "404 Not Found",
                f"here are {', '.join([*self._kept, *self._lookups, '/healthz'])}\n".encode(),
            )
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(text)))])
        return [text]


class KeptPage:
    """A page that is made when it is asked for and older than KEPT_S."""

    def __init__(self, kind: str, make: Callable[[], bytes]) -> None:
        self.kind = kind
        self._make = make
        self._making = threading.Lock()
        self._text = b""
        self._ends = float("-inf")

    def text(self) -> bytes:
        with self._making:
            if time.monotonic() >= self._ends:
                self._text = self._make()
                self._ends = time.monotonic() + KEPT_S
            return self._text


def _server(family: socket.AddressFamily) -> type[_Server]:
    """A server class for this family: the library reads it from the class."""
    return type("_Server", (_Server,), {"address_family": family})


class _Request(WSGIRequestHandler):
    """One request. It is not logged: a frequent client would fill the log."""

    def log_message(self, format: str, *args: Any) -> None: ...


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per connection, ALL_OPEN at most. For one more the oldest is cut off. So are those that take too long.

    So silent connections keep nobody out. A socket timeout would not do: a client that sends a byte now and then never
    runs into it.
    """

    daemon_threads = True
    request_queue_size = 128  # with the library's 5 a flood delays the next client by a second

    def __init__(self, place: tuple[str, int], request_s: float) -> None:
        self._request_s = request_s
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # and when each is cut off
        self._ending: set[socket.socket] = set()  # cut off; their threads are about to close them
        super().__init__(place, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._open) >= ALL_OPEN
            has_space = not is_full or len(self._ending) < ALL_OPEN
            if is_full and has_space:
                self._end(next(iter(self._open)))
            if has_space:
                self._open[request] = time.monotonic() + self._request_s
        if has_space:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # or `_end` could hit a new connection with this descriptor
            self._open.pop(request, None)
            self._ending.discard(request)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by the library between connections, and every POLL_S."""
        self._cut(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._cut(float("inf"))

    def _cut(self, now: float) -> None:
        with self._lock:
            for request in [request for request, ends in self._open.items() if now > ends]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Shut it down. The thread that serves it reads its end, and closes it."""
        self._ending.add(request)
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request to the metrics port failed: %s", client_address, exc_info=True)
