"""Runs agents as child processes: starts them together, watches them, and always ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvbridge_proto.status import Status

from ..errors import OperatorError
from ..local_agents import ask
from ..options import flag_of

AGENT_START_S = 180.0
AGENT_STOP_S = 15.0
# The kernel sends an agent SIGTERM when the thread that started it ends, for any reason (PR_SET_PDEATHSIG is 1).
BOUND = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); from kvbridge.cli import main; main()"


class AgentProcess:
    """One `kvbridge agent`, which does not outlive us. `settings` are added to its environment."""

    code = BOUND

    def __init__(
        self,
        folder: Path,
        name: str,
        options: dict[str, str],
        settings: Mapping[str, str] | None = None,
        log: str | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self.socket = str(folder / f"{name}.sock")
        self.log = folder / (log or f"{name}.log")
        given = {"name": name, "socket": self.socket, "listen": "tcp://127.0.0.1:0", "metrics": "", **options}
        flags = [part for option, value in given.items() for part in (flag_of(option), value)]
        with self.log.open("wb") as output:
            told = ["env", *(f"{key}={value}" for key, value in (settings or {}).items())]
            command = [*told, sys.executable, "-c", self.code, "agent", *flags]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )  # a Ctrl-C is for us alone
        self.address = ""

    def wait_serving(self) -> None:
        """Wait until the agent serves. Raises OperatorError (`agent_start`) with the end of its log."""
        end = time.monotonic() + AGENT_START_S
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


def tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


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
            given = {"device": devices[i % len(devices)], **options, **own}
            started.append(AgentProcess(folder, name, given, settings))
            stack.callback(end, started[-1].process)
        for agent in started:
            agent.wait_serving()
        yield started


def end(process: subprocess.Popen[Any]) -> None:
    """Ask it to stop; after AGENT_STOP_S kill it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(AGENT_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
