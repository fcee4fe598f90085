"""Engines between which running answers move, behind `kvbridge proxy`, and clients that read them token by token."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from demo.model import prompt
from demo.processes import free_port
from testing.agents import PYTHON, AgentProcess, agent
from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.system.routers.fleet import CHAT, NAME, ROOT, ROW_BYTES, SETTINGS, VLLM, write_served

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ANSWER = 300  # tokens
MOST_S = 600.0


class MovingProxy(HttpServer):
    """`kvbridge proxy`, which drains its engines when told to. `engines`: the options that name them."""

    def __init__(self, folder: Path, *engines: str) -> None:
        self._control, port = folder / "proxy.ctl", free_port()
        command = [PYTHON, "-m", "kvbridge.cli", "proxy", "--listen", f"127.0.0.1:{port}", *engines]
        super().__init__([*command, "--control", str(self._control)], port, folder / "proxy.log")

    def drain(self, engine: str, *more: str) -> list[str]:
        """What `kvbridge drain` says, once it has ended well."""
        command = [PYTHON, "-m", "kvbridge.cli", "drain", engine, "--control", str(self._control), *more]
        told = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
        assert told.returncode == 0, (told.stdout, told.stderr)
        return told.stdout.splitlines()

    def moves(self, outcome: str) -> float:
        told = self.ask("/metrics")[1]
        return sum(
            map(float, re.findall(rf'^kvbridge_proxy_moves_total\{{.*"{outcome}"\}} (\S+)$', told, re.MULTILINE))
        )


class Served:
    """Prefill, two decode engines with other blocks, and the proxy, which reads its engines from a file."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.listed = folder, folder / "engines"
        write_served(folder / "model")
        (folder / "chat.jinja").write_text(CHAT)
        names = ("prefill", "d0", "d1")
        self.agents = {name: stack.enter_context(agent(folder, name, slot_bytes=1 << 20)) for name in names}
        self.engines = {name: self._engine(name) for name in names}
        for engine in self.engines.values():
            stack.callback(engine.kill)
        for engine in self.engines.values():
            engine.wait_up(seconds=MOST_S)
        self.list_decoding("d0", "d1")
        self.proxy = MovingProxy(folder, "--engines", str(self.listed))
        stack.callback(self.proxy.kill)
        self.proxy.wait_up()

    def _engine(self, name: str) -> HttpServer:
        options = {"kvbridge_socket": str(self.agents[name].socket), "kvbridge_return_s": MOST_S}
        transfer = {
            "kv_connector": "KVBridgeConnector",
            "kv_connector_module_path": "kvbridge.adapters.vllm.connector",
            "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options,
        }
        block = {"prefill": "32", "d0": "64", "d1": "128"}[name]
        command = [
            *(str(VLLM), "-m", "kvbridge.adapters.vllm.on_cpu", "serve", str(self.folder / "model")),
            *("--served-model-name", NAME, "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"),
            *("--host", "127.0.0.1", "--port", str(port := free_port()), "--block-size", block),
            *("--chat-template", str(self.folder / "chat.jinja"), "--kv-transfer-config", json.dumps(transfer)),
        ]
        return HttpServer(command, port, self.folder / f"{name}-engine.log", {"PYTHONPATH": str(ROOT), **SETTINGS})

    def list_decoding(self, *names: str) -> None:
        engines = [("prefill", "prefill"), *(("decode", name) for name in names)]
        lines = [f"{role} vllm={self.engines[name].url}\n" for role, name in engines]
        self.listed.write_text("".join(lines))

    def reload(self) -> None:
        self.proxy.process.send_signal(signal.SIGHUP)

    def drain(self, name: str, *more: str) -> list[str]:
        return self.proxy.drain(f"vllm={self.engines[name].url}", *more)

    def wait_decoding(self, count: int) -> None:
        wait_for(lambda: len(json.loads(self.proxy.ask("/health")[1])["healthy"]["decode"]) == count, MOST_S)


def fetched(running: AgentProcess) -> float:
    """Tokens that this agent has fetched so far."""
    return running.status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0) / ROW_BYTES


class Stream:
    """A client. `text` is what it has got so far, `seconds` when each event with text came.

    `moved_at` is the first of these events that another engine than the first sent: there the proxy leaves out a field
    which the first engine's events have.
    """

    def __init__(self, number: int, path: str = "", /, **asked: Any) -> None:
        self.tokens, self.text, self.ids = prompt(100 + 9 * (number % 16), seed=number), "", set[str]()
        self.token_ids, self.seconds, self.moved_at = list[int](), list[float](), 0
        self.error = ""
        said = " ".join(map(str, self.tokens))
        self.path = path or (COMPLETIONS, CHATS)[number % 2]
        self._field = "token_ids" if self.path == CHATS else "prompt_token_ids"
        self.body = {"model": NAME, "max_tokens": ANSWER, "temperature": 0, **asked}
        if self.path == CHATS:
            self.body["messages"] = [{"role": "user", "content": said}]
        elif self.path == COMPLETIONS:
            self.body["prompt"] = said
        else:
            self.body = {"text": said, "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0, **asked}}

    def run(self, server: HttpServer) -> None:
        with server.opened(self.path, self.body | {"stream": True}, MOST_S) as answer:
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.error = event["error"]["code"]
                        return
                    if self.path == GENERATE:
                        self._generated(**event)
                        continue
                    self.ids.add(event["id"])
                    self._take(event["choices"][0])
        raise AssertionError("no [DONE]")

    def _take(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice.get("token_ids") or []
        if text := choice.get("text") or (choice.get("delta") or {}).get("content") or "":
            self.text += text
            self.moved_at = self.moved_at or len(self.seconds) * (self._field not in choice)
            self.seconds.append(time.monotonic())

    def _generated(self, text: str, output_ids: list[int], meta_info: dict[str, Any]) -> None:
        """An event of /generate has all of the answer so far, or what is new, as that of the first server."""
        self.ids.add(meta_info["id"])
        has_all = len(output_ids) == meta_info["completion_tokens"]
        self.text = text if has_all else self.text + text
        self.token_ids = output_ids if has_all else self.token_ids + output_ids
        assert len(self.token_ids) == meta_info["completion_tokens"]

    def alone(self, server: HttpServer) -> str:
        choice: dict[str, Any] = json.loads(server.answer(self.path, self.body, MOST_S))["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    def sampled(self) -> int:
        return len(self.text.split())
