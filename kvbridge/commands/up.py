"""`kvbridge up`: agents, vLLM engines and a proxy for one model on this machine, until Ctrl-C or until one ends."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvbridge_proto.status import Status

from ..adapters.vllm.on_cpu import VLLM_SERVER
from ..config import visible_gpus
from ..errors import OperatorError
from ..local_agents import ask
from ..loopback.processes import AgentProcess, end, tail
from ..loopback.servers import ONE_THREAD, ServerProcess, python_with, vllm_transfer
from ..proxy.server import read_listen

REST_S = 0.5  # between looks at what is not ready yet, and at what was carried
STOP_S = 15.0  # for an engine to end
LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine, before it is started. `devices` are those of its ranks, as agents name them."""

    role: str
    number: int
    port: int
    devices: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"

    def command(self, python: str, model: str, folder: Path) -> list[str]:
        module = "kvbridge.adapters.vllm.on_cpu" if "cpu" in self.devices else "vllm.entrypoints.cli.main"
        ranks = ["--tensor-parallel-size", str(len(self.devices))] if len(self.devices) > 1 else []
        agents = str(folder / f"{self.name}-{{rank}}.sock")
        return [
            *(python, "-m", module, "serve", model, "--host", LOCAL, "--port", str(self.port), *ranks),
            *("--kv-transfer-config", vllm_transfer(agents, "recompute"), *self.flags),
        ]

    def environment(self, visible: Sequence[str]) -> dict[str, str]:
        """`visible` are the GPUs that we see, by the names that CUDA_VISIBLE_DEVICES gives them."""
        if "cpu" in self.devices:
            return ONE_THREAD | VLLM_SERVER
        numbers = [int(each.removeprefix("cuda:")) for each in self.devices]
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[n] if visible else str(n) for n in numbers)}


def planned(
    counts: Mapping[str, int], ranks: Mapping[str, int], flags: Mapping[str, str], gpus: str, is_cpu: bool, port: int
) -> list[PlannedEngine]:
    """The engines, by role: prefill before decode, GPUs and ports in order. Pure. Raises OperatorError."""
    needed = sum(counts[role] * ranks[role] for role in counts)
    given = gpus.split(",") if gpus else [str(number) for number in range(needed)]
    if not all(each.isdecimal() for each in given) or len(given) != needed:
        raise OperatorError("bad_option", f"gpus: got {gpus}, need {needed} numbers with commas between: one a rank")
    devices = iter(["cpu"] * needed if is_cpu else [f"cuda:{each}" for each in given])
    named = [(role, number) for role in counts for number in range(counts[role])]
    return [
        PlannedEngine(
            role, number, port + i, tuple(next(devices) for _ in range(ranks[role])), tuple(shlex.split(flags[role]))
        )
        for i, (role, number) in enumerate(named)
    ]


