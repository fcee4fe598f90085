"""Unmodified routers with their defaults in front of two servers of one engine, and our proxy in front of one of each.

Tokens must be as from one engine alone, and the prompt's KV really carried. docs/routers.md says what each router
sends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from testing.http_server import HttpServer
from testing.waiting import wait_for
from tests.system.routers import fleet as fleets
from tests.system.routers.fleet import NAME, OF_SGLANG, OF_VLLM, PROXIES, Fleet, Front, SGLangFleet

pytestmark = pytest.mark.timeout(600)

COUNT = 12
CLOSE = 1e-3  # of log probabilities, in fp32
seeds = itertools.count(1)


def needs(python: Any) -> None:
    if not python.exists():
        pytest.skip(f"no {python}: see make test-routers")


@pytest.fixture(scope="module")
def of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    needs(fleets.VLLM)
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("vllm"), stack)


@pytest.fixture(scope="module")
def of_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangFleet]:
    needs(fleets.SGLANG)
    with contextlib.ExitStack() as stack:
        yield SGLangFleet(tmp_path_factory.mktemp("sglang"), stack)


FRONTS = [pytest.param(name, marks=pytest.mark.routers) for name in (*OF_VLLM, *OF_SGLANG)]
FRONTS += [pytest.param(name, marks=pytest.mark.cross) for name in PROXIES]


@pytest.fixture(scope="module", params=FRONTS)
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    name, engines = request.param, request.getfixturevalue
    if name in PROXIES:
        made = fleets.front_of_both(name, engines("of_vllm"), engines("of_sglang"))
    else:
        needs(fleets.ROUTERS / "smg")
        if name in OF_VLLM:
            made = fleets.front_of_vllm(name, engines("of_vllm"))
        else:
            made = fleets.front_of_sglang(name, engines("of_sglang"))
    try:
        made.server.wait_up("/health" if name in PROXIES else "/readiness")
        yield made
    finally:
        made.server.kill()


def only(*names: str) -> pytest.MarkDecorator:
    chosen = [each for each in FRONTS if each.values[0] in names]
    return pytest.mark.parametrize("front", chosen, indirect=True, scope="module")


def prompt(tokens: int) -> str:
    """No two have a first block in common."""
    seed = next(seeds)
    return " ".join(str((i * 37 + (i * i) % 101 + seed * 131) % 1000 + 3) for i in range(tokens))


def completion(text: str | list[str], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": text, "max_tokens": COUNT, "temperature": 0} | more


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": messages, "max_tokens": COUNT, "temperature": 0} | more


def said(server: HttpServer, body: dict[str, Any]) -> list[str]:
    """The text of each choice."""
    status, text = server.ask("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert status == 200, (status, text)
    texts: dict[int, str] = {}
    answers = [json.loads(each) for each in events(text)] if body.get("stream") else [json.loads(text)]
    for choice in (each for answer in answers for each in answer["choices"]):
        part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + part
    # A special token (1) has no text.
    assert all(len(each.split()) > COUNT // 2 for each in texts.values()), text[-1000:]
    return [texts[index] for index in sorted(texts)]


def events(text: str) -> list[str]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]", text[-500:]
    return found[:-1]


def alone(front: Front, body: dict[str, Any]) -> list[str]:
    """What one engine says of each prompt, as often as it is asked for."""
    return [each for each in said(front.alone, body | {"n": 1, "stream": False}) for _ in range(body.get("n", 1))]


def assert_carried(front: Front, body: dict[str, Any], *prompts: int) -> None:
    """As one engine alone answers, and prompts of at least so many tokens came over the bridge."""
    before = front.carried()
    assert said(front.server, body) == alone(front, body)
    assert front.carried() - before >= sum(tokens - front.computed for tokens in prompts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
def test_one_prompt(front: Front, make: Any, stream: bool) -> None:
    assert_carried(front, make(prompt(200), stream=stream), 200)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", [completion, chat])
def test_two_answers_to_one_prompt(front: Front, make: Any, stream: bool, request: pytest.FixtureRequest) -> None:
    """smg 1.13 asks its prefill engine for nothing when n > 1: the decode engine gets such a body alone, untagged.

    SGLang fetches the prompt once, and what does not fill a page once more for each answer.
    """
    body = make(prompt(150), n=2, stream=stream, **front.sampling)
    if front.name in PROXIES and stream:
        status, text = front.server.ask("/v1/chat/completions" if make is chat else "/v1/completions", body)
        assert status == 400 and "not supported here: n > 1 with stream" in text
        return
    if front.name != "smg":
        assert_carried(front, body, 150, *([150 % 64] * 2 if front.name in OF_SGLANG else []))
        front.wait_empty()
        return
    of_vllm = request.getfixturevalue("of_vllm")
    before = front.carried(), of_vllm.prefills()
    texts = said(front.server, body)
    assert (front.carried(), of_vllm.prefills()) == before, "smg prefills these now: take the exception away"
    assert texts == alone(front, body)


@only(*OF_SGLANG)
def test_three_answers_to_each_of_two_prompts(front: Front) -> None:
    assert_carried(front, completion([prompt(150), prompt(70)], n=3), 150, 70, *[150 % 64, 70 % 64] * 3)
    front.wait_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_three_prompts_in_a_call(front: Front, stream: bool) -> None:
    assert_carried(front, completion([prompt(100), prompt(170), prompt(65)], stream=stream), 100, 170, 65)


def test_eight_at_once(front: Front) -> None:
    bodies = [(completion, chat)[i % 2](prompt(80 + i), stream=i % 4 > 1) for i in range(8)]
    before = front.carried()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: said(front.server, body), bodies))
    assert front.carried() - before >= sum(80 + i - front.computed for i in range(8))
    assert answers == [alone(front, body) for body in bodies]
    front.wait_empty()


@only(*OF_VLLM)
def test_a_prompt_of_one_token_needs_nothing(front: Front) -> None:
    assert_carried(front, completion("17"))


def test_clients_that_leave(front: Front) -> None:
    with contextlib.ExitStack() as stack:
        for n in (1, 1, 1 if front.name in PROXIES else 2):
            more = front.sampling if n > 1 else {}
            body = completion(prompt(200), max_tokens=1500, stream=True, n=n, **more)
            stack.enter_context(front.server.opened("/v1/completions", body)).readline()
    front.wait_empty()
    assert_carried(front, completion(prompt(90)), 90)


@only(*OF_VLLM)
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_that_is_restarted(front: Front, of_vllm: Fleet, name: str) -> None:
    of_vllm.restart(name)
    front.alone = of_vllm.engines["prefill"]
    end = time.monotonic() + 90
    while True:  # a router may have taken it out of its list until a health check finds it again
        try:
            assert_carried(front, completion(prompt(120)), 120)
            break
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(1)
    front.wait_empty()


@only(*PROXIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_generate(front: Front, stream: bool) -> None:
    tokens = list(map(int, prompt(150).split()))
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}}
    before = front.carried()
    status, text = front.server.ask("/generate", body | {"stream": stream})
    assert status == 200, text
    answer = json.loads(events(text)[-1] if stream else text)
    assert answer["output_ids"] == json.loads(front.alone.ask("/generate", body)[1])["output_ids"]
    assert answer["meta_info"]["prompt_tokens"] == 150 and answer["meta_info"]["completion_tokens"] == COUNT
    assert front.carried() - before >= 150 - front.computed


@only(*PROXIES)
def test_log_probabilities_of_every_token(front: Front) -> None:
    """The first token's are prefill's, where SGLang decodes."""
    body = completion(prompt(120), logprobs=2)
    found, expected = _logprobs(front.server, body), _logprobs(front.alone, body)
    assert len(found) == COUNT
    assert all(abs(ours - theirs) < CLOSE for ours, theirs in zip(found, expected, strict=True)), (found, expected)


def _logprobs(server: HttpServer, body: dict[str, Any]) -> list[float]:
    status, text = server.ask("/v1/completions", body)
    assert status == 200, text
    answers = [json.loads(each) for each in (events(text) if body.get("stream") else [text])]
    choices = [choice for answer in answers for choice in answer["choices"]]
    return [each for choice in choices for each in (choice.get("logprobs") or {}).get("token_logprobs") or ()]


@contextlib.contextmanager
def up(front: Front) -> Iterator[Front]:
    try:
        front.server.wait_up()
        yield front
    finally:
        front.server.kill()


def text_of(server: HttpServer, path: str, body: dict[str, Any]) -> str:
    """The text of an answer, whole or streamed, of /v1/responses or /v1/messages."""
    status, text = server.ask(path, body)
    assert status == 200, (status, text)
    if not body.get("stream"):
        answer = json.loads(text)
        (part,) = answer["output"][0]["content"] if path == "/v1/responses" else answer["content"]
        return str(part["text"])
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line).get("delta") for line in lines]
    return "".join(each if isinstance(each, str) else (each or {}).get("text", "") for each in deltas)


@pytest.mark.routers
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_other_paths_of_vllm_through_the_proxy(of_vllm: Fleet, path: str) -> None:
    with up(fleets.proxy_of_vllm(of_vllm)) as front:
        for stream in (False, True):
            body: dict[str, Any] = {"model": NAME, "temperature": 0, "stream": stream}
            if path == "/v1/responses":
                body |= {"input": prompt(200), "max_output_tokens": COUNT}
            else:
                body |= {"messages": [{"role": "user", "content": prompt(200)}], "max_tokens": COUNT}
            before = front.carried()
            found = text_of(front.server, path, body)
            assert len(found.split()) > COUNT // 2 and found == text_of(front.alone, path, body | {"stream": False})
            assert front.carried() - before >= 200 - front.computed
        front.wait_empty()


@pytest.mark.routers
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_the_prompt_through_the_proxy(of_sglang: SGLangFleet, stream: bool) -> None:
    with up(fleets.proxy_of_sglang(of_sglang)) as front:
        tokens = list(map(int, prompt(150).split()))
        sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        before = front.carried()
        status, text = front.server.ask("/generate", body | {"top_logprobs_num": 2, "stream": stream})
        assert status == 200, text
        found = json.loads(events(text)[-1] if stream else text)
        expected = json.loads(front.alone.ask("/generate", body | {"top_logprobs_num": 2})[1])
        assert found["output_ids"] == expected["output_ids"] and front.carried() - before >= 150
        for name in ("input_token_logprobs", "output_token_logprobs"):
            ours, theirs = found["meta_info"][name], expected["meta_info"][name]
            assert [each[1] for each in ours] == [each[1] for each in theirs] and len(ours) in (150, COUNT)
            assert all(abs((a[0] or 0) - (b[0] or 0)) < CLOSE for a, b in zip(ours, theirs, strict=True))
        assert len(found["meta_info"]["input_top_logprobs"]) == 150
        echo = completion(prompt(120), echo=True, logprobs=2, stream=stream)
        ours, theirs = _logprobs(front.server, echo), _logprobs(front.alone, echo | {"stream": False})
        assert len(ours) == len(theirs) >= 120 + COUNT
        assert all(abs((a or 0) - (b or 0)) < CLOSE for a, b in zip(ours, theirs, strict=True))


@pytest.mark.routers
@pytest.mark.parametrize("is_first", [True, False], ids=["decode waits already", "decode comes after"])
def test_decode_does_not_wait_for_a_prefill_that_is_refused(of_vllm: Fleet, is_first: bool) -> None:
    """Both are asked at once, as by a router of the bootstrap style. Decode's deadline is a minute."""
    prefill, decode = (of_vllm.engines[name] for name in ("prefill", "decode"))
    agents, soon_s = of_vllm.agents, 15.0
    text = prompt(200)
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": fleets.port_of(agents["prefill"])}
    body = completion(text) | room | {"bootstrap_room": 4711 + is_first}
    (expected,) = said(prefill, completion(text))
    with ThreadPoolExecutor() as pool:
        refused = [] if is_first else [prefill.ask("/v1/completions", body | {"model": "nobody"})]
        began = time.monotonic()
        asked = pool.submit(said, decode, body)
        if is_first:
            wait_for(lambda: agents["prefill"].status.transfers, why=agents["prefill"].text)
            refused.append(prefill.ask("/v1/completions", body | {"model": "nobody"}))
        assert asked.result() == [expected] and refused[0][0] == 404
        assert time.monotonic() - began < soon_s
    assert "code=prefill_refused prefill answered the call with status 404" in agents["decode"].text()
    of_vllm.wait_empty()
