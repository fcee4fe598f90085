"""The processes of `python -m demo --upgrade-from`: two engines of each role, an agent for each, and a proxy."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from kvbridge.errors import OperatorError
from kvbridge.loopback.processes import AgentProcess, end
from testing.http_server import HttpServer

from .processes import SETTINGS, free_port
from .pythonpath import ROOT, of_demo_alone
from .servers import vllm_flags

START_S = 400.0  # start-up of an engine that shares two busy cores with three others and their clients
STEP_S = 60.0  # for anything else that we wait for
STOP_S = 30  # for an engine to finish what it has
OF_CPU = str(ROOT / "kvbridge/adapters/vllm/on_cpu.py")  # by its path: the wheel may not have it
BLOCKS = {"prefill": 32, "decode": 64}  # tokens; on a CPU vLLM's blocks are multiples of 32


class UpgradeMember:
    """One engine and its agent. Both keep their ports."""

    agent: AgentProcess
    engine: HttpServer

    def __init__(self, role: str, number: int) -> None:
        self.role = role
        self.name = f"{role}-{number}"
        self.port, self.agent_port = free_port(), free_port()

    @property
    def line(self) -> str:
        """Its line in the proxy's file."""
        return f"{self.role} vllm=http://127.0.0.1:{self.port}"


class UpgradeFleet:
    """All processes, with files in `folder`; they end with `stack`. Upgrades go from `wheel` to this kvbridge."""

    proxy: HttpServer

    def __init__(self, folder: Path, stack: ExitStack, python: str, wheel: Path) -> None:
        self.members = [UpgradeMember(role, number) for role in ("decode", "prefill") for number in (1, 2)]
        self._folder = folder
        self._stack = stack
        self._python = python
        self._listed = folder / "engines"
        self._fetched = 0.0  # tokens, by agents that are gone
        self._runs = folder / "runs"  # where no kvbridge is found but that which is told
        self._runs.mkdir()
        model = str(folder / "model")
        subprocess.run([python, "-m", "demo.model", model], check=True, capture_output=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheel")
        # An agent or engine must not import this kvbridge from the folder that it is started in.
        self._of_wheel = of_demo_alone(folder, folder / "wheel")
        self._of_this = of_demo_alone(folder)
        for each in (sys.executable, python):
            self._check(each)

    def start(self) -> None:
        """Start all with the wheel's kvbridge, except the proxy, which runs ours. Returns when they are ready."""
        for member in self.members:
            self._start_agent(member, self._of_wheel)
        for member in self.members:
            member.agent.wait_serving()
            self._start_engine(member, self._of_wheel)
        for member in self.members:
            member.engine.wait_up(seconds=START_S)
        self._list(self.members)
        port = free_port()
        command = [sys.executable, "-m", "kvbridge.cli", "proxy", "--engines", str(self._listed)]
        self.proxy = HttpServer([*command, "--listen", f"127.0.0.1:{port}"], port, self._runs / "proxy.log")
        self._stack.callback(self.proxy.kill)
        self.proxy.wait_up(seconds=STEP_S)
        wait("the proxy to take all engines", lambda: all(map(self._is_healthy, self.members)))

    def upgrade_agent(self, member: UpgradeMember) -> tuple[float, float]:
        """Returns the seconds until the agent had drained, and from then until the engine attached to the new one."""
        began = time.monotonic()
        self._fetched += fetched_by(member)  # what it fetches while it drains is not counted
        member.agent.process.terminate()
        wait(f"agent {member.name} to drain", lambda: member.agent.process.poll() is not None)
        drained = time.monotonic()
        self._start_agent(member, self._of_this)
        member.agent.wait_serving()
        wait(f"{member.name} to attach", lambda: member.agent.status().engine is not None)
        return drained - began, time.monotonic() - drained

    def upgrade_engine(self, member: UpgradeMember) -> tuple[float, float]:
        """Returns the seconds until the engine had nothing under way, and from then until the new one got requests."""
        began = time.monotonic()
        self._list([each for each in self.members if each is not member])
        self.proxy.process.send_signal(signal.SIGHUP)
        wait(f"{member.name} to finish", lambda: not self._is_healthy(member) and not self._outstanding(member))
        finished = time.monotonic()
        end(member.engine.process)
        member.engine.kill()  # processes that it may have left behind
        self._start_engine(member, self._of_this)
        member.engine.wait_up(seconds=START_S)
        wait(f"{member.name} to attach", lambda: member.agent.status().engine is not None)
        self._list(self.members)
        self.proxy.process.send_signal(signal.SIGHUP)
        wait(f"the proxy to take {member.name}", lambda: self._is_healthy(member))
        return finished - began, time.monotonic() - finished

    def fetched(self) -> float:
        """How many prompt tokens decode engines have fetched so far, instead of computing them."""
        return self._fetched + sum(map(fetched_by, self.members))

    def _check(self, python: str) -> None:
        """Raises OperatorError (`demo_engine`) if this Python would not import the wheel's kvbridge."""
        settings = [f"{key}={value}" for key, value in self._of_wheel.items()]
        asked = ["env", *settings, python, "-c", "import kvbridge; print(kvbridge.__file__)"]
        found = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        if not found.startswith(str(self._folder / "wheel")):
            raise OperatorError("demo_engine", f"{python} finds kvbridge at {found!r}, not in the wheel")

    def _start_agent(self, member: UpgradeMember, version: dict[str, str]) -> None:
        options = {"device": "cpu", "slot_bytes": str(1 << 20), "listen": f"tcp://127.0.0.1:{member.agent_port}"}
        member.agent = AgentProcess(self._folder, member.name, options, version)
        self._stack.callback(end, member.agent.process)

    def _start_engine(self, member: UpgradeMember, version: dict[str, str]) -> None:
        flags = vllm_flags(str(self._folder / "model"), BLOCKS[member.role], member.agent.socket, "recompute")
        command = [
            # vLLM's processes spin while they wait for each other, so agents and clients get priority.
            *("nice", "-n", "10", self._python, OF_CPU, *flags, "--shutdown-timeout", str(STOP_S)),
            *("--host", "127.0.0.1", "--port", str(member.port)),
        ]
        settings = SETTINGS | VLLM_SERVER | version
        member.engine = HttpServer(command, member.port, self._runs / f"{member.name}-engine.log", settings)
        self._stack.callback(member.engine.kill)

    def _list(self, members: Sequence[UpgradeMember]) -> None:
        self._listed.write_text("".join(f"{member.line}\n" for member in members))

    def _is_healthy(self, member: UpgradeMember) -> bool:
        return self._gauge("healthy", member) == 1

    def _outstanding(self, member: UpgradeMember) -> float:
        return self._gauge("outstanding", member)

    def _gauge(self, name: str, member: UpgradeMember) -> float:
        role, _, engine = member.line.partition(" ")
        wanted = f'kvbridge_proxy_engine_{name}{{engine="{engine}",role="{role}"}} '
        values = [
            line.removeprefix(wanted) for line in self.proxy.answer("/metrics").splitlines() if line.startswith(wanted)
        ]
        return float(values[0]) if values else 0.0


def fetched_by(member: UpgradeMember) -> float:
    return member.agent.status().counters.get("kvbridge_prompt_tokens_fetched_total", 0.0)


def wait(what: str, holds: Callable[[], bool]) -> None:
    """Wait until `holds()`. Raises OperatorError (`demo_engine`) after STEP_S."""
    last = time.monotonic() + STEP_S
    while not holds():
        if time.monotonic() > last:
            raise OperatorError("demo_engine", f"waited {STEP_S:g} s for {what}")
        time.sleep(0.1)