def run(
    model: str,
    engines: Sequence[PlannedEngine],
    python: Path | None,
    listen: str,
    logs: Path | None,
    extra: Sequence[str],
) -> None:
    """Start all, say where to send requests, and what is carried; until a signal ends it. Raises OperatorError."""
    for host, port in (read_listen(listen), *((LOCAL, engine.port) for engine in engines)):
        _check_free(host, port)
    chosen = python_with("vllm", python, "--python")
    model = str(Path(model).absolute()) if Path(model).is_dir() else model  # engines run in another folder
    folder = (logs or Path(tempfile.mkdtemp(prefix="kvbridge-up-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    _say(f"logs: {folder}")
    with ExitStack() as stack:
        fleet = _Fleet(folder, stack, signals)
        with contextlib.suppress(KeyboardInterrupt):
            fleet.start_agents(engines)
            fleet.start_engines(engines, chosen, model, extra)
            fleet.start_proxy(engines, listen)
            _say_ready(model, listen, fleet.decoding)
            fleet.watch()
        _say("ending all")


class _Fleet:
    """What runs. All of it ends with `stack`: the proxy first, then the engines, then their agents."""

    def __init__(self, folder: Path, stack: ExitStack, signals: Sequence[int]) -> None:
        self.decoding: list[AgentProcess] = []
        self._folder = folder
        self._stack = stack
        self._signals = signals
        self._parts: dict[str, AgentProcess | ServerProcess] = {}  # by what we call them

    def start_agents(self, engines: Sequence[PlannedEngine]) -> None:
        waiting: dict[str, Callable[[], bool]] = {}
        for engine in engines:
            for rank, device in enumerate(engine.devices):
                agent = AgentProcess(self._folder, f"{engine.name}-{rank}", {"device": device})
                self._stack.callback(end, agent.process)
                self._parts[f"agent {agent.name}"] = agent
                waiting[f"agent {agent.name}"] = partial(_serves, agent)
                if engine.role == "decode":
                    self.decoding.append(agent)
        self._wait(waiting)

    def start_engines(self, engines: Sequence[PlannedEngine], python: str, model: str, extra: Sequence[str]) -> None:
        servers = self._stack.enter_context(_ended_together())
        for engine in engines:
            command = [*engine.command(python, model, self._folder), *extra]
            log = self._folder / f"{engine.name}.log"
            servers.append(ServerProcess(command, engine.port, log, engine.environment(visible_gpus()), is_bound=True))
            self._parts[f"engine {engine.name}"] = servers[-1]
        _say(f"{len(servers)} engines load the model: minutes, depending on its size")
        self._wait({f"engine {each.name}": each.is_up for each in servers})

    def start_proxy(self, engines: Sequence[PlannedEngine], listen: str) -> None:
        sides = [part for each in engines for part in (f"--{each.role}", f"vllm=http://{LOCAL}:{each.port}")]
        command = [sys.executable, "-m", "kvbridge.cli", "proxy", *sides, "--listen", listen]
        host, port = read_listen(listen)
        servers = self._stack.enter_context(_ended_together())
        servers.append(ServerProcess(command, port, self._folder / "proxy.log", host=host, is_bound=True))
        self._parts["proxy"] = servers[0]
        self._wait({"proxy": servers[0].is_up})

    def watch(self) -> None:
        """Say what is carried, until a signal. Raises OperatorError if one ends."""
        said = ""
        while True:
            self._rest()
            if (line := carried(self._statuses())) and line != said:
                _say(said := line)

    def _statuses(self) -> list[Status]:
        found = []
        for agent in self.decoding:
            with contextlib.suppress(OperatorError):  # one that is gone is noticed by its process
                found.append(ask(agent.socket))
        return found

    def _wait(self, waiting: dict[str, Callable[[], bool]]) -> None:
        """Until all are ready, however long it takes: a signal or the end of one ends it."""
        begun = time.monotonic()
        while waiting:
            self._rest()
            for name in [name for name, is_ready in waiting.items() if is_ready()]:
                del waiting[name]
                _say(f"{name} is ready after {time.monotonic() - begun:.0f} s")

    def _rest(self) -> None:
        """Wait REST_S. Raises KeyboardInterrupt on a signal, OperatorError (`part_ended`) if a process has ended."""
        time.sleep(REST_S)
        if self._signals:
            raise KeyboardInterrupt
        for name, part in self._parts.items():
            if (code := part.process.poll()) is not None:
                told = f"{name} has ended ({code}); {part.log} ends:\n{tail(part.log, 30)}"
                raise OperatorError("part_ended", told)


def _serves(agent: AgentProcess) -> bool:
    try:
        return agent.status().state == "serving"
    except OperatorError:
        return False


def carried(statuses: Sequence[Status]) -> str:
    """What decode engines fetched and computed since the start, "" if neither."""
    fetched = sum(each.prompts.fetched_tokens for each in statuses)
    computed = sum(each.prompts.computed_tokens for each in statuses)
    others = f", {computed:,} computed by decode instead" if computed else ""
    return f"carried so far: {fetched:,} prompt tokens{others}" if fetched or computed else ""


def _check_free(host: str, port: int) -> None:
    """Raises OperatorError (`port_in_use`) before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise OperatorError("port_in_use", f"cannot listen on {host}:{port}: {error.strerror or error}") from None


@contextlib.contextmanager
def _ended_together() -> Iterator[list[ServerProcess]]:
    """Servers, all of which are asked to stop at once, and killed with what they started when STOP_S is over."""
    servers: list[ServerProcess] = []
    try:
        yield servers
    finally:
        for each in servers:
            each.process.terminate()
        last = time.monotonic() + STOP_S
        for each in servers:
            each.stop(max(0.0, last - time.monotonic()))


def _say_ready(model: str, listen: str, decoding: Sequence[AgentProcess]) -> None:
    before, _, after = json.dumps({"model": model, "max_tokens": 12, "prompt": "%"}).rpartition("%")
    body = f"""{shlex.quote(before)}"$(seq -s ' ' 300)"{shlex.quote(after)}"""
    sockets = " ".join(f"--socket {shlex.quote(each.socket)}" for each in decoding)
    _say(f"ready: send OpenAI requests to http://{listen}, for example")
    _say(f"  curl -s http://{listen}/v1/completions -H 'Content-Type: application/json' -d {body}")
    _say(f"what is carried: kvbridge status {sockets}")
    _say("Ctrl-C ends all")


def _say(line: str) -> None:
    print(line, flush=True)
