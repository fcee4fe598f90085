"""Unmodified routers with their defaults in front of two vLLM servers.

Tokens must be as from one engine alone, and the prompt's KV really carried. docs/routers.md says what each router
sends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.system.routers.fleet import NAME, ROUTERS, ROW_BYTES, VLLM, Fleet, Server, router

pytestmark = [pytest.mark.routers, pytest.mark.timeout(600)]

COUNT = 12
seeds = itertools.count(1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    for needed in (VLLM, ROUTERS / "smg"):
        if not needed.exists():
            pytest.skip(f"no {needed}: see make test-routers")
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("routers"), stack)


@pytest.fixture(scope="module", params=["vllm-router", "smg", "smg, as SGLang's", "sglang-router"])
def front(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Server]:
    running = router(fleet, request.param)
    try:
        yield running
    finally:
        running.kill()


def prompt(tokens: int) -> str:
    """No two have a first block in common."""
    seed = next(seeds)
    return " ".join(str((i * 37 + (i * i) % 101 + seed * 131) % 1000 + 3) for i in range(tokens))


def completion(text: str | list[str], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": text, "max_tokens": COUNT, "temperature": 0} | more


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": messages, "max_tokens": COUNT, "temperature": 0} | more


def said(server: Server, body: dict[str, Any]) -> list[str]:
    """The text of each choice."""
    status, text = server.ask("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert status == 200, (status, text)
    texts: dict[int, str] = {}
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", text[-500:]
        answers = [json.loads(event) for event in events[:-1]]
    else:
        answers = [json.loads(text)]
    for choice in (each for answer in answers for each in answer["choices"]):
        part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + part
    # A special token (1) has no text.
    assert all(len(each.split()) > COUNT // 2 for each in texts.values()), text[-1000:]
    return [texts[index] for index in sorted(texts)]


def alone(fleet: Fleet, body: dict[str, Any]) -> list[str]:
    """What the prefill engine alone says: a request of more than one token that nobody tagged is its own."""
    return said(fleet.engines["prefill"], body)


def assert_carried(fleet: Fleet, front: Server, body: dict[str, Any], tokens: int) -> None:
    """As one engine alone answers, and at least so many prompt tokens came over the bridge."""
    before = fleet.carried()
    assert said(front, body) == alone(fleet, body)
    carried = fleet.carried() - before
    assert carried >= tokens * ROW_BYTES, f"{carried / ROW_BYTES} tokens of {tokens} came"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
def test_one_prompt(fleet: Fleet, front: Server, make: Any, stream: bool) -> None:
    assert_carried(fleet, front, make(prompt(200), stream=stream), 199)


@pytest.mark.parametrize("make", [completion, chat])
def test_two_answers_to_one_prompt(fleet: Fleet, front: Server, make: Any) -> None:
    """smg 1.13 asks its prefill engine for nothing when n > 1: the decode engine gets such a body alone, untagged."""
    body = make(prompt(150), n=2, temperature=0.01, top_k=1)
    if front.name != "smg":
        return assert_carried(fleet, front, body, 149)
    before, asked = fleet.carried(), fleet.prefills()
    texts = said(front, body)
    assert (fleet.carried(), fleet.prefills()) == (before, asked), "smg prefills these now: take the exception away"
    assert texts == alone(fleet, body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_three_prompts_in_a_call(fleet: Fleet, front: Server, stream: bool) -> None:
    assert_carried(fleet, front, completion([prompt(100), prompt(170), prompt(65)], stream=stream), 99 + 169 + 64)


def test_eight_at_once(fleet: Fleet, front: Server) -> None:
    bodies = [(completion, chat)[i % 2](prompt(80 + i), stream=i % 4 > 1) for i in range(8)]
    before = fleet.carried()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: said(front, body), bodies))
    assert fleet.carried() - before >= sum(79 + i for i in range(8)) * ROW_BYTES
    assert answers == [alone(fleet, body) for body in bodies]


def test_a_prompt_of_one_token_needs_nothing(fleet: Fleet, front: Server) -> None:
    body = completion("17")
    assert said(front, body) == alone(fleet, body)


def test_a_client_that_leaves(fleet: Fleet, front: Server) -> None:
    def leave() -> None:
        with front.opened("/v1/completions", completion(prompt(200), max_tokens=3000, stream=True)) as answer:
            answer.readline()

    leaving = [threading.Thread(target=leave) for _ in range(3)]
    for each in leaving:
        each.start()
    for each in leaving:
        each.join()
    fleet.wait_empty()


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_that_is_restarted(fleet: Fleet, front: Server, name: str) -> None:
    fleet.restart(name)
    end = time.monotonic() + 90
    while True:  # a router may have taken it out of its list until a health check finds it again
        try:
            assert_carried(fleet, front, completion(prompt(120)), 119)
            break
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(1)
    fleet.wait_empty()
