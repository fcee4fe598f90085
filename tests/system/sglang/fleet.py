"""Real SGLang servers that differ, and a single server as reference."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbridge_proto.status import Status

from demo.model import write_model
from demo.processes import free_port
from testing.agents import PYTHON
from testing.http_server import HttpServer
from testing.kept import Kept
from testing.waiting import wait_for
from tests.system.engines.fleet import prompt
from tests.system.sglang import rows
from tests.system.sglang.rows import SavedRows
from tests.system.sglang.server import Server, ServerConfig

__all__ = ["Answer", "Fleet", "assert_idle", "prompt"]

TOKENS = 12  # decoded of each prompt
MOST = 7  # servers at a time: a GiB each
# fp32 engines that compute in other orders differ by 1e-4 at most; below that greedy tokens may part.
CLOSE = 0.01
CONFIGS = {
    "p16": ServerConfig("prefill"),
    "p32": ServerConfig("prefill", page_size=32),
    "p1": ServerConfig("prefill", page_size=1),
    "p64": ServerConfig("prefill", page_size=64),
    "p16-two": ServerConfig("prefill", tensor_parallel_size=2),
    "p32-two": ServerConfig("prefill", page_size=32, tensor_parallel_size=2),
    "p64-two": ServerConfig("prefill", page_size=64, tensor_parallel_size=2),
    "p16-stages": ServerConfig("prefill", pipeline_parallel_size=2),
    "d16-stages": ServerConfig("decode", pipeline_parallel_size=2),
    "p16-bf16": ServerConfig("prefill", dtype="bfloat16"),
    "d16": ServerConfig("decode"),
    "d16-small": ServerConfig("decode", max_total_tokens=1280),
    "d32": ServerConfig("decode", page_size=32),
    "p16-replicas": ServerConfig("prefill", tensor_parallel_size=2, data_parallel_size=2),
    "d32-replicas": ServerConfig("decode", page_size=32, tensor_parallel_size=2, data_parallel_size=2),
    "p16-replicas-of-two": ServerConfig("prefill", tensor_parallel_size=4, data_parallel_size=2),
    "d64": ServerConfig("decode", page_size=64),
    "d128": ServerConfig("decode", page_size=128),
    "d16-two": ServerConfig("decode", tensor_parallel_size=2),
    "d64-two": ServerConfig("decode", page_size=64, tensor_parallel_size=2),
    "d16-bf16": ServerConfig("decode", kv_cache_dtype="bf16"),
    "d64-bf16": ServerConfig("decode", page_size=64, kv_cache_dtype="bf16"),
    "d16-fp8": ServerConfig("decode", dtype="bfloat16", kv_cache_dtype="fp8_e4m3"),
    "alone": ServerConfig("alone"),
}


@dataclass(frozen=True)
class Answer:
    """Of one prompt. `gaps` are the differences of the two best log-probabilities, one a token."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    cached: int
    reason: Any


