"""A program that serves HTTP on a port of this host, started and asked by demo, bench and tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvbridge.errors import OperatorError
from kvbridge.loopback.processes import tail
from kvbridge.loopback.servers import ServerProcess

START_S, ANSWER_S = 180.0, 60.0


class HttpServer(ServerProcess):
    """It can be asked for more than its health."""

    def tail(self, lines: int = 60) -> str:
        return tail(self.log, lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, body: Any = None, seconds: float = ANSWER_S, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Status and text of the whole answer."""
        with self.opened(path, body, seconds, headers) as answer:
            return answer.status, answer.read().decode(errors="replace")

    def answer(self, path: str, body: Any = None, seconds: float = ANSWER_S) -> str:
        """The text of a good answer. Raises OperatorError (`demo_engine`)."""
        try:
            status, text = self.ask(path, body, seconds)
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, str(error)
        if status != 200:
            raise OperatorError("demo_engine", f"{self.name}: {status} {text}; its log ends:\n{self.tail()}")
        return text

    @contextlib.contextmanager
    def opened(
        self, path: str, body: Any = None, seconds: float = ANSWER_S, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer as it comes; its connection ends with the block, read or not."""
        with contextlib.closing(self.begun(path, body, seconds, headers)) as connection:
            yield connection.getresponse()

    def begun(
        self, path: str, body: Any = None, seconds: float = ANSWER_S, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """The request is sent, and nothing awaited: whoever closes the connection has gone away."""
        connection = self.connection(seconds)
        text = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", path, text, {"Content-Type": "application/json", **(headers or {})}
        )
        return connection

    def connection(self, seconds: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)

    def wait_up(self, path: str = "/health", seconds: float = START_S) -> None:
        """Raises OperatorError (`demo_engine`) with the end of its log."""
        end = time.monotonic() + seconds
        while not self.is_up(path):
            if self.process.poll() is not None or time.monotonic() > end:
                raise OperatorError("demo_engine", f"{self.name} does not serve; its log ends:\n{self.tail()}")
            time.sleep(0.2)

    def text(self) -> str:
        return self.log.read_text(errors="replace")
