"""Servers for `sglang_pairs`: each rank beside its own agent, or all with SGLang's own NIXL backend."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.model import write_config
from tests.integration.agent.harness import AgentProcess, agent
from tests.system.engines import marks
from tests.system.engines.weights import SEED
from tests.system.gpu.pair_engines import LLAMA_8B, MODEL_NAME
from tests.system.sglang.plugin import PAUSE, SEEDED
from tests.system.sglang.server import Server, ServerConfig

DONE = re.compile(r"done: request=(\S+)(?: transfer=\S+)? bytes=(\d+)")
START_S = 120.0
AGENT_START_S = 90.0  # while as many servers import
TIMES_S = 5.0  # until a prefill server has written how long a transfer took
POOL_TOKENS = 24576
ALONE = "alone"


@dataclass(frozen=True)
class Side:
    """One server: what it is called and how it differs. `gpus` are the machine's numbers, one a rank."""

    name: str
    role: str
    gpus: tuple[int, ...]
    page: int = 16
    kv: str = "auto"
    backend: str = "kvbridge"


@dataclass
class Answer:
    """Of one request: the tokens and, of the decoding server, the seconds to its first one."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0


@dataclass
class Running:
    """A server that is up, and its agents by rank (none without kvbridge)."""

    side: Side
    server: Server
    times: Path
    agents: list[AgentProcess] = field(default_factory=list)
    is_seeded: bool = True

    def noted(self, side: str, room: int | str | None = None) -> list[dict[str, Any]]:
        """What its ranks have noted of this kind, one a rank (tests.system.sglang.plugin)."""
        return marks.noted(self.times, side, room)

    def fetched(self, room: int) -> int:
        """Bytes of this room that the decode side's agents have fetched."""
        lines = [line for each in self.agents for line in DONE.findall(each.text())]
        return sum(int(size) for name, size in lines if name == str(room))

    def route(self, sender: Any) -> str:
        """How the KV comes from `sender`, as its agents found and proved it."""
        to = {each.address for each in self.agents}
        peers = [peer for each in sender.agents for peer in each.status.peers if peer.state.startswith("receiver")]
        return "; ".join(sorted({peer.route for peer in peers if peer.address in to}))

    def kill(self) -> None:
        self.server.kill()
        for each in self.agents:
            each.kill()

    def is_well(self) -> bool:
        is_there = self.server.process.poll() is None and self.server.is_ready()
        return is_there and all(each.process.poll() is None for each in self.agents)


