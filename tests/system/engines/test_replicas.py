"""Data parallelism of vLLM: replicas with KV of their own and an agent each, which share a model's experts.

vLLM balances between them itself (one server for all), or something in front does (`--data-parallel-rank`: a server
each, and sockets of other names). It has the second for models with experts only.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS, prompt
from demo.processes import SETTINGS, free_port
from demo.pythonpath import of_checkout
from demo.servers import VLLM_SERVER, vllm_flags
from tests.integration.agent.harness import PYTHON, AgentProcess, agent
from tests.support.pages import block, told, why_not
from tests.system.engines.kinds import write_experts
from tests.system.http_server import HttpServer
from tests.system.sglang.rows import assert_carried, load

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(660)]

REPLICAS, START_S, TOKENS = 2, 600.0, 8
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 2  # of a token, in bf16


class Replica:
    """One of a side's replicas, and its agent."""

    def __init__(self, server: HttpServer, rank: int | None, its_agent: AgentProcess) -> None:
        self.server, self.agent = server, its_agent
        self._headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def ask(self, tokens: list[int], count: int, **params: Any) -> dict[str, Any]:
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        more = {"kv_transfer_params": params} if params else {}
        status, said = self.server.ask("/v1/completions", body | more, headers=self._headers)
        assert status == 200, said
        answer: dict[str, Any] = json.loads(said)
        return answer

    @property
    def received_bytes(self) -> float:
        return self.agent.status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0)


class Sides:
    """`inner`: vLLM chooses among its replicas. `outer`: somebody else does."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._model = str(write_experts(folder / "model"))
        agents = {n: stack.enter_context(agent(folder, n, slot_bytes=1 << 20)) for n in ("i-0", "i-1", "o0-0", "o1-0")}
        outer = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
        inner = self._serve("i", 32, [])
        ranks = [self._serve(f"o{rank}", 64, [*outer, "--data-parallel-rank", str(rank)]) for rank in range(REPLICAS)]
        for server in (inner, *ranks):
            server.wait_up(seconds=START_S)
        self.inner = [Replica(inner, rank, agents[f"i-{rank}"]) for rank in range(REPLICAS)]
        self.outer = [Replica(ranks[rank], None, agents[f"o{rank}-0"]) for rank in range(REPLICAS)]

    def _serve(self, name: str, block_tokens: int, flags: Sequence[str]) -> HttpServer:
        port = free_port()
        command = [
            *("nice", "-n", "10", sys.executable, "-m", "tests.system.engines.replica_engine"),
            *vllm_flags(self._model, block_tokens, str(self.folder / f"{name}-{{rank}}.sock"), "fail"),
            *("--data-parallel-size", str(REPLICAS), "--api-server-count", "1"),
            *("--host", "127.0.0.1", "--port", str(port), *flags),
        ]
        log, environment = self.folder / f"{name}.log", SETTINGS | VLLM_SERVER | of_checkout()
        server = HttpServer(command, port, log, environment)
        self._stack.callback(server.kill)
        return server


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with contextlib.ExitStack() as stack:
        yield Sides(tmp_path_factory.mktemp("replicas"), stack)


@pytest.mark.parametrize("way", ["inner to outer", "outer to inner"])
def test_every_replica_takes_from_every_other(sides: Sides, way: str) -> None:
    senders, receivers = (sides.inner, sides.outer) if way == "inner to outer" else (sides.outer, sides.inner)
    for number, (sender, receiver) in enumerate((s, r) for s in senders for r in receivers):
        room = 10 * (1 + (senders is sides.outer)) + number
        tokens = prompt(300 + 33 * number, seed=room)
        before = [each.received_bytes for each in receivers]
        prefilled = sender.ask(tokens, 1, do_remote_decode=True, bootstrap_room=room)
        answer = receiver.ask(tokens, TOKENS, **prefilled["kv_transfer_params"])
        moved = [each.received_bytes > was for each, was in zip(receivers, before, strict=True)]
        assert moved == [each is receiver for each in receivers]
        ours, theirs = (load(sides.folder, side, room, 1) for side in ("prefill", "decode"))
        assert_carried(ours.first(len(tokens) - 1), theirs.first(len(tokens) - 1))
        alone = sides.inner[0].ask(tokens, TOKENS)
        assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def test_the_page_spreads_prompts_over_replicas(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    page, ends = "docs/data-parallel.md", block("README.md", "kill $(jobs")
    alone = "for first in 1 2 3 4 5 6; do ask 8100 $first; done\n"
    script = block(page, "# four ranks on CPUs") + block(page, "# prefill: one replica") + alone + ends
    environments = {".venv": str(Path(PYTHON).parents[1]), ".venv-vllm": sys.prefix}
    said = told(script, tmp_path, environments, START_S)
    texts = re.findall(r'^"text": *"(.+)"$', said, re.MULTILINE)
    assert len(texts) == 12 and sorted(texts[:6]) == sorted(texts[6:]), said
    moved = re.findall(r'^kvbridge_wire_bytes_total\{role="receiver"\} (\S+)$', said, re.MULTILINE)
    assert len(moved) == REPLICAS and sum(map(float, moved)) == sum(500 - first for first in range(1, 7)) * ROW_BYTES, (
        said
    )