class Fleet(Kept[Server]):
    """Servers of CONFIGS, and `others`."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        write: Callable[[Path], Path] = write_model,
        changes: Mapping[str, Any] | None = None,
        python: str = sys.executable,
        others: Mapping[str, ServerConfig] | None = None,
        start: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, stack, MOST)
        self.kept = folder / "rows"
        self.kept.mkdir(parents=True)
        self._model = str(write(folder / "model"))
        self._changes = changes or {}  # of every server's configuration
        self._python = python  # one that has SGLang
        self.configs = CONFIGS | dict(others or {})
        self._rooms = itertools.count(random.SystemRandom().getrandbits(40) << 16)
        self.start(*start)

    def _ranks(self, name: str) -> int:
        return self.configs[name].ranks

    def _begin(self, name: str) -> Server:
        config = replace(self.configs[name], **self._changes)
        told = {"KVBRIDGE_TEST_ROWS": str(self.kept)}
        if config.role != "alone" and config.backend == "kvbridge":
            told["KVBRIDGE_ENGINE_SOCKET"] = str(self.folder / f"{name}-{{rank}}.sock")
            if name not in self.agents:
                self.start_agents(name)
        config = replace(config, environment=told | config.environment)
        return self._stack.enter_context(Server(config, self._model, self.folder, name, self._python))

    def room(self) -> int:
        """A rendezvous that was not used before."""
        return next(self._rooms)

    def body(self, sender: str, tokens: Sequence[Any], room: Any, count: int = TOKENS, **more: Any) -> dict[str, Any]:
        """The same for both servers of a pair; a prompt and a room, or as many of each."""
        return {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self[sender].bootstrap_port,
            "bootstrap_room": room,
            **more,
        }

    def both(
        self, sender: str, receiver: str, body: dict[str, Any], **decode: Any
    ) -> tuple[tuple[int, Any], tuple[int, Any]]:
        """What the prefilling server says to it, and what the decoding one, which is told `decode` too."""
        self.start(sender, receiver)
        with ThreadPoolExecutor(2) as pool:
            bodies = ((sender, body), (receiver, body | decode))
            given, taken = (pool.submit(self[name].generate, each) for name, each in bodies)
            return given.result(), taken.result()

    def ask(
        self, sender: str, receiver: str, prompts: Sequence[list[int]], count: int = TOKENS
    ) -> list[tuple[int, Answer]]:
        """Each prompt's room and the decoding server's answer; several go as arrays of one request."""
        rooms = [self.room() for _ in prompts]
        self.start(sender, receiver)
        body = self.body(sender, prompts, rooms, count)
        (_, given), (status, taken) = self.both(sender, receiver, body)
        assert status == 200, (taken, given)
        return list(zip(rooms, (answer_of(each) for each in taken), strict=True))

    def rows(self, sender: str, receiver: str, room: int) -> tuple[SavedRows, SavedRows]:
        """What was given and what was taken."""
        shards = [self.configs[name].shards for name in (sender, receiver)]
        given = rows.load(self.kept, "prefill", room, shards[0])
        return given, rows.load(self.kept, "decode", room, shards[1])

    def crossed(self, sender: str, receiver: str, *prompts: list[int], count: int = TOKENS) -> list[Answer]:
        """Prompts go from one server to the other; the rows that arrive are the reference conversion of those sent."""
        answers = self.ask(sender, receiver, prompts, count)
        for room, answer in answers:
            assert len(answer.tokens) == count, answer
            rows.assert_carried(*self.rows(sender, receiver, room))
        return [answer for _, answer in answers]

    @contextmanager
    def proxy(self, senders: Sequence[str], receiver: str) -> Iterator[Callable[[list[int], int], Answer]]:
        """`kvbridge proxy` before these servers; what is yielded asks it for so many tokens."""
        port, command = free_port(), [PYTHON, "-m", "kvbridge.cli", "proxy"]
        for name in senders:
            command += ["--prefill", f"sglang={self[name].url},bootstrap={self[name].bootstrap_port}"]
        command += ["--listen", f"127.0.0.1:{port}", "--decode", f"sglang={self[receiver].url}"]
        proxy = HttpServer(command, port, self.folder / "proxy.log")

        def ask(tokens: list[int], count: int) -> Answer:
            body = self.body(senders[0], tokens, None, count)
            body = {name: value for name, value in body.items() if not name.startswith("bootstrap_")}
            status, text = proxy.ask("/generate", body, 90.0)
            assert status == 200, text
            return answer_of(json.loads(text))

        try:
            proxy.wait_up()
            yield ask
        finally:
            proxy.kill()

    def alone(self, tokens: list[int], count: int = TOKENS) -> Answer:
        """What one server says by itself."""
        body = self.body("alone", tokens, None, count, bootstrap_host=None, bootstrap_port=None)
        status, said = self["alone"].generate(body)
        assert status == 200, said
        return answer_of(said)

    def assert_same_as_alone(self, tokens: list[int], answer: Answer) -> None:
        assert_same_tokens(self.alone(tokens, len(answer.tokens)), answer)


def assert_idle(fleet: Fleet, *names: str, timeout_s: float = 20.0) -> None:
    """Nothing is held for any request: not by the servers, not by their agents."""
    for name in names:
        fleet[name].wait_empty(timeout_s)
    for running in (each for name in names for each in fleet.agents.get(name, ())):
        wait_for(lambda running=running: _is_idle(running.status), timeout_s)


def _is_idle(status: Status) -> bool:
    slots = (status.receive_slots, status.send_slots)
    return not (status.offers or status.transfers or any(each.lent or each.quarantined for each in slots))


def answer_of(said: dict[str, Any]) -> Answer:
    meta = said["meta_info"]
    gaps = tuple(best[0] - second[0] for best, second in meta.get("output_top_logprobs") or ())
    return Answer(tuple(said["output_ids"]), gaps, meta.get("cached_tokens", 0), meta["finish_reason"])


def assert_same_tokens(alone: Answer, answer: Answer) -> None:
    """They may part where the two best tokens are as good as equal."""
    for i, (expected, found) in enumerate(zip(alone.tokens, answer.tokens, strict=True)):
        if expected == found:
            continue
        assert alone.gaps[i] < CLOSE, f"token {i} is {found}, alone {expected} (best by {alone.gaps[i]:.3f}): {answer}"
        return


def seed_of(sender: str, receiver: str, number: int) -> int:
    """Prompts of different pairs share no prefix."""
    return sum(map(ord, f"{sender}>{receiver}")) * 7919 + number * 31


def assert_says_the_same(fleet: Fleet, sender: str, receiver: str, lengths: Sequence[int]) -> None:
    """Prompts of these lengths, one after the other: the rows come, and tokens are as from one server alone."""
    fleet.start(sender, receiver, "alone")
    for number, length in enumerate(lengths):
        tokens = prompt(length, seed=seed_of(sender, receiver, number))
        (answer,) = fleet.crossed(sender, receiver, tokens)
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, sender, receiver)


def assert_rows_come(
    fleet: Fleet, sender: str, receiver: str, lengths: Sequence[int], row: Mapping[tuple[int, str], tuple[int, int]]
) -> None:
    """The same, of rows with so many heads and bytes by layer and part. If they are converted, tokens may differ."""
    for number, length in enumerate(lengths):
        tokens = prompt(length, seed=seed_of(sender, receiver, number))
        ((room, answer),) = fleet.ask(sender, receiver, [tokens])
        given, taken = fleet.rows(sender, receiver, room)
        rows.assert_carried(given, taken)
        assert {key: each.shape for key, each in given.rows.items()} == {key: (length, *row[key]) for key in row}
        if given.codec == taken.codec:
            fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, sender, receiver)


def assert_prefixes_serve(fleet: Fleet, sender: str, receiver: str) -> None:
    """Two prompts begin as an earlier one, which both sides have."""
    head = prompt(300, seed=4000)
    fleet.crossed(sender, receiver, head)
    for more in (1, 90):
        tokens = head + prompt(more, seed=4000 + more)
        (answer,) = fleet.crossed(sender, receiver, tokens)
        fleet.assert_same_as_alone(tokens, answer)


def assert_works(fleet: Fleet, sender: str, receiver: str, seed: int, timeout_s: float = 20.0) -> None:
    """Nothing is held, so long after whatever was wrong, and the next prompt is carried."""
    assert_idle(fleet, sender, receiver, timeout_s=timeout_s)
    tokens = prompt(100, seed=seed)
    (answer,) = fleet.crossed(sender, receiver, tokens)
    fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, sender, receiver)


def assert_sixteen_at_once(fleet: Fleet, sender: str, receiver: str) -> None:
    prompts = [prompt(40 + 23 * i, seed=seed_of(sender, receiver, 1000 + i)) for i in range(16)]
    fleet.start(sender, receiver, "alone")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda tokens: fleet.crossed(sender, receiver, tokens)[0], prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, sender, receiver)
