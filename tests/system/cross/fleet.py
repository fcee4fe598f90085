"""Real vLLM engines and real SGLang servers of one model, each rank beside a real agent."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from demo.model import prompt, write_model
from testing.agents import AgentProcess
from tests.system.engines import fleet as vllm
from tests.system.sglang import fleet as sglang
from tests.system.sglang import rows
from tests.system.sglang.fleet import Answer, answer_of

TOKENS = sglang.TOKENS
SEEDS = itertools.count(1)  # no prompt is used twice


class Cross:
    """Both fleets; a prompt goes from one engine of one to one engine of the other."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        start: Sequence[str] = (),
        write: Callable[[Path], Path] = write_model,
        of_vllm: Mapping[str, Any] | None = None,
        of_sglang: Mapping[str, Any] | None = None,
    ) -> None:
        python = os.environ["KVBRIDGE_TEST_VLLM_PYTHON"]
        (folder / "vllm").mkdir()
        alike = {"write": write}  # unless an engine reads another configuration
        ours: dict[str, Any] = {"dtype": "float32", **alike, **(of_vllm or {})}
        theirs: dict[str, Any] = {"start": start} | alike | dict(of_sglang or {})
        self.vllm = vllm.Fleet(folder / "vllm", stack, python=python, **ours)
        self.sglang = sglang.Fleet(folder / "sglang", stack, **theirs)
        self._moved: list[float] = []  # bytes that each prompt moved

    def logs(self) -> list[tuple[str, str]]:
        """The end of each agent's and each engine's log."""
        return self.vllm.logs() + self.sglang.logs()

    @staticmethod
    def room() -> int:
        return random.SystemRandom().randrange(1, 1 << 63)

    def to_sglang(
        self, sender: str, receiver: str, tokens: list[int], **more: Any
    ) -> tuple[Answer, rows.SavedRows, rows.SavedRows]:
        """vLLM prefills, SGLang decodes: the answer, the rows that were given and those that were taken."""
        server = self.sglang[receiver]  # up before anything is held for it
        request, body = self.for_sglang(sender, tokens, **more)
        given = self.vllm.rows(sender, request, 0, len(tokens))
        with self._counted(self.sglang, receiver):
            status, said = server.generate(body)
        assert status == 200, said
        return answer_of(said), given, self._kept("decode", receiver, body["bootstrap_room"])

    def to_vllm(
        self, sender: str, receiver: str, tokens: list[int]
    ) -> tuple[list[int], int, rows.SavedRows, rows.SavedRows]:
        """SGLang prefills, vLLM decodes, asked at once: the tokens, how many were not computed, both sides' rows."""
        request = self.vllm.name(f"d-{receiver}")
        self.vllm.start(receiver)
        begun, params = self.for_vllm(sender, tokens)
        with self._counted(self.vllm, receiver):
            answer = self.vllm[receiver].run(request, tokens, TOKENS, params)
        taken = self.vllm.rows(receiver, request, 0, len(tokens) - 1)
        assert begun.getresponse().status == 200
        begun.close()
        given = self._kept("prefill", sender, params["bootstrap_room"])
        return list(answer.tokens), answer.cached, given.first(len(tokens) - 1), taken

    def for_sglang(self, sender: str, tokens: list[int], **more: Any) -> tuple[str, dict[str, Any]]:
        """vLLM prefills: its request's name, and the body for SGLang."""
        room, request = self.room(), self.vllm.name(f"p-{sender}")
        prefilled = self.vllm[sender].run(
            request, tokens, 1, vllm.PREFILL | {"bootstrap_room": room, "fetched_by": "sglang"}
        )
        return request, decode_body(tokens, room, prefilled, **more)

    def for_vllm(self, sender: str, tokens: list[int]) -> tuple[HTTPConnection, dict[str, Any]]:
        """SGLang begins to prefill: where it will answer, and the parameters for vLLM."""
        room = self.room()
        begun = self.sglang[sender].begin(prefill_body(tokens, room))
        return begun, fetch_params(self.sglang.agents[sender][0], room)

    def assert_prefix_stayed(self) -> None:
        """Of the last prompt, which begins as the one before, the receiver was not brought again what it had."""
        first, second = self._moved[-2:]
        assert 0 < second < first / 2, f"{second} bytes, and {first} before"

    @contextmanager
    def _counted(self, fleet: vllm.Fleet | sglang.Fleet, receiver: str) -> Iterator[None]:
        before = fleet.moved_bytes(receiver)
        yield
        self._moved.append(fleet.moved_bytes(receiver) - before)

    def _kept(self, side: str, name: str, room: int) -> rows.SavedRows:
        return rows.load(self.sglang.kept, side, room, self.sglang.configs[name].shards)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """One of each length, and one that begins as the last of them."""
    found = [prompt(length, seed=next(SEEDS)) for length in lengths]
    return [*found, found[-1] + prompt(90, seed=next(SEEDS))]


def greedy(tokens: list[int], amount: int) -> dict[str, Any]:
    return {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": amount, "ignore_eos": True}}


def decode_body(tokens: list[int], room: int, prefilled: Any, amount: int = TOKENS, **more: Any) -> dict[str, Any]:
    """What a router sends to SGLang's decode server when vLLM has prefilled. `more` is told of vLLM, or instead."""
    params = prefilled.params
    told = {
        "sender": f"tcp://{params['remote_host']}:{params['remote_port']}",
        "first_token": prefilled.tokens[0],
        "rendezvous": params["remote_request_id"],
    }
    return _told(greedy(tokens, amount), told | more) | {"bootstrap_host": "kvbridge", "bootstrap_room": room}


def prefill_body(tokens: list[int], room: int, amount: int = TOKENS) -> dict[str, Any]:
    """What a router sends to SGLang's prefill server when vLLM is to decode."""
    body = _told(greedy(tokens, amount), {"fetched_by": "vllm"})
    return body | {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}


def fetch_params(sender: AgentProcess, room: int) -> dict[str, Any]:
    """What a router sends to vLLM when SGLang prefills."""
    host, _, port = sender.address.removeprefix("tcp://").partition(":")
    where = {"remote_host": host, "remote_port": int(port)}
    return {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room, **where}


def _told(body: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What SGLang is told of the other engine."""
    return body | {"sampling_params": body["sampling_params"] | {"custom_params": {"kvbridge": said}}}