class Servers:
    """All that are up, by name; `start` begins in the background and may be called again after a loss."""

    def __init__(self, folder: Path, stack: ExitStack, is_cpu: bool, agent_options: dict[str, str]) -> None:
        self.folder = folder
        self.is_cpu = is_cpu
        self.kept = folder / "rows"
        self.kept.mkdir()
        self.keep_rows(False)
        self._stack = stack
        self._agent_options = agent_options
        self._model = folder / "model"
        self._up: dict[str, Future[Running]] = {}
        self._pool = stack.enter_context(ThreadPoolExecutor(2 if is_cpu else 16))
        self._lock = threading.Lock()
        self._attempts = itertools.count(1)
        self.rooms = itertools.count(random.SystemRandom().getrandbits(40) << 16)
        if is_cpu:
            write_config(self._model)
        else:
            self._model.mkdir()
            (self._model / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))

    def keep_rows(self, are_kept: bool) -> None:
        """Whether the servers write the rows of what comes; it takes them a while."""
        pause = self.kept / PAUSE
        if are_kept:
            pause.unlink(missing_ok=True)
        else:
            pause.touch()

    def start(self, *sides: Side) -> None:
        for side in sides:
            if side.name not in self._up:
                self._up[side.name] = self._pool.submit(self._start, side, next(self._attempts))

    def get(self, side: Side) -> Running:
        """Wait for it. Raises what kept it from starting."""
        self.start(side)
        return self._up[side.name].result(START_S + AGENT_START_S)

    def drop(self, side: Side) -> None:
        """End a server that does not answer, or is not needed any more; its next use starts another."""
        future = self._up.pop(side.name, None)
        if future is not None and future.done() and future.exception() is None:
            future.result().kill()

    def _start(self, side: Side, attempt: int) -> Running:
        name = f"{side.name}-{attempt}"
        agents: list[AgentProcess] = []
        running: Running | None = None
        try:
            if side.role != ALONE and side.backend == "kvbridge":
                with ThreadPoolExecutor(len(side.gpus)) as pool:
                    begun = [pool.submit(self._agent, f"{name}-{rank}", gpu) for rank, gpu in enumerate(side.gpus)]
                    server = self._server(side, name)  # it imports meanwhile
                    running = Running(side, server, self.folder / f"{name}.times", agents)
                    agents += [each.result() for each in begun]
            else:
                server = self._server(side, name)
                running = Running(side, server, self.folder / f"{name}.times", agents)
            server.wait_ready(START_S)
            running.is_seeded = server.text().count(SEEDED) >= len(side.gpus)
        except BaseException:
            if running is not None:
                running.kill()
            raise
        return running

    def _server(self, side: Side, name: str) -> Server:
        config = ServerConfig(
            role=side.role,
            gpus=() if self.is_cpu else side.gpus,
            page_size=side.page,
            tensor_parallel_size=len(side.gpus),
            dtype="bfloat16",
            kv_cache_dtype=side.kv,
            chunked_prefill_size=16384,
            max_total_tokens=POOL_TOKENS,
            backend=side.backend,
            keeps_prefixes=False,
            flags=("--load-format", "dummy"),
            environment={
                "KVBRIDGE_TEST_ROWS": str(self.kept),
                marks.VARIABLE: str(self.folder / f"{name}.times"),
                "KVBRIDGE_TEST_SEED": str(SEED),
                "KVBRIDGE_ENGINE_SOCKET": str(self.folder / f"{name}-{{rank}}.sock"),
                "KVBRIDGE_ENGINE_CONNECT_S": str(AGENT_START_S),
                "KVBRIDGE_ENGINE_MODEL_NAME": MODEL_NAME,
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
                "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
            },
        )
        return self._enter(Server(config, str(self._model), self.folder, name))

    def _agent(self, name: str, gpu: int) -> AgentProcess:
        options: dict[str, Any] = dict.fromkeys(("slot_bytes", "receive_slots", "send_slots"))  # as operators have
        options["log_level"] = "debug"  # says what each transfer brought
        options["device"] = "cpu" if self.is_cpu else f"cuda:{gpu}"
        if self.is_cpu:
            options["slot_bytes"] = 1 << 20
        return self._enter(agent(self.folder, name, AGENT_START_S, **options | self._agent_options))

    def _enter(self, what: contextlib.AbstractContextManager[Any]) -> Any:
        entered = what.__enter__()
        with self._lock:
            self._stack.push(what)
        return entered


def ask(server: Server, body: dict[str, Any], timeout_s: float) -> Answer:
    """One request, its tokens streamed. AssertionError with what the server says if it fails."""
    answer, began = Answer(), time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)) as connection:
        sent = json.dumps(body | {"stream": True})
        connection.request("POST", "/generate", sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, f"{server.log.stem}: {response.status} {response.read()[:500]!r}"
        for said in _events(response):
            assert "error" not in said, f"{server.log.stem}: {said['error']}"
            reason = said["meta_info"].get("finish_reason") or {}
            assert reason.get("type") != "abort", f"{server.log.stem}: {reason}"
            answer.first_s = answer.first_s or time.perf_counter() - began
            answer.tokens = said["output_ids"]  # all so far
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        text = line.strip()
        if text.startswith(b"data:") and text != b"data: [DONE]":
            yield json.loads(text[5:])
