"""Serving end to end on two cores: one engine, or two behind a router, with kvbridge or the engine's own connector.

Real servers and routers, with completions streamed over HTTP. Prefill has core 0 and decode core 1, each with its
agent. Router and client run on either. An engine alone has core 0, or both. All setups get the same prompts of 128 to
2048 tokens, for answers of 32. At each of `--rates` they arrive at random (Poisson, seeded), whatever became of the
prompts before. Prefix caches are off. A small model is computed on the CPU. So this measures what serving costs beside
the model, and what is saved by decoding apart, but not what a GPU does.

First each setup answers ten prompts one after the other. The text must equal that of an engine alone (all compute in
fp32). The bench fails on any error, and if KV was not carried. Each row also has the cores that each part used, and
those of everything else on the machine (`others`). If `others` is large, measure the row again with `--setups`. This
keeps the rows of other setups if commit, machine and load are the same. Every second of `--rounds` is in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import operator
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.record import ROOT, machine
from bench.scenario import Bench
from bench.serving_load import Answer, Ask, Load, asks, digest, drive, figures, one_by_one
from demo.model import HEAD_WIDTH, KV_HEADS
from demo.processes import free_port
from testing.agents import AgentProcess, agent
from testing.http_server import HttpServer
from tests.system.routers.fleet import NAME, ROUTERS, SETTINGS, SGLANG, VLLM
from tests.system.sglang.server import Server as SGLangServer
from tests.system.sglang.server import ServerConfig

PROXY = [os.environ.get("KVBRIDGE_TEST_AGENT_PYTHON", sys.executable), "-m", "kvbridge.cli", "proxy"]
CORES = {"prefill": {0}, "decode": {1}, "alone": {0}, "alone-two": {0, 1}}
LAYERS, INNER = 4, 512
MODEL = """import pathlib, sys
from demo.model import write_model, write_tokenizer
folder, layers, inner = sys.argv[1:]
write_tokenizer(write_model(pathlib.Path(folder), num_hidden_layers=int(layers), intermediate_size=int(inner)))"""
LOAD = Load()
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 4  # of one token, in fp32
ROOM = 65536  # tokens for which each engine has room
BATCH = 2048  # most tokens of one step: vLLM's default
CHECKED, WIRING = 10, 2  # prompts asked one by one; the first two connect the engines
CHECK_SEED, WARM_SEED, SEED = 1, 2, 100
PATIENCE_S, IDLE_S = 60.0, 2.0
SETTLE_S = 1.5  # vLLM's worker spins for a second after its last step
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Setup:
    """`engines`: prefill and decode, or a single one. `blocks`: their block sizes in tokens."""

    name: str
    engines: tuple[str, ...]
    carrier: str = ""  # kvbridge or nixl
    router: str = ""
    blocks: tuple[int, ...] = (32, 32)
    has_two_cores: bool = False  # an engine alone
    is_only_tried: bool = False  # counts right answers, and is not measured

    @property
    def roles(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.carrier else ("alone-two" if self.has_two_cores else "alone",)

    @property
    def servers(self) -> tuple[Any, ...]:
        """A key. Setups with equal keys differ only in the router."""
        return self.engines, self.carrier, self.blocks, self.roles


SETUPS = (
    Setup("vllm-alone", ("vllm",)),
    Setup("vllm-alone-two-cores", ("vllm",), has_two_cores=True),
    Setup("vllm-nixl", ("vllm", "vllm"), "nixl", "vllm-router"),
    Setup("vllm-kvbridge", ("vllm", "vllm"), "kvbridge", "vllm-router"),
    Setup("vllm-kvbridge-proxy", ("vllm", "vllm"), "kvbridge", "proxy"),
    Setup("vllm-kvbridge-32-64", ("vllm", "vllm"), "kvbridge", "vllm-router", (32, 64)),
    Setup("vllm-nixl-32-64", ("vllm", "vllm"), "nixl", "vllm-router", (32, 64), is_only_tried=True),
    Setup("sglang-alone", ("sglang",), blocks=(16,)),
    Setup("sglang-alone-two-cores", ("sglang",), blocks=(16,), has_two_cores=True),
    Setup("sglang-nixl", ("sglang", "sglang"), "nixl", "sglang-router", (16, 16)),
    Setup("sglang-kvbridge", ("sglang", "sglang"), "kvbridge", "sglang-router", (16, 16)),
    Setup("vllm-sglang", ("vllm", "sglang"), "kvbridge", "proxy", (32, 16)),
    Setup("sglang-vllm", ("sglang", "vllm"), "kvbridge", "proxy", (16, 32)),
)

NAMES = tuple(each.name for each in SETUPS)


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Processes started inside this context stay on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Running:
    """A setup's servers and agents, by role."""

    servers: dict[str, HttpServer] = field(default_factory=dict)
    bootstraps: dict[str, int] = field(default_factory=dict)  # ports of SGLang's prefill servers
    agents: dict[str, AgentProcess] = field(default_factory=dict)

    def carried(self) -> float | None:
        """KV bytes that the decode side has received so far. None if no metric says so."""
        if self.agents:
            return self.agents["decode"].status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0)
        decode = self.servers.get("decode")
        if decode is None or not (told := _metric(decode, "vllm:nixl_bytes_transferred_sum")):
            return None
        return sum(told)

    @property
    def parts(self) -> dict[str, int]:
        """The leading process of each part, whose CPU time is counted together with its group's."""
        parts = {role: server.process.pid for role, server in self.servers.items()}
        return parts | {f"{role}'s agent": each.process.pid for role, each in self.agents.items()}


