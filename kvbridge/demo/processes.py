"""Agents and engines of a demo as child processes: started together, watched, always ended."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvbridge_proto.status import Status

from ..commands.status import ask
from ..config import flag_of
from ..errors import OperatorError

START_S = 40.0
STOP_S = 15.0


class AgentProcess:
    """One `kvbridge agent`."""

    def __init__(self, folder: Path, name: str, options: dict[str, str]) -> None:
        self.name = name
        self.options = options
        self.socket = str(folder / f"{name}.sock")
        self.log = folder / f"{name}.log"
        said = {"name": name, "socket": self.socket, "listen": "tcp://127.0.0.1:0", "metrics": "", **options}
        flags = [part for option, value in said.items() for part in (flag_of(option), value)]
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "kvbridge.cli", "agent", *flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.address = ""

    def wait_serving(self) -> None:
        """Raises OperatorError (`agent_start`) with the end of its log."""
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
        raise OperatorError("agent_start", f"agent {self.name} does not serve; its log ends:\n{self.tail()}")

    def status(self) -> Status:
        return ask(self.socket, 5.0)

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class EngineProcess:
    """One rank of an engine; it speaks JSON lines."""

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
        """Whether `hear` would not wait."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def hear(self, event: str, seconds: float = START_S) -> dict[str, Any]:
        """Its next line, which must be this event. Raises OperatorError (`demo_engine`)."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        told: dict[str, Any] = json.loads(line) if line else {}
        if told.get("event") == event:
            return told
        why = told.get("reason") or (self.log.read_text(errors="replace")[-2000:] if ready else "it says nothing")
        raise OperatorError("demo_engine", f"engine {self.name}: {why}")


@contextmanager
def agents(
    folder: Path, names: Sequence[str], devices: Sequence[str] = ("cpu",), **options: str
) -> Iterator[list[AgentProcess]]:
    """Agents that serve, `devices` dealt out to them in turn; stopped at the end."""
    with ExitStack() as stack:
        started = []
        for i, name in enumerate(names):
            started.append(AgentProcess(folder, name, {"device": devices[i % len(devices)], **options}))
            stack.callback(end, started[-1].process)
        for agent in started:
            agent.wait_serving()
        yield started


def moved_bytes(agent: AgentProcess) -> float:
    """What this agent, as a sink, has taken over so far."""
    return agent.status().counters.get("kvbridge_wire_bytes_total{role=sink}", 0.0)


def end(process: subprocess.Popen[Any]) -> None:
    """Ask it to stop, then make it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
