"""Replicas of vLLM servers, each beside its agent, and what goes from each of one side to each of another."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbridge_proto.status import Status

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS, prompt
from testing.agents import PYTHON, AgentProcess
from testing.http_server import HttpServer
from tests.system.sglang.rows import assert_carried, load

REPLICAS, TOKENS = 2, 8
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 2  # of a token, in bf16
UNIT_TOKENS = 64  # may move as one, the last beyond the prompt's end
PAGE, CPUS, COMMON = "docs/data-parallel.md", "# four ranks on CPUs", "agent()"


class Replica:
    """One of a side's replicas. `rank` is its number if its server has several, `host` where it is.

    `statuses` tell of its agents, one a rank.
    """

    def __init__(self, server: HttpServer, rank: int | None, *statuses: Callable[[], Status], host: str = "") -> None:
        self.server, self.host = server, host
        self.statuses = statuses
        self.headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def ask(self, tokens: list[int], count: int, **params: Any) -> dict[str, Any]:
        status, said = self.server.ask("/v1/completions", body_of(tokens, count, **params), headers=self.headers)
        assert status == 200, said
        answer: dict[str, Any] = json.loads(said)
        return answer

    @property
    def address(self) -> str:
        return self.statuses[0]().agent.address


@contextmanager
def moved(agents: Sequence[Callable[[], Status]], role: str = "receiver") -> Iterator[list[set[str]]]:
    """By what routes bytes went through each agent meanwhile. Known once the block has ended."""
    before, routes = [_moved(each(), role) for each in agents], list[set[str]]()
    yield routes
    after = [_moved(each(), role) for each in agents]
    routes += [{route for route in now if now[route] > was[route]} for now, was in zip(after, before, strict=True)]


def status_of(agent: AgentProcess) -> Callable[[], Status]:
    return lambda: agent.status


def _moved(status: Status, role: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, value in status.counters.items():
        labels = dict(each.split("=") for each in name.partition("{")[2].strip("}").split(",") if "=" in each)
        if name.startswith("kvbridge_route_bytes_total") and labels["role"] == role:
            counts[labels["route"]] += int(value)
    return counts


def body_of(tokens: list[int], count: int, **params: Any) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return body | ({"kv_transfer_params": params} if params else {})


def assert_numbered(replicas: Sequence[Replica]) -> None:
    """Their agents' status says which is which."""
    engines = [each.statuses[0]().engine for each in replicas]
    assert [each and each.shard for each in engines] == [f"dp {number}" for number in range(len(replicas))]


def assert_all_to_all(
    folder: Path,
    senders: Sequence[Replica],
    receivers: Sequence[Replica],
    seed: int,
    planes: int = 2 * LAYERS,
    is_like_alone: bool = True,
) -> None:
    """One prompt for each pair. Only the receiver's agents are brought rows, by NIXL from another host."""
    agents = [(each, status) for each in receivers for status in each.statuses]
    for number, (sender, receiver) in enumerate(itertools.product(senders, receivers)):
        room = seed + number
        tokens = prompt(300 + 33 * number, seed=room)
        prefilled = sender.ask(tokens, 1, do_remote_decode=True, bootstrap_room=room)
        with moved([status for _, status in agents]) as routes:
            answer = receiver.ask(tokens, TOKENS, **prefilled["kv_transfer_params"])
        route = "pull" if sender.host == receiver.host else "nixl"
        assert routes == [{route} if each is receiver else set() for each, _ in agents]
        ours, theirs = (load(folder, side, room, 1) for side in ("prefill", "decode"))
        assert len(ours.rows) == planes
        assert_carried(ours.first(len(tokens) - 1), theirs.first(len(tokens) - 1))
        if is_like_alone:
            alone = senders[0].ask(tokens, TOKENS)
            assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def environments() -> dict[str, str]:
    """What the page's commands find in their folder."""
    return {".venv": str(Path(PYTHON).parents[1]), ".venv-vllm": sys.prefix}


def assert_spread(said: str, computed: int = 1) -> None:
    """What the page's commands say: six prompts at once are answered as one after the other, and all came as rows.

    All but the last tokens that a decode engine computes itself.
    """
    texts = re.findall(r'^"text": *"(.+)"$', said, re.MULTILINE)
    assert len(texts) == 12 and sorted(texts[:6]) == sorted(texts[6:]), said
    came = re.findall(r'^kvbridge_wire_bytes_total\{role="receiver"\} (\S+)$', said, re.MULTILINE)
    expected = sum(501 - first - computed for first in range(1, 7)) * ROW_BYTES
    most = expected + 6 * UNIT_TOKENS * ROW_BYTES
    assert len(came) == REPLICAS and expected <= sum(map(float, came)) < most, said
