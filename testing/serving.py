"""What serves HTTP in this process, for a test: an ASGI program, or a handler of requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any

from testing.waiting import wait_for


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Its address, while it serves."""
    uvicorn: Any = import_module("uvicorn")  # not in every environment that these files are checked in
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, 60)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Answers(BaseHTTPRequestHandler):
    """A handler that answers whole texts or JSON, and logs nothing."""

    @property
    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, status: int, said: Any) -> None:
        text = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if isinstance(said, str) else "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def listening(handler: type[Answers]) -> Iterator[str]:
    """Its host and port, while it serves."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
