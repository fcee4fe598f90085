"""Runs agents and engines as child processes: starts them together, watches them, and always ends them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvbridge_proto.status import Status

from ..errors import OperatorError
from ..local_agents import ask
from ..options import flag_of

START_S = 40.0
STOP_S = 15.0
# The kernel sends an agent SIGTERM when the thread that started it ends, for any reason (PR_SET_PDEATHSIG is 1).
BOUND = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); from kvbridge.cli import main; main()"
# The environment of real engines. Without the first two, steps stall for 200 ms at random on a two-core machine.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class AgentProcess:
    """One `kvbridge agent`, which does not outlive us. `settings` are added to its environment."""

    def __init__(
        self, folder: Path, name: str, options: dict[str, str], settings: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.options = options
        self.socket = str(folder / f"{name}.sock")
        self.log = folder / f"{name}.log"
        said = {"name": name, "socket": self.socket, "listen": "tcp://127.0.0.1:0", "metrics": "", **options}
        flags = [part for option, value in said.items() for part in (flag_of(option), value)]
        with self.log.open("wb") as log:
            told = ["env", *(f"{key}={value}" for key, value in (settings or {}).items())]
            command = [*told, sys.executable, "-c", BOUND, "agent", *flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.address = ""

    def wait_serving(self) -> None:
        """Wait until the agent serves. Raises OperatorError (`agent_start`) with the end of its log."""
        end = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                status = self.status()
            except OperatorError:
                time.sleep(0.05)
                continue
            if status.state == "serving":
                self.address = status.agent.address
                return
        raise OperatorError("agent_start", f"agent {self.name} does not serve; its log ends:\n{tail(self.log)}")

    def status(self) -> Status:
        return ask(self.socket, 5.0)


class EngineProcess:
    """One rank of an engine, which speaks JSON lines."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
            )

    def go(self) -> None:
        self.say("go")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def is_heard(self) -> bool:
        """Whether `hear` would return at once."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def hear(self, event: str, seconds: float = START_S) -> dict[str, Any]:
        """Its next line, which must be this event. Raises OperatorError (`demo_engine`), also after `seconds`."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        told: dict[str, Any] = json.loads(line) if line else {}
        if told.get("event") == event:
            return told
        why = told.get("reason") or (self.log.read_text(errors="replace")[-2000:] if ready else "it says nothing")
        raise OperatorError("demo_engine", f"engine {self.name}: {why}")


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


def free_port() -> int:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


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


@contextmanager
def agents(
    folder: Path,
    names: Sequence[str],
    devices: Sequence[str] = ("cpu",),
    settings: Mapping[str, str] | None = None,
    routes_of: Mapping[str, str] | None = None,
    **options: str,
) -> Iterator[list[AgentProcess]]:
    """Yields agents that serve, and stops them at the end. They take `devices` in turn. `routes_of` is by name."""
    with ExitStack() as stack:
        started = []
        for i, name in enumerate(names):
            own = {"routes": routes_of[name]} if routes_of else {}
            said = {"device": devices[i % len(devices)], **options, **own}
            started.append(AgentProcess(folder, name, said, settings))
            stack.callback(end, started[-1].process)
        for agent in started:
            agent.wait_serving()
        yield started


def moved_bytes(agent: AgentProcess) -> float:
    """How many bytes this agent has received so far."""
    return agent.status().counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0)


def end(process: subprocess.Popen[Any]) -> None:
    """Ask it to stop; after STOP_S kill it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
