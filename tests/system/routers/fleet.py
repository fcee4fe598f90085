"""Pairs of servers with unequal blocks, each beside its agent, and what stands in front: routers, and our proxy."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from demo.processes import SETTINGS as PROCESS_SETTINGS
from demo.processes import free_port
from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from testing.agents import PYTHON, AgentProcess, agent
from testing.http_server import START_S, HttpServer
from tests.system.sglang import fleet as sglang

ROOT = Path(__file__).parents[3]
VLLM = ROOT / ".venv-vllm/bin/python"
SGLANG = ROOT / ".venv-sglang/bin/python"
ROUTERS = ROOT / ".venv-routers/bin"
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 4  # of one token, in fp32
EMPTY_S = 60.0
HOLD_S = 10  # of what nobody fetches, as where a client left
NAME = "demo"
MODEL = """import pathlib, sys
from demo.model import write_model, write_tokenizer
write_tokenizer(write_model(pathlib.Path(sys.argv[1]), eos_token_id=None))"""  # every answer is as long as it may be
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SETTINGS = PROCESS_SETTINGS | VLLM_SERVER


class Fleet:
    """Prefill in blocks of 32 tokens, decode in blocks of 64."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        write_served(folder / "model")
        (folder / "chat.jinja").write_text(CHAT)
        self.agents: dict[str, AgentProcess] = {
            name: stack.enter_context(agent(folder, name, slot_bytes=1 << 20)) for name in ("prefill", "decode")
        }
        self.engines: dict[str, HttpServer] = {name: self._engine(name, free_port()) for name in self.agents}
        for engine in self.engines.values():
            engine.wait_up()

    def _engine(self, name: str, port: int) -> HttpServer:
        transfer = {
            "kv_connector": "KVBridgeConnector",
            "kv_connector_module_path": "kvbridge.adapters.vllm.connector",
            "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvbridge_socket": str(self.agents[name].socket), "kvbridge_hold_s": HOLD_S},
        }
        command = [
            *(str(VLLM), "-m", "kvbridge.adapters.vllm.on_cpu", "serve", str(self.folder / "model")),
            *("--served-model-name", NAME, "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"),
            *("--host", "127.0.0.1", "--port", str(port), "--block-size", "32" if name == "prefill" else "64"),
            *("--chat-template", str(self.folder / "chat.jinja"), "--kv-transfer-config", json.dumps(transfer)),
            *("--middleware", "kvbridge.adapters.vllm.middleware.BootstrapRooms"),
        ]
        engine = HttpServer(command, port, self.folder / f"{name}-engine.log", {"PYTHONPATH": str(ROOT), **SETTINGS})
        self._stack.callback(engine.kill)
        return engine

    def restart(self, name: str) -> None:
        """The engine by SIGKILL, and another one on its port, beside the same agent."""
        self.engines[name].kill()
        self.engines[name] = self._engine(name, self.engines[name].port)
        self.engines[name].wait_up()

    def prefills(self) -> float:
        """Requests that the prefill engine has answered so far."""
        told = self.engines["prefill"].ask("/metrics")[1]
        return sum(map(float, re.findall(r"^vllm:request_success_total\{.*?\} (\S+)$", told, re.MULTILINE)))

    def wait_empty(self) -> None:
        """Until no agent and no engine holds anything of any request."""
        end = time.monotonic() + EMPTY_S
        while held := self._held():
            assert time.monotonic() < end, f"held: {held}"
            time.sleep(0.2)

    def _held(self) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for name, running in self.agents.items():
            status = running.status
            held[f"{name}'s offers"], held[f"{name}'s transfers"] = status.offers, status.transfers
            held[f"{name}'s slots"] = [
                each
                for each in (status.receive_slots, status.send_slots)
                if each.lent or each.landed or each.quarantined
            ]
            told = self.engines[name].ask("/metrics")[1]
            for what in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                found = re.findall(rf"^vllm:{what}\{{.*?\}} (\S+)$", told, re.MULTILINE)
                assert found, f"vLLM does not say {what}"
                held[f"{name}'s {what}"] = sum(map(float, found))
        return {what: each for what, each in held.items() if each}


