"""Starts and asks servers for the demo: real engines of both kinds, an agent per rank, a proxy per pair."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from kvbridge.loopback.processes import AgentProcess, agents
from kvbridge.loopback.servers import vllm_transfer
from testing.http_server import HttpServer
from testing.jobs import moved_bytes

from .processes import SETTINGS, free_port
from .pythonpath import of_checkout

START_S = 600.0  # start-up of an engine that shares two busy cores with five others
MOST_TOKENS = 1 << 14  # room for KV in each engine
SGLANG_SETTINGS = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


@dataclass(frozen=True, slots=True)
class DemoServer:
    """How a server is started. vLLM's `role` is "both", SGLang's is "prefill", "decode" or "alone"."""

    kind: str
    block_tokens: int  # or of a page, for SGLang
    ranks: int = 1  # tensor parallel
    role: str = "both"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.role}-{self.block_tokens}-{self.ranks}"

    @property
    def shape(self) -> str:
        unit = "block" if self.kind == "vllm" else "page"
        return f"{unit} {self.block_tokens} TP {self.ranks}"

    @property
    def agents(self) -> int:
        return 0 if self.role == "alone" else self.ranks

    @property
    def files(self) -> int:
        """How many files hold a prompt's rows: one by vLLM's engine core, or one by each rank of SGLang."""
        return 1 if self.kind == "vllm" else self.ranks


class DemoFleet:
    """Servers, and an agent for each rank. Their files are in `folder`; they end with `stack`."""

    def __init__(self, folder: Path, stack: ExitStack, pythons: dict[str, str]) -> None:
        self.folder = folder
        self.rows = folder / "rows"
        self.rows.mkdir()
        self.servers: dict[DemoServer, HttpServer] = {}
        self._stack = stack
        self._pythons = pythons
        self._model = str(folder / "model")
        self._agents: dict[DemoServer, list[AgentProcess]] = {}
        self._places: dict[DemoServer, str] = {}  # as `kvbridge proxy` takes them
        subprocess.run([pythons["vllm"], "-m", "demo.model", self._model], check=True, capture_output=True)

    def start(self, *engines: DemoServer) -> None:
        """Start these and wait until they are ready. They start at the same time."""
        names = [f"{engine.name}-{rank}" for engine in engines for rank in range(engine.agents)]
        started = iter(self._stack.enter_context(agents(self.folder, names, slot_bytes=str(1 << 20))))
        for engine in engines:
            self._agents[engine] = [next(started) for _ in range(engine.agents)]
            self.servers[engine] = self._start(engine)
        for server in self.servers.values():
            server.wait_up(seconds=START_S)

    def _start(self, engine: DemoServer) -> HttpServer:
        port, bootstrap = free_port(), free_port()
        socket = str(self.folder / f"{engine.name}-{{rank}}.sock")
        if engine.kind == "vllm":
            flags = vllm_flags(self._model, engine.block_tokens, socket, "fail")
            flags += ["--tensor-parallel-size", str(engine.ranks)]
            settings = VLLM_SERVER
            self._places[engine] = f"vllm=http://127.0.0.1:{port}"
        else:
            flags = _sglang(engine, self._model, bootstrap)
            settings = SGLANG_SETTINGS | {"KVBRIDGE_ENGINE_SOCKET": socket}
            self._places[engine] = f"sglang=http://127.0.0.1:{port},bootstrap={bootstrap}"
        # Ranks spin while they wait for each other. With as many ranks as cores, agents would get no core.
        command = ["nice", "-n", "10"] if engine.ranks > 1 else []
        command += [self._pythons[engine.kind], "-m", f"demo.{engine.kind}_rows"]
        command += [*flags, "--host", "127.0.0.1", "--port", str(port)]
        log = self.rows / f"{engine.name}.log"  # where it runs, and leaves rows
        server = HttpServer(command, port, log, SETTINGS | settings | of_checkout())
        self._stack.callback(server.kill)
        return server

    def moved_bytes(self, engine: DemoServer) -> float:
        """How many bytes its agents have received so far."""
        return sum(map(moved_bytes, self._agents[engine]))

    @contextmanager
    def proxy(self, sender: DemoServer, receiver: DemoServer) -> Iterator[HttpServer]:
        """Run a proxy in front of this pair."""
        port = free_port()
        command = [sys.executable, "-m", "kvbridge.cli", "proxy", "--listen", f"127.0.0.1:{port}"]
        command += ["--prefill", self._places[sender], "--decode", self._places[receiver].partition(",")[0]]
        proxy = HttpServer(command, port, self.folder / f"proxy-{sender.name}-{receiver.name}.log")
        try:
            proxy.wait_up(seconds=START_S)
            yield proxy
        finally:
            proxy.kill()


def vllm_flags(model: str, block_tokens: int, socket: str, on_failure: str, role: str = "kv_both") -> list[str]:
    """What any vLLM of the demo is started with. It computes in fp32, since tokens are compared."""
    return [
        *("serve", model, "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--block-size", str(block_tokens), "--max-model-len", "2048"),
        *("--num-gpu-blocks-override", str(MOST_TOKENS // block_tokens)),
        *("--kv-transfer-config", vllm_transfer(socket, on_failure, role)),
    ]


def ask_vllm(server: HttpServer, tokens: list[int], count: int) -> list[int]:
    """The tokens that a vLLM server, or a proxy, answers greedily. Raises OperatorError."""
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answered: list[int] = json.loads(server.answer("/v1/completions", body))["choices"][0]["token_ids"]
    return answered


def exit_on_signals() -> None:
    """The servers are in process groups of their own, so they must be ended: exit through the stack."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def _sglang(engine: DemoServer, model: str, bootstrap: int) -> list[str]:
    flags = [
        *("--model-path", model, "--dtype", "float32", "--skip-tokenizer-init", "--skip-server-warmup"),
        *("--page-size", str(engine.block_tokens), "--tp-size", str(engine.ranks), "--sleep-on-idle"),
        *("--max-total-tokens", str(MOST_TOKENS), "--max-running-requests", "8", "--mem-fraction-static", "0.5"),
    ]
    if engine.role != "alone":
        flags += ["--disaggregation-mode", engine.role, "--disaggregation-transfer-backend", "kvbridge"]
        flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
    if engine.role != "decode":
        flags += ["--disable-radix-cache"]
    return flags
