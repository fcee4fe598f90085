"""Servers with real engines as child processes: starts them, asks them by HTTP, and ends them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvbridge.errors import OperatorError
from kvbridge.loopback.processes import tail

# The environment of real engines. Without the first two, steps stall for 200 ms at random on a two-core machine.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class ServerProcess:
    """A process that serves HTTP on `port` of this host, with the processes that it spawns."""

    def __init__(
        self, folder: Path, name: str, command: Sequence[str], port: int, settings: Mapping[str, str] | None = None
    ) -> None:
        """It logs to `folder` and runs in `folder`/rows. `settings` are added to its environment."""
        self.name = name
        self.port = port
        self.log = folder / f"{name}.log"
        told = ["env", *(f"{key}={value}" for key, value in (settings or {}).items()), *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                told,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder / "rows",
                process_group=0,  # not a session: Linux gives all sessions equal shares, whatever `nice` says inside
            )

    def wait_well(self, seconds: float) -> None:
        """Wait until /health answers 200. Raises OperatorError (`demo_engine`) with the end of its log."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            with suppress(OSError, HTTPException):
                if self._asked("GET", "/health", None, 5.0)[0] == 200:
                    return
            time.sleep(0.1)
        raise OperatorError("demo_engine", f"{self.name} does not serve; its log ends:\n{tail(self.log)}")

    def ask(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Its answer to this JSON. Raises OperatorError (`demo_engine`)."""
        try:
            status, text = self._asked("POST", path, json.dumps(body), seconds)
            if status == 200:
                return json.loads(text)
        except (OSError, HTTPException, ValueError) as error:
            status, text = 0, str(error)
        raise OperatorError("demo_engine", f"{self.name}: {status} {text}; its log ends:\n{tail(self.log)}")

    def page(self, path: str) -> str:
        """Its answer to a GET. Raises OperatorError (`demo_engine`)."""
        try:
            return self._asked("GET", path, None, 5.0)[1]
        except (OSError, HTTPException) as error:
            raise OperatorError("demo_engine", f"{self.name}: {error}; its log ends:\n{tail(self.log)}") from None

    def _asked(self, verb: str, path: str, body: str | None, seconds: float) -> tuple[int, str]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=seconds)) as connection:
            connection.request(verb, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def kill(self) -> None:
        """Kill it and all that it spawned, at once: it has nothing to save."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def python_with(engine: str, chosen: Path | None) -> str:
    """A Python that can import `vllm` or `sglang`, and kvbridge. Default: the one in .venv-ENGINE.

    Raises OperatorError (`no_vllm`, `no_sglang`).
    """
    code = "no_vllm" if engine == "vllm" else "no_sglang"
    python = chosen or Path(f".venv-{engine}/bin/python")
    hint = f"give one with --{engine}-python, or run make .venv-{engine}/.ready, which makes .venv-{engine}"
    if not os.access(python, os.X_OK):
        raise OperatorError(code, f"no Python at {python}: {hint}")
    asked = f"import importlib.util as u, sys; sys.exit(not (u.find_spec({engine!r}) and u.find_spec('kvbridge')))"
    if subprocess.run([str(python), "-c", asked], capture_output=True).returncode:
        raise OperatorError(code, f"{python} does not have both {engine} and kvbridge: {hint}")
    return str(python.absolute())


def free_port() -> int:
    """None that Linux gives by itself to whoever asks for any: an engine listens minutes after it is told its port."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with closing(socket.socket()) as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