class SGLangFleet(sglang.Fleet):
    """Prefill in pages of 16 tokens, decode in pages of 64, and a server alone."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        (folder / "chat.jinja").write_text(CHAT)
        flags = ("--served-model-name", NAME, "--chat-template", str(folder / "chat.jinja"))
        super().__init__(folder, stack, write_served, {"has_tokenizer": True, "flags": flags}, str(SGLANG))
        self.start("p16", "d64", "alone")

    def wait_empty(self) -> None:
        sglang.assert_idle(self, "p16", "d64", timeout_s=EMPTY_S)


def write_served(folder: Path) -> Path:
    """A model with its tokenizer."""
    subprocess.run([VLLM, "-c", MODEL, str(folder)], check=True, cwd=ROOT, timeout=START_S)
    return folder


@dataclass
class Front:
    """What clients connect to, in front of two engines."""

    server: HttpServer
    alone: HttpServer  # an engine that answers by itself
    agents: list[AgentProcess]  # of the engines that decode
    wait_empty: Callable[[], None]  # until nothing is held for any request
    computed: int = 1  # of a prompt's tokens that the decoding engine computes itself: vLLM the last one, SGLang none
    sampling: dict[str, Any] = field(default_factory=dict)  # that makes several answers to a prompt greedy

    @property
    def name(self) -> str:
        return self.server.name

    def carried(self) -> float:
        """Tokens that the decoding engines have taken over so far."""
        counters = [each.status.counters for each in self.agents]
        return sum(each.get("kvbridge_wire_bytes_total{role=receiver}", 0.0) for each in counters) / ROW_BYTES


OF_VLLM = ("vllm-router", "smg", "smg, as SGLang's", "sglang-router")
OF_SGLANG = ("smg of SGLang", "sglang_router of SGLang")
PROXIES = ("vllm to sglang", "sglang to vllm")


def front_of_vllm(name: str, fleet: Fleet) -> Front:
    """A router with its default settings; only its ports are chosen.

    "smg, as SGLang's" is smg told that the engines are SGLang's, which it can be told only once it runs.
    """
    prefill, decode = fleet.engines["prefill"].url, fleet.engines["decode"].url
    python, agent_port = str(ROUTERS / "python"), str(port_of(fleet.agents["prefill"]))
    command = {
        "vllm-router": [str(ROUTERS / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", prefill],
        "smg": [python, "-m", "smg", "launch", "--pd-disaggregation", "--prefill", prefill],
        "smg, as SGLang's": [python, "-m", "smg", "launch", "--pd-disaggregation"],
        "sglang-router": [
            *(python, "-m", "sglang_router", "launch", "--pd-disaggregation", "--prefill", prefill, agent_port)
        ],
    }[name]
    is_told = name == "smg, as SGLang's"
    running = router(fleet.folder, name, [*command, *([] if is_told else ["--decode", decode])])
    if is_told:
        running.wait_up("/liveness")
        for url, kind in ((prefill, "prefill"), (decode, "decode")):
            worker = {"url": url, "worker_type": kind, "runtime_type": "sglang", "bootstrap_port": int(agent_port)}
            assert running.ask("/workers", worker)[0] == 202
    # The prefill engine answers by itself a request of more than one token that nobody tagged. vLLM takes no several
    # greedy answers.
    alone, agents = fleet.engines["prefill"], [fleet.agents["decode"]]
    return Front(running, alone, agents, fleet.wait_empty, sampling={"temperature": 0.01, "top_k": 1})


def front_of_sglang(name: str, fleet: SGLangFleet) -> Front:
    prefill = [fleet["p16"].url, str(fleet["p16"].bootstrap_port)]
    command = [str(ROUTERS / "python"), "-m", name.split()[0], "launch", "--pd-disaggregation"]
    running = router(fleet.folder, name, [*command, "--prefill", *prefill, "--decode", fleet["d64"].url])
    return Front(running, fleet["alone"], fleet.agents["d64"], fleet.wait_empty, computed=0)


def router(folder: Path, name: str, command: list[str]) -> HttpServer:
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return HttpServer([*command, *where], port, folder / f"{name}.log")


def front_of_both(name: str, fleet: Fleet, other: SGLangFleet) -> Front:
    """`kvbridge proxy`, from one engine to the other."""
    bootstrap = other["p16"].bootstrap_port
    places = {
        "vllm": (f"vllm={fleet.engines['prefill'].url}", f"vllm={fleet.engines['decode'].url}"),
        "sglang": (f"sglang={other['p16'].url},bootstrap={bootstrap}", f"sglang={other['d64'].url}"),
    }
    sender, _, receiver = name.split()

    def wait_empty() -> None:
        fleet.wait_empty()
        other.wait_empty()

    agents = [fleet.agents["decode"]] if receiver == "vllm" else other.agents["d64"]
    running = proxy(fleet.folder, name, places[sender][0], places[receiver][1])
    return Front(running, other["alone"], agents, wait_empty, computed=int(receiver == "vllm"))


def proxy_of_vllm(fleet: Fleet) -> Front:
    running = proxy(fleet.folder, "proxy", *(f"vllm={fleet.engines[name].url}" for name in ("prefill", "decode")))
    return Front(running, fleet.engines["prefill"], [fleet.agents["decode"]], fleet.wait_empty)


def proxy_of_sglang(fleet: SGLangFleet) -> Front:
    prefill = f"sglang={fleet['p16'].url},bootstrap={fleet['p16'].bootstrap_port}"
    running = proxy(fleet.folder, "proxy", prefill, f"sglang={fleet['d64'].url}")
    return Front(running, fleet["alone"], fleet.agents["d64"], fleet.wait_empty, computed=0)


def proxy(folder: Path, name: str, prefill: str, decode: str) -> HttpServer:
    port = free_port()
    command = [PYTHON, "-m", "kvbridge.cli", "proxy", "--listen", f"127.0.0.1:{port}", "--no-decode-fallback"]
    return HttpServer([*command, "--prefill", prefill, "--decode", decode], port, folder / f"{name}.log")


def port_of(running: AgentProcess) -> int:
    return int(running.address.partition("#")[0].rpartition(":")[2])
