"""An ASGI program that serves in this process, for a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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
