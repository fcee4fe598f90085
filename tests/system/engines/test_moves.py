"""Running answers of real engines that move from a decode engine that drains to another, through `kvbridge proxy`.

Each client's stream must be what an engine alone gives, token for token.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from demo.model import prompt
from demo.processes import free_port
from testing.agents import PYTHON, AgentProcess, agent
from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.system.routers.fleet import CHAT, NAME, ROOT, ROW_BYTES, SETTINGS, VLLM, write_served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
STREAMS = 16
ANSWER = 300  # tokens
BEFORE = 140  # tokens of each answer that are there before its engine drains
MOST_S = 600.0


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
        port = free_port()
        self.control = folder / "proxy.ctl"
        command = [PYTHON, "-m", "kvbridge.cli", "proxy", "--listen", f"127.0.0.1:{port}", "--engines"]
        command += [str(self.listed), "--control", str(self.control)]
        self.proxy = HttpServer(command, port, folder / "proxy.log")
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

    def drain(self, name: str, *more: str) -> str:
        """What `kvbridge drain` says, once it has ended well."""
        command = [PYTHON, "-m", "kvbridge.cli", "drain", f"vllm={self.engines[name].url}", *more]
        told = subprocess.run([*command, "--control", str(self.control)], capture_output=True, text=True)
        assert told.returncode == 0, (told.stdout, told.stderr)
        return told.stdout

    def moves(self, outcome: str) -> float:
        told = self.proxy.ask("/metrics")[1]
        return sum(
            map(float, re.findall(rf'^kvbridge_proxy_moves_total\{{.*"{outcome}"\}} (\S+)$', told, re.MULTILINE))
        )

    def wait_decoding(self, count: int) -> None:
        wait_for(lambda: len(json.loads(self.proxy.ask("/health")[1])["healthy"]["decode"]) == count, MOST_S)


def fetched(running: AgentProcess) -> float:
    """Tokens that this agent has fetched so far."""
    return running.status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0) / ROW_BYTES


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("moves"), stack)


class Stream:
    """A client. `text` is what it has got so far."""

    def __init__(self, number: int) -> None:
        self.tokens, self.text, self.ids = prompt(100 + 9 * (number % STREAMS), seed=number), "", set[str]()
        self.error = ""
        self.path = "/v1/chat/completions" if number % 2 else "/v1/completions"
        said = " ".join(map(str, self.tokens))
        asked = {"messages": [{"role": "user", "content": said}]} if number % 2 else {"prompt": said}
        self.body = {"model": NAME, "max_tokens": ANSWER, "temperature": 0, **asked}

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
                    choice = event["choices"][0]
                    self.ids.add(event["id"])
                    self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        raise AssertionError("no [DONE]")

    def alone(self, server: HttpServer) -> str:
        choice: dict[str, Any] = json.loads(server.answer(self.path, self.body, MOST_S))["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    def sampled(self) -> int:
        return len(self.text.split())


@pytest.mark.parametrize("agent_is", ["there", "killed"])
def test_running_answers_move_token_for_token(served: Served, agent_is: str) -> None:
    """By `kvbridge drain`; and off the list, and without its agent: its KV cannot be fetched, and is computed again."""
    served.wait_decoding(2)
    agents, moved = served.agents, served.moves("moved")
    streams = [Stream(number + STREAMS * (agent_is == "killed")) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        runs = [threads.submit(each.run, served.proxy) for each in streams]
        wait_for(lambda: all(each.sampled() >= BEFORE for each in streams) or any(run.done() for run in runs), MOST_S)
        assert not any(run.done() for run in runs), "too fast: nothing is left to move"
        if agent_is == "killed":
            agents["d0"].process.kill()
            agents["d0"].process.wait(MOST_S)
        back, to = fetched(agents["prefill"]), fetched(agents["d1"])
        if agent_is == "killed":
            served.list_decoding("d1")
            served.reload()
        else:
            said = served.drain("d0").splitlines()
            assert f"decode: 0 under way, {STREAMS // 2} moved" in said and "can be stopped" in said[-1], said
        for run in runs:
            run.result(MOST_S)
    moved = served.moves("moved") - moved
    assert moved == STREAMS / 2 and not served.moves("returned")
    for each in streams:
        assert not each.error and each.text == each.alone(served.engines["prefill"])
        assert len(each.ids) == 1
    # To the engine that goes on, all but the last token; to prefill, whole multiples of what it does not have itself.
    assert fetched(agents["d1"]) - to >= moved * (100 + BEFORE)
    if agent_is == "there":
        served.drain("d0", "--undo")
    back = fetched(agents["prefill"]) - back
    assert back == 0 if agent_is == "killed" else back >= moved * PREFIX_TOKENS


def test_a_draining_engine_is_killed_as_its_answers_begin_to_move(served: Served) -> None:
    """Each client has its whole answer, or a right beginning and an error: wherever it was when the engine died."""
    served.list_decoding("d0", "d1")
    served.reload()
    served.wait_decoding(2)
    streams = [Stream(number + 2 * STREAMS) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        runs = [threads.submit(each.run, served.proxy) for each in streams]
        wait_for(lambda: all(each.sampled() >= BEFORE for each in streams) or any(run.done() for run in runs), MOST_S)
        served.list_decoding("d1")
        served.reload()
        wait_for(lambda: served.proxy.ask("/health")[1].count("vllm=") == 2, MOST_S)
        served.engines["d0"].kill()
        for run in runs:
            run.result(MOST_S)
    for each in streams:
        whole = each.alone(served.engines["prefill"])
        assert whole.startswith(each.text) if each.error else each.text == whole, (each.error, each.text, whole)
    assert sum(not each.error for each in streams) >= STREAMS / 2, "those of the other engine go on"
