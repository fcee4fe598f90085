"""Two `vllm serve` with unequal block sizes, each beside its agent, and an unmodified router in front."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from tests.integration.agent.harness import AgentProcess, agent

ROOT = Path(__file__).parents[3]
VLLM = ROOT / ".venv-vllm/bin/python"
ROUTERS = ROOT / ".venv-routers/bin"
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 4  # of one token, in fp32
START_S, ANSWER_S, EMPTY_S = 180.0, 60.0, 60.0
HOLD_S = 10  # of what nobody fetches, as where a client left
NAME = "demo"
MODEL = """import pathlib, sys
from demo.model import write_model, write_tokenizer
write_tokenizer(write_model(pathlib.Path(sys.argv[1]), eos_token_id=None))"""  # every answer is as long as it may be
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Server:
    """A process that serves HTTP on a port of this host."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def name(self) -> str:
        return self.log.stem

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, seconds: float = ANSWER_S) -> tuple[int, str]:
        """Status and text of the whole answer."""
        with self.opened(path, body, seconds) as answer:
            return answer.status, answer.read().decode()

    @contextlib.contextmanager
    def opened(self, path: str, body: Any = None, seconds: float = ANSWER_S) -> Iterator[http.client.HTTPResponse]:
        """The answer as it comes; its connection ends with the block, read or not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            text = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, text, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def wait_up(self, path: str = "/health") -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask(path, seconds=5)[0] == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"does not serve:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def serve(command: Sequence[str], port: int, log: Path, **environment: str) -> Server:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=os.environ | environment, cwd=log.parent, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Server(process, port, log)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Fleet:
    """Prefill in blocks of 32 tokens, decode in blocks of 64."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        model = folder / "model"
        subprocess.run([VLLM, "-c", MODEL, str(model)], check=True, cwd=ROOT, timeout=START_S)
        (folder / "chat.jinja").write_text(CHAT)
        self.agents: dict[str, AgentProcess] = {
            name: stack.enter_context(agent(folder, name, slot_bytes=1 << 20)) for name in ("prefill", "decode")
        }
        self.engines: dict[str, Server] = {name: self._engine(name, free_port()) for name in self.agents}
        for engine in self.engines.values():
            engine.wait_up()

    def _engine(self, name: str, port: int) -> Server:
        transfer = {
            "kv_connector": "KVBridgeConnector",
            "kv_connector_module_path": "kvbridge.adapters.vllm.connector",
            "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvbridge_socket": str(self.agents[name].socket), "kvbridge_hold_s": HOLD_S},
        }
        command = [
            *(str(VLLM), "-m", "demo.vllm_cpu", "serve", str(self.folder / "model")),
            *("--served-model-name", NAME, "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"),
            *("--host", "127.0.0.1", "--port", str(port), "--block-size", "32" if name == "prefill" else "64"),
            *("--chat-template", str(self.folder / "chat.jinja"), "--kv-transfer-config", json.dumps(transfer)),
            *("--middleware", "kvbridge.adapters.vllm.middleware.BootstrapRooms"),
        ]
        engine = serve(command, port, self.folder / f"{name}-engine.log", PYTHONPATH=str(ROOT), **SETTINGS)
        self._stack.callback(engine.kill)
        return engine

    def restart(self, name: str) -> None:
        """The engine by SIGKILL, and another one on its port, beside the same agent."""
        self.engines[name].kill()
        self.engines[name] = self._engine(name, self.engines[name].port)
        self.engines[name].wait_up()

    @property
    def agent_port(self) -> int:
        return int(self.agents["prefill"].address.partition("#")[0].rpartition(":")[2])

    def carried(self) -> float:
        """Bytes that the decode side has taken over so far."""
        return self.agents["decode"].status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0)

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


def router(fleet: Fleet, name: str) -> Server:
    """A router with its default settings, ready; only its ports are chosen.

    "smg, as SGLang's" is smg told that the engines are SGLang's, which it can be told only once it runs.
    """
    prefill, decode = fleet.engines["prefill"].url, fleet.engines["decode"].url
    python, port = str(ROUTERS / "python"), free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = {
        "vllm-router": [str(ROUTERS / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", prefill],
        "smg": [python, "-m", "smg", "launch", "--pd-disaggregation", "--prefill", prefill],
        "smg, as SGLang's": [python, "-m", "smg", "launch", "--pd-disaggregation"],
        "sglang-router": [
            *(python, "-m", "sglang_router", "launch", "--pd-disaggregation"),
            *("--prefill", prefill, str(fleet.agent_port)),
        ],
    }[name] + where
    is_told = name == "smg, as SGLang's"
    running = serve(command + ([] if is_told else ["--decode", decode]), port, fleet.folder / f"{name}.log")
    if is_told:
        running.wait_up("/liveness")
        for url, kind in ((prefill, "prefill"), (decode, "decode")):
            worker = {"url": url, "worker_type": kind, "runtime_type": "sglang", "bootstrap_port": fleet.agent_port}
            assert running.ask("/workers", worker)[0] == 202
    running.wait_up("/readiness")
    return running
