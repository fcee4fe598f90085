"""`kvbridge proxy` in front of real servers of both engines: tokens as from one server alone, and KV really carried."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from demo.model import write_model, write_tokenizer
from tests.system.routers import fleet as vllm
from tests.system.routers.fleet import CHAT, NAME, ROW_BYTES, Server, free_port, serve
from tests.system.routers.test_routers import chat, completion, prompt, said
from tests.system.sglang import fleet as sglang
from tests.system.sglang.fleet import assert_idle

pytestmark = [pytest.mark.cross, pytest.mark.timeout(600)]

COUNT = 12
CLOSE = 1e-3  # of log probabilities, in fp32


@dataclass
class Both:
    """Servers of both engines, and a proxy for each direction."""

    vllm: vllm.Fleet
    sglang: sglang.Fleet
    proxies: dict[str, Server]

    def carried(self) -> float:
        """Bytes that the decode sides have taken over so far."""
        agents = [self.vllm.agents["decode"], *self.sglang.agents["d16"]]
        return sum(each.status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0) for each in agents)

    def alone(self, body: dict[str, Any]) -> list[str]:
        server = self.sglang["alone"]
        return said(Server(server.process, server.port, server.log), body)

    def wait_empty(self) -> None:
        assert_idle(self.sglang, "p16", "d16", timeout_s=60)
        self.vllm.wait_empty()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("both")
    (folder / "chat.jinja").write_text(CHAT)
    (folder / "vllm").mkdir()
    flags = ("--served-model-name", NAME, "--chat-template", str(folder / "chat.jinja"))
    with ExitStack() as stack:
        of_sglang = sglang.Fleet(
            folder / "sglang",
            stack,
            lambda model: write_tokenizer(write_model(model, eos_token_id=None)),
            changes={"has_tokenizer": True, "flags": flags},
        )
        of_vllm = vllm.Fleet(folder / "vllm", stack)
        of_sglang.start("p16", "d16", "alone")
        places = {
            "vllm": (f"vllm={of_vllm.engines['prefill'].url}", f"vllm={of_vllm.engines['decode'].url}"),
            "sglang": (
                f"sglang=http://127.0.0.1:{of_sglang['p16'].port},bootstrap={of_sglang['p16'].bootstrap_port}",
                f"sglang=http://127.0.0.1:{of_sglang['d16'].port}",
            ),
        }
        found = Both(of_vllm, of_sglang, {})
        for sender, receiver in (("vllm", "sglang"), ("sglang", "vllm")):
            port, name = free_port(), f"{sender} to {receiver}"
            command = [
                *(os.environ["KVBRIDGE_TEST_AGENT_PYTHON"], "-m", "kvbridge.cli", "proxy"),
                *("--prefill", places[sender][0], "--decode", places[receiver][1], "--listen", f"127.0.0.1:{port}"),
            ]
            found.proxies[name] = running = serve(command, port, folder / f"{name}.log")
            stack.callback(running.kill)
            running.wait_up()
        yield found


@pytest.fixture(scope="module", params=["vllm to sglang", "sglang to vllm"])
def front(request: pytest.FixtureRequest, both: Both) -> Server:
    return both.proxies[request.param]


def assert_carried(both: Both, front: Server, body: dict[str, Any], tokens: int) -> None:
    """As one server alone answers, and at least so many prompt tokens came over the bridge."""
    before = both.carried()
    assert said(front, body) == both.alone(body)
    came = both.carried() - before
    assert came >= tokens * ROW_BYTES, f"{came / ROW_BYTES} tokens of {tokens} came"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
def test_one_prompt(both: Both, front: Server, make: Any, stream: bool) -> None:
    assert_carried(both, front, make(prompt(200), stream=stream), 199)


@pytest.mark.parametrize("make", [completion, chat])
def test_two_answers_to_one_prompt(both: Both, front: Server, make: Any) -> None:
    """Greedy, so both are what one is."""
    body = make(prompt(150), n=2)
    before = both.carried()
    assert said(front, body) == both.alone(body | {"n": 1}) * 2
    assert both.carried() - before >= 149 * ROW_BYTES


def test_three_prompts_in_a_call(both: Both, front: Server) -> None:
    assert_carried(both, front, completion([prompt(100), prompt(170), prompt(65)]), 99 + 169 + 64)


def test_eight_at_once(both: Both, front: Server) -> None:
    bodies = [(completion, chat)[i % 2](prompt(80 + i), stream=i % 4 > 1) for i in range(8)]
    before = both.carried()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: said(front, body), bodies))
    assert both.carried() - before >= sum(79 + i for i in range(8)) * ROW_BYTES
    assert answers == [both.alone(body) for body in bodies]
    both.wait_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_generate(both: Both, front: Server, stream: bool) -> None:
    number = sorted(both.proxies).index(front.name) * 2 + stream
    tokens = sglang.prompt(150, seed=700 + number)  # the other tests' prompts count from 1
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}}
    before = both.carried()
    status, text = front.ask("/generate", body | {"stream": stream})
    assert status == 200, text
    if stream:
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", text[-500:]
        text = events[-2]
    answer = json.loads(text)
    assert answer["output_ids"] == list(both.sglang.alone(tokens, COUNT).tokens)
    assert answer["meta_info"]["prompt_tokens"] == 150 and answer["meta_info"]["completion_tokens"] == COUNT
    assert both.carried() - before >= 149 * ROW_BYTES


def test_log_probabilities_of_every_token(both: Both, front: Server) -> None:
    """The first token's are prefill's, where SGLang decodes."""
    body = completion(prompt(120), logprobs=2)
    found = _logprobs(front, body)
    server = both.sglang["alone"]
    expected = _logprobs(Server(server.process, server.port, server.log), body)
    assert len(found) == COUNT
    assert all(abs(ours - theirs) < CLOSE for ours, theirs in zip(found, expected, strict=True)), (found, expected)


def test_a_client_that_leaves(both: Both, front: Server) -> None:
    with front.opened("/v1/completions", completion(prompt(200), max_tokens=1500, stream=True)) as answer:
        answer.readline()
    both.wait_empty()
    assert_carried(both, front, completion(prompt(90)), 89)


def _logprobs(server: Server, body: dict[str, Any]) -> list[float]:
    status, text = server.ask("/v1/completions", body)
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    return list(choice["logprobs"]["token_logprobs"])