def _metric(server: HttpServer, name: str) -> list[float]:
    found = re.findall(rf"^{name}(?:\{{.*?\}})? (\S+)$", server.ask("/metrics")[1], re.MULTILINE)
    return [float(each) for each in found]


def start(setup: Setup, folder: Path, model: Path, stack: ExitStack) -> Running:
    running = Running()
    for role, engine, block in zip(setup.roles, setup.engines, setup.blocks, strict=False):
        with on_cores(CORES[role]):
            if setup.carrier == "kvbridge":
                defaults: dict[str, Any] = dict.fromkeys(("slot_bytes", "receive_slots", "send_slots"))
                running.agents[role] = stack.enter_context(agent(folder, role, **defaults))
            if engine == "vllm":
                server = _vllm(setup, role, block, folder, model)
            else:
                server = sglang = _sglang(setup, role, block, folder, model)
                running.bootstraps[role] = sglang.bootstrap_port
        stack.callback(server.kill)
        running.servers[role] = server
    for role, server in running.servers.items():
        server.wait_up()
        _pin(server.process.pid, CORES[role])
    return running


def _pin(leads: int, cores: set[int]) -> None:
    """Pin every thread of a process group, because vLLM's NixlConnector moves the computing thread to the last core."""
    for pid in _group(leads):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)


