"""Unmodified routers of the bootstrap style in front of two SGLang servers (pages of 16 and 64 tokens).

Tokens must be as from one server alone, and the prompt's KV really carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from demo.model import write_model, write_tokenizer
from tests.system.routers.fleet import CHAT, NAME, ROUTERS, ROW_BYTES, Server, free_port, serve
from tests.system.routers.test_routers import chat, completion, prompt, said
from tests.system.sglang.fleet import Fleet, assert_idle

pytestmark = [
    pytest.mark.routers,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: see make test-routers"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if not (ROUTERS / "smg").exists():
        pytest.skip("no .venv-routers: see make test-routers")
    folder = tmp_path_factory.mktemp("sglang")
    (folder / "chat.jinja").write_text(CHAT)
    changes = {
        "has_tokenizer": True,
        "flags": ("--served-model-name", NAME, "--chat-template", str(folder / "chat.jinja")),
    }
    with ExitStack() as stack:
        fleet = Fleet(
            folder, stack, lambda model: write_tokenizer(write_model(model, eos_token_id=None)), changes=changes
        )
        fleet.start("p16", "d64", "alone")
        yield fleet


@pytest.fixture(scope="module", params=["smg", "sglang_router"])
def front(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Server]:
    port, prefill = free_port(), fleet["p16"]
    command = [
        *(str(ROUTERS / "python"), "-m", request.param, "launch", "--pd-disaggregation"),
        *("--prefill", f"http://127.0.0.1:{prefill.port}", str(prefill.bootstrap_port)),
        *("--decode", f"http://127.0.0.1:{fleet['d64'].port}", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_port())),
    ]
    running = serve(command, port, fleet.folder / f"{request.param}.log")
    try:
        running.wait_up("/readiness")
        yield running
    finally:
        running.kill()


def carried(fleet: Fleet) -> float:
    return fleet.agents["d64"][0].status.counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0)


def alone(fleet: Fleet, body: dict[str, Any]) -> list[str]:
    server = fleet["alone"]
    return said(Server(server.process, server.port, server.log), body)


def assert_carried(fleet: Fleet, front: Server, body: dict[str, Any], tokens: int) -> None:
    before = carried(fleet)
    assert said(front, body) == alone(fleet, body)
    came = carried(fleet) - before
    assert came >= tokens * ROW_BYTES, f"{came / ROW_BYTES} tokens of {tokens} came"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
def test_one_prompt(fleet: Fleet, front: Server, make: Any, stream: bool) -> None:
    assert_carried(fleet, front, make(prompt(200), stream=stream), 200)


def test_three_prompts_in_a_call(fleet: Fleet, front: Server) -> None:
    assert_carried(fleet, front, completion([prompt(100), prompt(170), prompt(65)]), 335)


def test_eight_at_once(fleet: Fleet, front: Server) -> None:
    bodies = [(completion, chat)[i % 2](prompt(80 + i), stream=i % 4 > 1) for i in range(8)]
    before = carried(fleet)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: said(front, body), bodies))
    assert carried(fleet) - before >= sum(80 + i for i in range(8)) * ROW_BYTES
    assert answers == [alone(fleet, body) for body in bodies]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
def test_two_answers_to_one_prompt(fleet: Fleet, front: Server, make: Any, stream: bool) -> None:
    """The prompt comes once, and what does not fill a page once more for each answer."""
    assert_carried(fleet, front, make(prompt(150), n=2, stream=stream), 150 + 2 * (150 % 64))
    assert_idle(fleet, "p16", "d64", timeout_s=60)


def test_three_answers_to_each_of_two_prompts(fleet: Fleet, front: Server) -> None:
    body = completion([prompt(150), prompt(70)], n=3)
    assert_carried(fleet, front, body, 150 + 70 + 3 * (150 % 64 + 70 % 64))
    assert_idle(fleet, "p16", "d64", timeout_s=60)


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves(fleet: Fleet, front: Server, n: int) -> None:
    with front.opened("/v1/completions", completion(prompt(200), max_tokens=1500, stream=True, n=n)) as answer:
        answer.readline()
    assert_idle(fleet, "p16", "d64", timeout_s=60)
