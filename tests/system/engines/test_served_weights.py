"""A real `vllm serve` that is asked to reset, pause and name its weights while it holds a prompt that nobody fetches.

`HOLD_S` is longer than every wait: whatever waited for the prompt would fail.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.model import write_model, write_tokenizer
from demo.processes import SETTINGS, free_port
from kvbridge.adapters.vllm.on_cpu import VLLM_SERVER
from testing.agents import AgentProcess, agent
from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.support.pages import run_block
from tests.system.engines.fleet import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT, HOLD_S, WAIT_S = Path(__file__).parents[3], 900, 120


@dataclass
class Served:
    agent: AgentProcess
    engine: HttpServer

    def ask(self, path: str, body: Any = None) -> Any:
        status, said = self.engine.ask(path, {} if body is None else body, WAIT_S)
        assert status == 200, said
        return json.loads(said or "null")

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"model": "demo", "prompt": tokens, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
        given: dict[str, Any] = self.ask("/v1/completions", body)["kv_transfer_params"]
        return given

    def hold(self, seed: int, weights: str) -> None:
        assert self.prefill(prompt(300, seed=seed))["remote_weights"] == weights
        wait_for(lambda: len(self.agent.status.offers) == 1, WAIT_S)

    def assert_free(self) -> None:
        wait_for(lambda: not self.agent.status.offers, WAIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_tokenizer(write_model(folder / "model", eos_token_id=None))
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(agent(folder, "prefill", slot_bytes=1 << 20))
        transfer = {
            "kv_connector": "KVBridgeConnector",
            "kv_connector_module_path": "kvbridge.adapters.vllm.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"kvbridge_socket": str(running.socket), "kvbridge_hold_s": HOLD_S},
        }
        port = free_port()
        command = [
            *(sys.executable, "-m", "kvbridge.adapters.vllm.on_cpu", "serve", str(folder / "model")),
            *(
                "--served-model-name",
                "demo",
                "--enforce-eager",
                "--dtype",
                "float32",
                "--max-model-len",
                "4096",
                "--block-size",
                "32",
            ),
            *("--max-num-batched-tokens", "256", "--host", "127.0.0.1", "--port", str(port)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        settings = {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", **SETTINGS, **VLLM_SERVER}
        engine = HttpServer(command, port, folder / "engine.log", settings)
        stack.callback(engine.kill)
        engine.wait_up(seconds=300)
        yield Served(running, engine)


@pytest.mark.parametrize("query", ["", "?reset_external=true", "?reset_running_requests=true"])
def test_a_reset_succeeds_the_first_time(served: Served, query: str) -> None:
    served.ask("/update_weight_version", {"new_version": f"before{query}"})
    served.hold(len(query), f"before{query}")
    assert served.ask(f"/reset_prefix_cache{query}") == {"success": True}
    served.assert_free()
    assert served.prefill(prompt(300, seed=90))["remote_weights"] == "", "nobody has named them"


def test_the_pages_commands_change_the_weights(served: Served, tmp_path: Path) -> None:
    served.ask("/update_weight_version", {"new_version": "6"})
    served.hold(80, "6")
    another = {"ENGINE": served.engine.url, "CHECKPOINT": str(write_model(tmp_path, seed=5)), "STEP": "7"}
    run_block("docs/operations.md", "# vLLM 0.32", another)
    served.assert_free()
    served.hold(81, "7")
    served.ask("/reset_prefix_cache")
    served.assert_free()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_ends_and_so_does_what_is_held(served: Served, mode: str) -> None:
    served.ask("/update_weight_version", {"new_version": mode})
    served.hold(100 + len(mode), mode)
    assert served.ask(f"/pause?mode={mode}") == {"status": "paused"}
    served.ask("/update_weight_version", {"new_version": f"after {mode}"})
    served.ask("/resume")
    served.assert_free()
    served.hold(110 + len(mode), f"after {mode}")
    served.ask("/reset_prefix_cache")
    served.assert_free()


def test_a_pause_that_lets_prompts_end_does_not_wait_for_their_being_fetched(served: Served) -> None:
    served.ask("/update_weight_version", {"new_version": "long"})
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(served.prefill, prompt(3500, seed=120))
        wait_for(lambda: served.agent.status.offers, WAIT_S)  # its first chunk
        assert served.ask("/pause?mode=wait") == {"status": "paused"}
        given.result(WAIT_S)
    served.ask("/resume")
    served.assert_free()
