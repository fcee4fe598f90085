"""`kvbridge up`: agents, engines and a proxy for one model on this machine, until Ctrl-C or until one ends."""

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
MODULES = {"vllm": "vllm.entrypoints.cli.main", "sglang": "sglang.launch_server"}
RANKS = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}
SGLANG_SIZES = ("--sleep-on-idle", "--mem-fraction-static", "0.5", "--max-total-tokens", "16384")  # on a CPU


@dataclass(frozen=True, slots=True)
class PlannedSide:
    """The engines of one role: how many, of which kind (`vllm` or `sglang`), how many ranks each, and their flags."""

    role: str
    kind: str
    count: int
    ranks: int
    flags: str


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine, before it is started. `devices` are those of its ranks, as agents name them.

    `bootstrap` is the port at which a prefill server of SGLang is asked for its ranks.
    """

    side: PlannedSide
    number: int
    port: int
    bootstrap: int
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.side.role}-{self.number}"

    @property
    def is_on_cpu(self) -> bool:
        return "cpu" in self.devices

    @property
    def place(self) -> str:
        """As `kvbridge proxy` takes it."""
        return f"{self.side.kind}=http://{LOCAL}:{self.port}" + "".join(
            f",bootstrap={each}" for each in self.bootstraps
        )

    @property
    def bootstraps(self) -> tuple[int, ...]:
        """At which a prefill server of SGLang is asked for its ranks."""
        return (self.bootstrap,) if (self.side.kind, self.side.role) == ("sglang", "prefill") else ()

    def command(self, python: str, model: str, folder: Path) -> list[str]:
        kind, at = self.side.kind, ["--host", LOCAL, "--port", str(self.port)]
        module = f"kvbridge.adapters.{kind}.on_cpu" if self.is_on_cpu else MODULES[kind]
        named = ["serve", model] if kind == "vllm" else ["--model-path", model]
        ranks = [RANKS[kind], str(len(self.devices))] if len(self.devices) > 1 else []
        return [python, "-m", module, *named, *at, *ranks, *self._transfer(folder), *shlex.split(self.side.flags)]

    def _transfer(self, folder: Path) -> list[str]:
        if self.side.kind == "vllm":
            return ["--kv-transfer-config", vllm_transfer(self._agents(folder), "recompute")]
        return [
            *("--disaggregation-mode", self.side.role, "--disaggregation-transfer-backend", "kvbridge"),
            *("--disaggregation-bootstrap-port", str(self.bootstrap), *(SGLANG_SIZES if self.is_on_cpu else ())),
        ]

    def _agents(self, folder: Path) -> str:
        return str(folder / f"{self.name}-{{rank}}.sock")

    def environment(self, visible: Sequence[str], folder: Path) -> dict[str, str]:
        """`visible` are the GPUs that we see, by the names that CUDA_VISIBLE_DEVICES gives them."""
        told = {"KVBRIDGE_ENGINE_SOCKET": self._agents(folder)} if self.side.kind == "sglang" else {}
        if self.is_on_cpu:
            return told | ONE_THREAD | (VLLM_SERVER if self.side.kind == "vllm" else {})
        numbers = [int(each.removeprefix("cuda:")) for each in self.devices]
        return told | {"CUDA_VISIBLE_DEVICES": ",".join(visible[n] if visible else str(n) for n in numbers)}


def planned(sides: Sequence[PlannedSide], gpus: str, is_cpu: bool, port: int) -> list[PlannedEngine]:
    """The engines, by role: sides, GPUs and ports in order. Pure. Raises OperatorError."""
    needed = sum(side.count * side.ranks for side in sides)
    given = gpus.split(",") if gpus else [str(number) for number in range(needed)]
    if not all(each.isdecimal() for each in given) or len(given) != needed:
        raise OperatorError("bad_option", f"gpus: got {gpus}, need {needed} numbers with commas between: one a rank")
    devices = iter(["cpu"] * needed if is_cpu else [f"cuda:{each}" for each in given])
    named = [(side, number) for side in sides for number in range(side.count)]
    return [
        PlannedEngine(side, number, port + i, port + len(named) + i, tuple(next(devices) for _ in range(side.ranks)))
        for i, (side, number) in enumerate(named)
    ]


def run(
    model: str,
    engines: Sequence[PlannedEngine],
    pythons: Mapping[str, Path | None],
    listen: str,
    logs: Path | None,
    extra: Sequence[str],
) -> None:
    """Start all, say where to send requests, and what is carried; until a signal ends it. Raises OperatorError.

    `pythons` by kind of engine, if not the usual one. `extra` are flags of all engines, which are then of one kind.
    """
    kinds = {engine.side.kind for engine in engines}
    if extra and len(kinds) > 1:
        told = "vLLM and SGLang take different flags: give them by --prefill-flags and --decode-flags"
        raise OperatorError("bad_option", told)
    ports = [port for engine in engines for port in {engine.port, *engine.bootstraps}]
    for host, port in (read_listen(listen), *((LOCAL, port) for port in ports)):
        _check_free(host, port)
    chosen = {kind: python_with(kind, pythons[kind], f"--{kind}-python") for kind in kinds}
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
                if engine.side.role == "decode":
                    self.decoding.append(agent)
        self._wait(waiting)

    def start_engines(
        self, engines: Sequence[PlannedEngine], pythons: Mapping[str, str], model: str, extra: Sequence[str]
    ) -> None:
        servers = self._stack.enter_context(_ended_together())
        for engine in engines:
            command = [*engine.command(pythons[engine.side.kind], model, self._folder), *extra]
            log, settings = self._folder / f"{engine.name}.log", engine.environment(visible_gpus(), self._folder)
            servers.append(ServerProcess(command, engine.port, log, settings, is_bound=True))
            self._parts[f"engine {engine.name}"] = servers[-1]
        _say(f"{len(servers)} engines load the model: minutes, depending on its size")
        self._wait({f"engine {each.name}": each.is_up for each in servers})

    def start_proxy(self, engines: Sequence[PlannedEngine], listen: str) -> None:
        sides = [part for each in engines for part in (f"--{each.side.role}", each.place)]
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