def transfer(carrier: str, role: str, socket: Path, device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """vLLM's --kv-transfer-config for a prefill or decode engine, and the environment that it needs."""
    config: dict[str, Any] = {"kv_role": "kv_producer" if role == "prefill" else "kv_consumer"}
    if carrier == "kvbridge":
        config |= {"kv_connector": "KVBridgeConnector", "kv_load_failure_policy": "fail"}
        config |= {"kv_connector_module_path": "kvbridge.adapters.vllm.connector"}
        return config | {"kv_connector_extra_config": {"kvbridge_socket": str(socket)}}, {}
    config |= {"kv_connector": "NixlConnector", "kv_buffer_device": device, "engine_id": f"nixl-{role}"}
    return config, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


def _vllm(setup: Setup, role: str, block: int, folder: Path, model: Path) -> HttpServer:
    port, environment = free_port(), dict(SETTINGS, OMP_NUM_THREADS=str(len(CORES[role])))
    flags: tuple[str, ...] = ()
    if setup.carrier:
        config, more = transfer(setup.carrier, role, folder / f"{role}.sock", "cpu")
        environment, flags = environment | more, ("--kv-transfer-config", json.dumps(config))
    command = [
        *(str(VLLM), "-m", "kvbridge.adapters.vllm.on_cpu", "serve", str(model), "--served-model-name", NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning", "--enforce-eager"),
        *("--dtype", "float32", "--max-model-len", str(2 * LOAD.longest), "--max-num-batched-tokens", str(BATCH)),
        *("--block-size", str(block), "--num-gpu-blocks-override", str(ROOM // block), "--no-enable-prefix-caching"),
        *flags,
    ]
    return HttpServer(command, port, folder / f"{role}-engine.log", {"PYTHONPATH": str(ROOT), **environment})


def _sglang(setup: Setup, role: str, block: int, folder: Path, model: Path) -> SGLangServer:
    config = ServerConfig(
        role if setup.carrier else "alone",
        page_size=block,
        chunked_prefill_size=BATCH,
        max_total_tokens=ROOM,
        backend=setup.carrier,
        keeps_prefixes=False,
        has_tokenizer=True,
        flags=("--served-model-name", NAME, "--log-level-http", "warning"),
        environment={
            "KVBRIDGE_ENGINE_SOCKET": str(folder / f"{role}.sock"),
            "OMP_NUM_THREADS": str(len(CORES[role])),
        },
    )
    return SGLangServer(config, str(model), folder, f"{role}-engine", python=str(SGLANG))


def front(setup: Setup, running: Running, folder: Path, stack: ExitStack) -> HttpServer:
    """Start what clients connect to: the router with its default settings, or the engine itself."""
    if not setup.router:
        (server,) = running.servers.values()
        return server
    port = free_port()
    prefill, decode = running.servers["prefill"].url, running.servers["decode"].url
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    bootstrap = str(running.bootstraps.get("prefill", ""))
    if setup.router == "vllm-router":
        command = [str(ROUTERS / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", prefill]
        command += ["--decode", decode, *where]
    elif setup.router == "sglang-router":
        command = [str(ROUTERS / "python"), "-m", "sglang_router", "launch", "--pd-disaggregation"]
        command += ["--prefill", prefill, bootstrap, "--decode", decode, *where]
    else:
        at = f",bootstrap={bootstrap}" if setup.engines[0] == "sglang" else ""
        command = proxy_command(f"{setup.engines[0]}={prefill}{at}", f"{setup.engines[1]}={decode}", port)
    router = HttpServer(command, port, folder / f"{setup.name}-router.log")
    stack.callback(router.kill)
    router.wait_up("/health" if setup.router == "proxy" else "/readiness")
    return router


def proxy_command(prefill: str, decode: str, port: int) -> list[str]:
    return [*PROXY, "--prefill", prefill, "--decode", decode, "--listen", f"127.0.0.1:{port}"]


class Busy:
    """The CPU time of each part, and of everything else on the machine, since this object was made."""

    def __init__(self, parts: Mapping[str, int]) -> None:
        self._parts = parts
        self._began, self._before = time.monotonic(), self._now()

    def shares(self) -> dict[str, float]:
        """The shares in cores: 1 is one core all the time."""
        seconds = time.monotonic() - self._began
        spent = {name: after - self._before[name] for name, after in self._now().items()}
        machine, stolen = spent.pop("machine"), spent.pop("stolen")
        spent |= {"others": machine - sum(spent.values()), "stolen": stolen}
        return {name: round(each / seconds, 3) for name, each in spent.items()}

    def _now(self) -> dict[str, float]:
        fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        user, nice, system, _, _, hard, soft, stolen = fields[:8]
        spent = {name: sum(map(_spent_s, _group(leads))) for name, leads in self._parts.items()}
        told = {"machine": user + nice + system + hard + soft, "stolen": stolen}
        return spent | {"client": time.process_time()} | {name: each / TICKS for name, each in told.items()}


def _group(leads: int) -> list[int]:
    """A process and all others in the process group that it leads."""
    found = []
    for pid in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()):
        with contextlib.suppress(OSError):
            if leads in (pid, os.getpgid(pid)):
                found.append(pid)
    return found


def _spent_s(pid: int) -> float:
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(told[11]) + int(told[12])) / TICKS


@dataclass(frozen=True)
class Target:
    """What a load is sent to: `urls` in turn. `parts` are those of `Running`, `row_bytes` one token's on the way."""

    name: str
    urls: tuple[str, ...]
    parts: Mapping[str, int]
    carried: Callable[[], float | None]
    row_bytes: float

    def ask(self, asked: Sequence[Ask], at_once: bool = True) -> list[Answer]:
        """Raises AssertionError if an answer is an error, or if KV was not carried."""
        before = self.carried()
        answers = asyncio.run(drive(self.urls, NAME, asked, PATIENCE_S, at_once))
        errors = [each.error for each in answers if each.error]
        assert not errors, f"{self.name}: {len(errors)} of {len(answers)} failed: {errors[:3]}"
        after, needed = self.carried(), sum(each.tokens - 1 for each in asked) * self.row_bytes
        if before is not None and after is not None:
            came = after - before
            assert came >= needed, f"{self.name}: {came:.0f} bytes came, {needed:.0f} are those of the prompts"
        return answers

    def point(self, rate: float, asked: Sequence[Ask]) -> dict[str, Any]:
        """The figures of one rate, which are printed too."""
        busy = Busy(self.parts)
        answers = self.ask(asked)
        shares = busy.shares()
        row = {"rate": rate, **figures(answers), "cores": shares}
        times = "  ".join(f"{name.removesuffix('_ms')} {row[name]:7.1f}" for name in row if name.endswith("_ms"))
        print(f"{self.name:22s} {rate:5.1f}/s: {row['answered_per_s']:5.2f}/s  ms: {times}", flush=True)
        print(f"{'':22s} cores: " + "  ".join(f"{name} {each:.2f}" for name, each in shares.items()), flush=True)
        return row


def row_of(setup: Setup, target: Target, expected: Sequence[str], chosen: Chosen) -> dict[str, Any]:
    """One setup's row. `expected` has the digests of the first answers. It is empty for the first setup.

    Raises AssertionError if an answer is not as expected, and as `Target.ask` does.
    """
    found: dict[str, Any] = {"setup": setup.name, "router": setup.router, "blocks": list(setup.blocks)}
    checked = one_by_one(LOAD, CHECKED, CHECK_SEED)
    if setup.is_only_tried:
        answers = asyncio.run(drive(target.urls, NAME, checked, PATIENCE_S, at_once=False))
        found["errors"] = sorted({each.error for each in answers if each.error})
    else:
        answers = target.ask(checked, at_once=False)
    found["answers"] = [digest(each.text) for each in answers]
    found["right"] = sum(map(operator.eq, found["answers"], expected)) if expected else None
    if setup.is_only_tried:
        print(f"{setup.name}: {found['right']} of {CHECKED} answers right; errors: {found['errors'] or 'none'}")
        return found
    assert found["right"] in (CHECKED, None), (
        f"{setup.name}: {found['right']} of {CHECKED} answers are an engine's alone"
    )
    found["one_by_one"] = figures(answers[WIRING:])
    found["idle_cores"] = _idle(target.parts)
    target.ask(asks(LOAD, chosen.rates[0], 4.0, WARM_SEED))
    found["points"] = [target.point(rate, asks(LOAD, rate, chosen.seconds, SEED)) for rate in chosen.rates]
    return found


def _idle(parts: Mapping[str, int]) -> dict[str, float]:
    """The cores that each part uses while there are no requests."""
    time.sleep(SETTLE_S)
    busy = Busy(parts)
    time.sleep(IDLE_S)
    return busy.shares()


def run(chosen: Chosen, folder: Path, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Add each setup's row to `rows`."""
    model = folder / "model"
    subprocess.run([VLLM, "-c", MODEL, str(model), str(LAYERS), str(INNER)], check=True, cwd=ROOT)
    order = [list(group) for _, group in itertools.groupby(chosen.setups, key=lambda setup: setup.servers)]
    for turn in range(chosen.rounds):
        for group in order if turn % 2 == 0 else order[::-1]:
            own = folder / f"{group[0].name}-{turn}"
            own.mkdir()
            load = os.getloadavg()[0]
            with ExitStack() as stack:
                running = start(group[0], own, model, stack)
                for setup in group:
                    with ExitStack() as routing:
                        server = front(setup, running, own, routing)
                        parts = running.parts | ({"router": server.process.pid} if setup.router else {})
                        expected: list[str] = next((row["answers"] for row in rows if "alone" in row["setup"]), [])
                        target = Target(setup.name, (server.url,), parts, running.carried, ROW_BYTES)
                        row = row_of(setup, target, expected, chosen)
                        rows.append({"round": turn, "load_before": load, **row})
                        yield


def _kept(path: Path, told: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of other setups in the results, if commit, machine and load are the same."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    same = {**{key: each for key, each in machine().items() if key != "day"}, **told}
    if any(found.get(key) != each for key, each in same.items()):
        return []
    return [row for row in found["rows"] if row["setup"] not in names]


def table(rows: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> str:
    """The table of docs/benchmarks.md, in Markdown. Medians over the rounds."""
    lines = ["| setup | " + " | ".join(f"{rate:g} a second" for rate in rates) + " |", "|---" * (1 + len(rates)) + "|"]
    for name in dict.fromkeys(row["setup"] for row in rows if "points" in row):
        points = [point for row in rows if row["setup"] == name for point in row["points"]]
        cells = [_cell([point for point in points if point["rate"] == rate]) for rate in rates]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(points: Sequence[Mapping[str, Any]]) -> str:
    if not points:
        return ""
    names = ("answered_per_s", "ttft_p50_ms", "ttft_p99_ms", "tbt_p50_ms", "tbt_p99_ms")
    answered, *times = (statistics.median(point[name] for point in points) for name in names)
    first, first_worst, gap, gap_worst = (f"{each:.0f}" for each in times)
    return f"{answered:.1f}; {first} / {first_worst}; {gap} / {gap_worst}"


@dataclass(frozen=True)
class Chosen:
    setups: tuple[Setup, ...]
    rates: tuple[float, ...]
    seconds: float
    rounds: int


def measure(
    bench: Bench,
    *,
    setups: tuple[str, ...] = NAMES,
    rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0),
    seconds: float = 8.0,
    rounds: int = 1,
    logs: str = "",
) -> dict[str, Any]:
    """`seconds`: for each rate. `logs`: a folder for those of engines, agents and routers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # and the servers with it
    known = {setup.name: setup for setup in SETUPS}
    if unknown := set(setups) - known.keys():
        sys.exit(f"--setups: {', '.join(unknown)} are none of {', '.join(known)}")
    chosen = Chosen(tuple(known[name] for name in setups), rates, seconds, rounds)
    told = {"rates": list(rates), "seconds": seconds, "rounds": rounds, "answer_tokens": LOAD.answer}
    rows = _kept(bench.out / "serving.json", told, setups)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        for _ in run(chosen, folder, rows):
            bench.write({**told, "rows": rows})
    print(table(rows, rates))
    return {**told, "rows": rows}
