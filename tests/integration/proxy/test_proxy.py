"""The real proxy in front of stand-in engines: every pair, streams, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvbridge.proxy.fleet import Backend, LegFailed, Role, read_engine
from kvbridge.proxy.limits import ProxyLimits
from kvbridge.proxy.server import ASKS_AT_ONCE
from tests.integration.proxy.standins import PROMPT, TOKENS, WAITS, World, named, stream, world

pytestmark = pytest.mark.timeout(30)

KINDS = ("vllm", "sglang")
PAIRS = [(prefill, decode) for prefill in KINDS for decode in KINDS]
TEXT = " 7 8 9"
OF_VLLM: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": PROMPT, "max_tokens": 3},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
}
COMPLETION = BODIES["/v1/completions"]


def text_of(path: str, answer: Any) -> str:
    if path == "/generate":
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
async def test_answers_are_the_decode_engines(pair: tuple[str, str], path: str) -> None:
    async with world(*pair) as w:
        status, answer = await w.ask(path, BODIES[path], headers={"Authorization": "Bearer x"})
        assert status == 200, answer
        assert text_of(path, answer) == TEXT
        if path == "/generate":
            assert answer["output_ids"] == TOKENS
            meta = answer["meta_info"]
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 3)
            assert meta["finish_reason"] == {"type": "length", "length": 3} and meta["id"]
        for engine in w.engines:
            assert len(engine.got) == 1 and engine.got[0][2]["Authorization"] == "Bearer x"
        room = named_in(w)
        if pair == ("sglang", "vllm"):  # asked of the bootstrap server, for the room's replica
            kv = w.decode.body["kv_transfer_params"]
            assert (kv["remote_host"], kv["remote_port"]) == (f"10.0.0.{room % 2}", 7700) and kv["remote_key"] == "KEY"


def named_in(w: World) -> int:
    """The room: both legs name the same. How each engine is told of it is in test_legs.py."""
    first, second = ((b.get("kv_transfer_params") or b)["bootstrap_room"] for b in (w.prefill.body, w.decode.body))
    assert first == second and 1 <= first < 1 << 63
    return int(first)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
async def test_streams_come_event_by_event(pair: tuple[str, str], path: str) -> None:
    body = BODIES[path] | {"stream": True}
    body |= {} if path == "/generate" else {"stream_options": {"include_usage": True}, "min_tokens": 3}
    async with world(*pair) as w:
        status, said = await w.ask(path, body)
        assert status == 200 and said[-1] == "[DONE]", said
        events = [json.loads(each) for each in said[:-1]]
        if path == "/generate":
            assert [each["output_ids"] for each in events] == [TOKENS[:1], TOKENS[:2], TOKENS]
            assert [each["meta_info"]["finish_reason"] is None for each in events] == [True, True, False]
            assert events[-1]["text"] == TEXT
        else:
            choices = [each["choices"][0] for each in events]
            assert "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices) == TEXT
        assert w.decode.body["stream"] is True and not w.prefill.body["stream"]
        named_in(w)


async def test_a_body_goes_to_the_decode_engine_as_it_came() -> None:
    body = COMPLETION | {"temperature": 0.25, "stop": ["x"], "seed": 9, "unheard_of": {"a": [1.5, None, "ä"]}}
    async with world("vllm", "vllm") as w:
        assert (await w.ask("/v1/completions", body))[0] == 200
        assert {name: value for name, value in w.decode.body.items() if name != "kv_transfer_params"} == body


@pytest.mark.parametrize(
    ("path", "more", "count"),
    [
        ("/v1/completions", {"logprobs": 2}, 2),
        ("/v1/completions", {"logprobs": 0}, 0),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, 2),
        ("/generate", {"return_logprob": True, "top_logprobs_num": 2}, 2),
        ("/generate", {"return_logprob": True}, 0),
    ],
)
async def test_the_first_tokens_logprobs_go_along_to_sglang(path: str, more: dict[str, Any], count: int) -> None:
    async with world("vllm", "sglang") as w:
        assert (await w.ask(path, BODIES[path] | more))[0] == 200
        decode = w.decode.body
        told = (decode.get("sampling_params") or decode)["custom_params"]["kvbridge"]
        assert told["logprob"] == -0.5
        assert json.loads(told.get("top_logprobs", "[]")) == [[-0.5, 7], [-1.5, 6]][:count]


@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
async def test_batches_and_samples_have_a_room_each(pair: tuple[str, str]) -> None:
    async with world(*pair) as w:
        body = COMPLETION | {"prompt": [[1, 2], [3, 4], [5, 6]], "n": 2, "seed": 10}
        status, answer = await w.ask("/v1/completions", body)
        assert status == 200 and [each["index"] for each in answer["choices"]] == list(range(6))
        assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 18, "total_tokens": 30}
        bodies = [body for _, body, _ in w.prefill.got]
        seeds = (10,) if pair == ("vllm", "vllm") else (10, 11)  # vLLM makes several answers of one prefill
        assert sorted((b["prompt"][0], b["seed"], b["n"]) for b in bodies) == [
            (p, s, 1) for p in (1, 3, 5) for s in seeds
        ]
        rooms = {b.get("bootstrap_room") or b["kv_transfer_params"]["bootstrap_room"] for b in bodies}
        assert len(rooms) == 3 * len(seeds)
        assert {body["n"] for _, body, _ in w.decode.got} == {2 // len(seeds)}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_greedy_answers_are_made_each_of_its_own_prefill(path: str) -> None:
    """vLLM takes no `n` > 1 for them."""
    async with world("vllm", "vllm") as w:
        status, answer = await w.ask(path, BODIES[path] | {"n": 2, "temperature": 0})
        assert status == 200 and [each["index"] for each in answer["choices"]] == [0, 1]
        assert [body["n"] for _, body, _ in w.decode.got] == [1, 1]


@pytest.mark.parametrize("replicas", [0, 2])
async def test_answers_that_vllm_may_spread_over_replicas_have_a_prefill_each(replicas: int) -> None:
    """One that starts again with other replicas is asked again."""
    async with world("vllm", "vllm") as w:
        for count, samples in ((replicas, [1, 1]), (1, [2])):
            w.decode.is_healthy, w.decode.replicas = False, count
            await w.until(lambda: not w.fleet.healthy(Role.DECODE))
            w.decode.is_healthy = True
            await w.until(lambda: bool(w.fleet.healthy(Role.DECODE)))
            assert (await w.ask("/v1/completions", COMPLETION | {"n": 2}))[0] == 200
            assert [body["n"] for _, body, _ in w.decode.got] == samples
            assert len(w.prefill.got) == len(samples)
            w.decode.got.clear(), w.prefill.got.clear()


@pytest.mark.parametrize("count", [1, 3])
async def test_an_answer_that_lacks_some_of_n_is_incomplete(count: int) -> None:
    said = {"choices": [{"index": n, "text": TEXT, "finish_reason": "length"} for n in range(count)]}
    async with world("vllm", "vllm") as w:
        w.decode.act = lambda request, body: _raw(json.dumps(said).encode())
        status, answer = await w.ask("/v1/completions", COMPLETION | {"n": 2})
        assert status >= 500 and answer["error"]["code"] == "bad_answer"


async def test_no_more_of_a_batch_is_asked_at_once_than_there_are_places() -> None:
    async with world("vllm", "vllm") as w:
        at_once = most = 0

        async def slow(request: web.Request, body: dict[str, Any]) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.05)
            at_once -= 1

        w.decode.act = slow
        body = COMPLETION | {"prompt": [PROMPT] * (2 * ASKS_AT_ONCE + 1)}
        status, answer = await w.ask("/v1/completions", body)
        assert status == 200 and [each["index"] for each in answer["choices"]] == list(range(2 * ASKS_AT_ONCE + 1))
        assert most == ASKS_AT_ONCE


async def test_a_batch_of_generate_is_a_list() -> None:
    async with world("sglang", "vllm") as w:
        params = [{"max_new_tokens": 3}, {"max_new_tokens": 4}]
        status, answer = await w.ask("/generate", {"text": ["a", "b"], "sampling_params": params, "rid": "r"})
        assert status == 200 and [each["meta_info"]["id"] for each in answer] == ["r_0", "r_1"]
        assert sorted((b["prompt"], b["max_tokens"]) for _, b, _ in w.decode.got) == [("a", 3), ("b", 4)]


@pytest.mark.parametrize(
    ("path", "body", "code", "said"),
    [
        ("/v1/completions", b"\x00garbage", "bad_json", "no JSON"),
        ("/v1/completions", b"\xff\xfe", "bad_json", "no JSON"),
        ("/v1/completions", b"[" * 100_000, "bad_json", "must be a JSON object"),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', "bad_json", "no JSON"),
        ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', "bad_json", "no engine can take"),
        ("/v1/completions", b"[1]", "bad_json", "got a list"),
        ("/v1/completions", b"", "bad_json", "no JSON"),
        ("/v1/completions", {"prompt": []}, "bad_request", "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "bad_request", "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "bad_request", "n must"),
        ("/v1/completions", {"prompt": "a", "n": 257}, "too_many", "257"),
        ("/v1/completions", {"prompt": "a", "stream": "yes"}, "bad_request", "stream"),
        ("/v1/completions", {"prompt": "a", "custom_params": 3}, "bad_request", "custom_params"),
        ("/v1/completions", {"prompt": "a", "stream": True, "n": 2}, "not_supported", "n > 1 with stream"),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}, "not_supported", "several prompts with stream"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True}, "not_supported", "use_beam_search"),
        ("/v1/chat/completions", {"messages": "hi"}, "bad_request", "messages"),
        ("/generate", {"text": "a", "input_ids": [1]}, "bad_request", "one of text and input_ids"),
        ("/generate", {"text": ["a"], "stream": True}, "not_supported", "batch with stream"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"custom_params": {"kvbridge": 1}}},
            "has_transfer_params",
            "kvb",
        ),
        ("/v1/completions", {"prompt": "a", "kv_transfer_params": {"x": 1}}, "has_transfer_params", "kv_transfer"),
    ],
)
async def test_bad_input_is_refused_by_name_at_the_door(path: str, body: Any, code: str, said: str) -> None:
    async with world("vllm", "sglang") as w:
        status, answer = await w.ask(path, body)
        assert (status, answer["error"]["code"]) == (400, code) and said in answer["error"]["message"], answer
        assert not any(engine.got for engine in w.engines)
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200


async def test_a_body_too_large_is_refused() -> None:
    async with world("vllm", "vllm") as w:
        status, answer = await w.ask("/v1/completions", b" " * ((64 << 20) + 1))
        assert status == 413 and answer["error"]["code"] == "too_large"


async def _status(status: int) -> web.Response:
    return web.json_response({"error": {"message": "no", "code": status}}, status=status)


async def _raw(body: bytes) -> web.Response:
    return web.Response(body=body)


async def _gone(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    await asyncio.sleep(5)
    return web.Response()


FAILURES: dict[str, Callable[[web.Request, Any], Awaitable[Any]]] = {
    "500": lambda request, body: _status(500),
    "429": lambda request, body: _status(429),
    "garbage": lambda request, body: _raw(b"<html>"),
    "a list": lambda request, body: _raw(b"[]" if "kv_transfer_params" in body else b"3"),
    "nothing": lambda request, body: _raw(b""),
    "gone": lambda request, body: _gone(request),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kinds", ["vllm>vllm", "vllm>sglang", "sglang>vllm", "sglang>sglang"])
async def test_a_failed_prefill_is_tried_elsewhere_in_another_room(kinds: str, is_stream: bool, failure: str) -> None:
    prefill, decode = kinds.split(">")
    async with world(f"{prefill},{prefill}", decode) as w:
        bad, good = w.all("prefill")
        bad.act = FAILURES[failure]
        if prefill == "sglang":  # real ones answer when the prompt has come, which it does not
            w.decode.act = lambda request, body: _slowly(bool(bad.got) and not good.got)
        status, answer = await w.ask("/v1/completions", COMPLETION | {"stream": is_stream})
        assert status == 200, answer
        assert not is_stream or answer[-1] == "[DONE]"
        assert len(bad.got) == 1 and len(good.got) == 1
        found = [b.get("bootstrap_room") or b["kv_transfer_params"]["bootstrap_room"] for _, b, _ in bad.got + good.got]
        assert len(set(found)) == 2
        assert "kvbridge_proxy_retries_total 1.0" in await w.metrics()


async def _slowly(is_stuck: bool) -> None:
    if is_stuck:
        await asyncio.Event().wait()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_prefill_that_failed_everywhere_is_a_502_that_names_it() -> None:
    async with world("vllm,vllm", "vllm", has_fallback=False) as w:
        for each in w.all("prefill"):
            each.act = FAILURES["500"]
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, answer["error"]["code"]) == (502, "engine_error")
        assert "prefill engine vllm=http://127.0.0.1" in answer["error"]["message"]
        assert [len(each.got) for each in w.all("prefill")] == [1, 1] and not w.decode.got


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("kinds", ["vllm>vllm", "vllm>sglang", "sglang>vllm", "sglang>sglang"])
async def test_what_an_engine_refuses_goes_back_as_it_is(kinds: str, role: str) -> None:
    prefill, decode = kinds.split(">")
    async with world(f"{prefill},{prefill}", decode, replace(WAITS, answer_s=60.0)) as w:
        for each in w.all(role):
            each.act = lambda request, body: _status(422)
        if role == "prefill":
            w.decode.act = lambda request, body: _until(asyncio.Event())
        async with asyncio.timeout(50):  # less than answer_s
            status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, answer) == (422, {"error": {"message": "no", "code": 422}})
        assert sum(len(each.got) for each in w.all("prefill")) == 1
        # A decode leg that waits for this prefill is ended: nothing will be offered for it.
        await w.until(lambda: w.decode.left == len(w.decode.got) or role == "decode")


async def test_an_error_that_sglang_streams_first_is_an_answer_of_its_own() -> None:
    async with world("sglang", "sglang") as w:
        w.decode.act = lambda request, body: stream(request, [{"error": {"message": "too long", "code": 400}}])
        status, answer = await w.ask("/generate", BODIES["/generate"] | {"stream": True})
        assert (status, answer["error"]["message"]) == (400, "too long")


async def test_vllm_that_offers_nothing_lets_vllm_compute_and_sglang_fail() -> None:
    async with world("vllm", "vllm") as w:
        w.prefill.act = lambda request, body: _raw(b'{"choices": [{"text": "x", "token_ids": [7]}]}')
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert "kv_transfer_params" not in w.decode.body
        assert f'kvbridge_proxy_prefills_without_kv_total{{engine="{named(w.prefill)}"}} 1.0' in await w.metrics()
    async with world("vllm", "sglang") as w:
        w.prefill.act = lambda request, body: _raw(b'{"choices": [{"text": "x", "token_ids": [7]}]}')
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, answer["error"]["code"]) == (502, "not_offered") and not w.decode.got


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_failed_decode_is_an_error_of_this_request_only(is_stream: bool, failure: str) -> None:
    async with world("vllm", "vllm") as w:
        w.decode.act = FAILURES[failure]
        status, answer = await w.ask("/v1/completions", COMPLETION | {"stream": is_stream})
        assert status == 502 and answer["error"]["type"] == "engine_error", answer
        w.decode.act = None
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200


CUT = {"id": "x", "choices": [{"index": 0, "text": " 7", "token_ids": [7], "finish_reason": None}]}
CUT_NATIVE = {"text": " 7", "output_ids": [7], "meta_info": {"id": "r", "finish_reason": None}}


async def _breaks_off(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: " + json.dumps(CUT).encode() + b"\n\n")
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (_breaks_off, "ended_early"),
        (lambda request, body: stream(request, [CUT, CUT], pause_s=600), "timed_out"),
        (lambda request, body: stream(request, [CUT, {"error": {"message": "broke", "code": 500}}]), "broke"),
    ],
    ids=["breaks off", "falls silent", "says an error"],
)
async def test_a_stream_that_fails_ends_with_the_error(act: Any, said: str) -> None:
    async with world("vllm", "vllm", replace(WAITS, answer_s=5) if said == "timed_out" else WAITS) as w:
        w.decode.act = act
        _, events = await w.ask("/v1/completions", COMPLETION | {"stream": True})
        assert said in str(json.loads(events[-1])["error"]) and "[DONE]" not in events


@pytest.mark.parametrize("is_done", [False, True], ids=["without [DONE]", "without finish_reason"])
@pytest.mark.parametrize(
    ("kind", "path"), [("vllm", "/v1/completions"), ("vllm", "/generate"), ("sglang", "/generate")]
)
async def test_a_stream_that_ends_early_ends_with_an_error(kind: str, path: str, is_done: bool) -> None:
    said = CUT if kind == "vllm" else CUT_NATIVE
    async with world("vllm", kind) as w:
        w.decode.act = lambda request, body: stream(request, [said], is_done)
        status, events = await w.ask(path, BODIES[path] | {"stream": True})
        assert status == 200 and len(events) == 2 and "error" not in json.loads(events[0])
        assert json.loads(events[1])["error"]["code"] == "ended_early"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
async def test_a_client_that_leaves_ends_both_legs(pair: tuple[str, str], is_stream: bool) -> None:
    async with world(*pair) as w:
        if pair[0] == "sglang":
            w.prefill.act = lambda request, body: _slowly(True)
        w.decode.act = lambda request, body: stream(request, [CUT] * 100, pause_s=0.05) if is_stream else _slowly(True)
        asking = asyncio.create_task(w.ask("/v1/completions", COMPLETION | {"stream": is_stream}))
        await asyncio.wait_for(w.decode.busy.wait(), 60)
        await asyncio.sleep(0.1)
        asking.cancel()
        slow = [w.decode] + ([w.prefill] if pair[0] == "sglang" else [])
        await w.until(lambda: all(each.left == 1 for each in slow))
        await w.shows('outcome="client_left",path="/v1/completions"} 1.0')


async def test_a_client_that_leaves_during_prefill_ends_it() -> None:
    async with world("vllm", "sglang") as w:
        w.prefill.act = lambda request, body: _slowly(True)
        asking = asyncio.create_task(w.ask("/v1/completions", COMPLETION))
        await asyncio.wait_for(w.prefill.busy.wait(), 60)
        asking.cancel()
        await w.until(lambda: w.prefill.left == 1)
        assert not w.decode.got


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_engine_that_is_not_well_gets_nothing_until_it_is(hangs: bool) -> None:
    async with world("vllm,vllm", "vllm", replace(WAITS, health_s=0.5)) as w:
        sick, well = w.all("prefill")
        sick.is_healthy, sick.hangs_until = hangs, asyncio.Event() if hangs else None
        gauge = f'kvbridge_proxy_engine_healthy{{engine="{named(sick)}",role="prefill"}}'
        await w.shows(f"{gauge} 0.0")
        for _ in range(4):
            assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert (len(sick.got), len(well.got)) == (0, 4)
        sick.is_healthy, sick.hangs_until = True, None
        await w.shows(f"{gauge} 1.0")
        for _ in range(4):
            await w.ask("/v1/completions", COMPLETION)
        assert (len(sick.got), len(well.got)) == (2, 6)


async def test_without_a_well_engine_requests_are_refused_and_health_says_so() -> None:
    async with world("vllm", "vllm") as w:
        async with w.http.get(w.url + "/health") as answer:
            assert answer.status == 200
        (engine,) = w.fleet.healthy(Role.DECODE)
        w.decode.is_healthy = False
        await w.until(lambda: not engine.is_healthy)
        async with w.http.get(w.url + "/health") as answer:
            assert answer.status == 503
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, answer["error"]["code"]) == (503, "no_engine") and not w.prefill.got
        w.decode.is_healthy = True


async def test_least_outstanding_comes_first() -> None:
    gate = asyncio.Event()
    async with world("vllm,vllm", "vllm") as w:
        first, second = w.all("prefill")
        first.act = second.act = lambda request, body: _until(gate)
        asking = [asyncio.create_task(w.ask("/v1/completions", COMPLETION)) for _ in range(6)]
        await w.until(lambda: len(first.got) + len(second.got) == 6)
        assert (len(first.got), len(second.got)) == (3, 3)
        gate.set()
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}


async def test_models_are_those_of_a_decode_engine() -> None:
    async with world("vllm", "sglang") as w, w.http.get(w.url + "/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": "sglang"}]


async def test_a_prompt_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def quoting(request: web.Request, body: Any) -> web.StreamResponse:
        if body.get("stream"):
            return await stream(request, [{"error": {"message": "in 'a secret'", "code": 500}}])
        return web.Response(text="cannot do 'a secret'", status=500)

    caplog.set_level("DEBUG")
    async with world("vllm", "vllm") as w:
        w.decode.act = w.prefill.act = quoting
        assert (await w.ask("/v1/completions", {"prompt": "a secret", "model": "m"}))[0] == 502
        w.prefill.act = None
        for path, name in (("/v1/completions", "prompt"), ("/generate", "text")):
            status, said = await w.ask(path, {name: "a secret", "stream": True})
            assert status == 502 and "a secret" in said["error"]["message"]
        await w.ask("/v1/completions", b'{"prompt": "a secret", ')
    assert "kvbridge" in caplog.text and "a secret" not in caplog.text


async def test_a_bootstrap_server_that_tells_nothing_of_agents_is_named() -> None:
    async with world("sglang", "vllm", has_fallback=False) as w:
        w.prefill.agents = []
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, answer["error"]["code"]) == (502, "no_bootstrap") and not w.prefill.got
        assert "kvbridge backend" in answer["error"]["message"]


@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_is_gone_is_left_out_at_once(pair: tuple[str, str], role: str) -> None:
    prefill, decode = pair
    kinds = (f"{prefill},{prefill}", decode) if role == "prefill" else (prefill, f"{decode},{decode}")
    async with world(*kinds, replace(WAITS, health_every_s=30)) as w:
        gone, there = w.all(role)
        await gone.stop()
        if role == "prefill" and prefill == "sglang":
            w.decode.act = lambda request, body: _slowly(not there.got)
        for _ in range(3):
            status, answer = await w.ask("/v1/completions", COMPLETION)
            assert status == 200, answer
        assert len(there.got) == 3
        if (role, *pair) != ("prefill", "sglang", "vllm"):  # there only its bootstrap server was asked for anything
            assert "kvbridge_proxy_retries_total 1.0" in await w.metrics()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_decode_that_failed_for_want_of_its_prefill_is_tried_again(is_stream: bool) -> None:
    """SGLang's decode server hears of a failed prefill before its client does."""
    async with world("sglang,sglang", "sglang") as w:
        bad, good = w.all("prefill")

        async def late(request: web.Request, body: Any) -> web.Response:
            await asyncio.sleep(0.2)
            return await _status(500)

        async def fails_with_it(request: web.Request, body: Any) -> web.StreamResponse | None:
            if good.got:
                return None
            said = {"error": {"message": "KVTransferError", "code": 500}}
            return await stream(request, [said]) if is_stream else web.json_response(said, status=500)

        bad.act, w.decode.act = late, fails_with_it
        status, answer = await w.ask("/v1/completions", COMPLETION | {"stream": is_stream})
        assert status == 200, answer
        assert len(bad.got) == len(good.got) == 1


async def test_a_stream_that_waits_for_a_prefill_that_fails_is_tried_again() -> None:
    """vLLM begins its answer, without an event, before it has the KV."""
    async with world("sglang,sglang", "vllm") as w:
        bad, good = w.all("prefill")

        async def late(request: web.Request, body: Any) -> web.Response:
            await w.decode.busy.wait()
            await asyncio.sleep(0.2)
            return await _status(500)

        async def waits(request: web.Request, body: Any) -> web.StreamResponse | None:
            if good.got:
                return None
            await web.StreamResponse(headers={"Content-Type": "text/event-stream"}).prepare(request)
            await asyncio.Event().wait()
            return None

        bad.act, w.decode.act = late, waits
        status, answer = await w.ask("/v1/completions", COMPLETION | {"stream": True})
        assert status == 200 and answer[-1] == "[DONE]"
        assert len(bad.got) == len(good.got) == 1


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"Content-Length: 100\r\n\r\n{", 408),
        (b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd", 415),
    ],
)
async def test_a_body_that_does_not_come_whole_harms_nobody(
    raw: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with world("vllm", "vllm", replace(WAITS, client_s=0.3)) as w:
        place = w.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(place[0], int(place[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + raw)
        said = await asyncio.wait_for(reader.readline(), 60)
        assert f" {status} ".encode() in said, said
        writer.close()
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert not w.prefill.got[1:]
    assert "Traceback" not in caplog.text


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async with world("vllm", "vllm", replace(WAITS, client_s=0.3)) as w:
        large = {"id": "x" * (1 << 20), "choices": [{"index": 0, "text": "", "finish_reason": None}]}
        w.decode.act = lambda request, body: stream(request, [large] * 64)
        async with w.http.post(w.url + "/v1/completions", json=COMPLETION | {"stream": True}):
            await w.until(lambda: w.decode.left == 1)


async def test_an_engine_off_the_list_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with world("vllm", "vllm,vllm") as w:
        goes_on = asyncio.Event()
        leaving, staying = w.all("decode")
        leaving.act = staying.act = lambda request, body: _until(goes_on)
        (prefill,) = w.fleet.healthy(Role.PREFILL)
        before = {each.url: each for each in w.fleet.healthy(Role.DECODE)}
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(w.ask("/v1/completions", COMPLETION)) for _ in range(2)]
            await asyncio.wait_for(leaving.busy.wait(), 60)
            await asyncio.wait_for(staying.busy.wait(), 60)
            w.fleet.replace([prefill, before[staying.url]])
            staying.act = None
            assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
            assert before[leaving.url].outstanding == 1
            goes_on.set()
        assert all(task.result()[0] == 200 for task in asked)
        assert (len(leaving.got), len(staying.got)) == (1, 2)
        again = read_engine(Role.DECODE, f"vllm={leaving.url}")
        w.fleet.replace([prefill, again])
        await w.until(lambda: again.is_healthy)
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert (len(leaving.got), len(staying.got)) == (2, 2)


async def test_what_an_engine_says_of_one_prompt_comes_whole() -> None:
    """Its usage too, with details that we do not know how to add up."""
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 3}}
    said = {"id": "x", "choices": [{"index": 0, "text": TEXT, "finish_reason": "length"}], "usage": usage, "more": 1}
    async with world("vllm", "vllm") as w:
        w.decode.act = lambda request, body: _raw(json.dumps(said).encode())
        assert await w.ask("/v1/completions", COMPLETION) == (200, said)


@pytest.mark.parametrize("path", OF_VLLM)
async def test_the_other_paths_of_vllm_are_carried_between_vllm_engines(path: str) -> None:
    async with world("sglang,vllm", "vllm,sglang") as w:
        for _ in range(3):
            status, answer = await w.ask(path, OF_VLLM[path])
            assert (status, answer["said"]) == (200, TEXT)
        prefill, decode = w.all("prefill")[1], w.all("decode")[0]
        assert (len(prefill.got), len(decode.got)) == (3, 3)
        first, second = prefill.got[0][1], decode.got[0][1]
        assert first["kv_transfer_params"]["do_remote_decode"] and second["kv_transfer_params"]["do_remote_prefill"]
        assert {name: value for name, value in second.items() if name != "kv_transfer_params"} == OF_VLLM[path]
        assert 1 in (first.get("max_output_tokens"), first.get("max_tokens")) and not first["stream"]


@pytest.mark.parametrize("path", OF_VLLM)
async def test_their_streams_keep_the_names_of_events(path: str) -> None:
    last = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}[path]
    async with world("vllm", "vllm") as w:
        async with w.http.post(w.url + path, json=OF_VLLM[path] | {"stream": True}) as answer:
            text = await answer.text()
        assert text.startswith("event: ") and f"event: {last}\ndata: " in text and "[DONE]" not in text
        w.decode.act = lambda request, body: stream(request, [{"type": "message_start"}], is_done=False)
        async with w.http.post(w.url + path, json=OF_VLLM[path] | {"stream": True}) as answer:
            text = await answer.text()
        assert "event: error\ndata: " in text and "ended_early" in text


@pytest.mark.parametrize("path", OF_VLLM)
async def test_they_are_refused_where_no_pair_of_vllm_engines_is(path: str) -> None:
    async with world("vllm", "sglang") as w:
        status, answer = await w.ask(path, OF_VLLM[path])
        assert status == 503 and "no decode engine of vllm" in answer["error"]["message"]
    async with world("vllm", "vllm") as w:
        status, answer = await w.ask("/v1/responses", OF_VLLM["/v1/responses"] | {"previous_response_id": "resp_1"})
        assert (status, answer["error"]["code"]) == (400, "not_supported")


async def test_an_unknown_path_and_a_wrong_method_are_told_in_json() -> None:
    async with world("vllm", "vllm") as w:
        status, answer = await w.ask("/v1/embeddings", {})
        assert (status, answer["error"]["code"]) == (404, "not_found") and "/v1/embeddings" in str(answer)
        async with w.http.get(w.url + "/v1/completions") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
            assert (await reply.json())["error"]["code"] == "bad_method"


TRACE = {"x-request-id": "r1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=1"}


async def test_ids_and_trace_contexts_go_to_both_engines() -> None:
    async with world("vllm", "vllm") as w:
        async with w.http.post(w.url + "/v1/completions", json=COMPLETION, headers=TRACE) as answer:
            assert answer.headers["X-Request-Id"] == "r1"
        for engine in w.engines:
            assert TRACE.items() <= lower(engine.got[0][2]).items()
            assert engine.got[0][1]["kv_transfer_params"]["traceparent"] == TRACE["traceparent"]
        body = COMPLETION | {"prompt": [[1], [2]]}
        async with w.http.post(w.url + "/v1/completions", json=body, headers=TRACE) as answer:
            assert answer.headers["X-Request-Id"] == "r1"
        for engine in w.engines:
            assert sorted(lower(headers)["x-request-id"] for _, _, headers in engine.got[1:]) == ["r1-0", "r1-1"]
        await w.ask("/v1/completions", COMPLETION, headers={"X-Request-Id": "x" * 2000})
        assert "x-request-id" not in lower(w.decode.got[-1][2])


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_sglangs_adapter_finds_the_trace_context_too(path: str) -> None:
    async with world("sglang", "sglang") as w:
        body = BODIES[path] | ({} if path == "/generate" else {"custom_params": {"own": 1}})
        assert (await w.ask(path, body, headers=TRACE))[0] == 200
        for engine in w.engines:
            custom = (engine.body.get("sampling_params") or engine.body)["custom_params"]
            own = {} if path == "/generate" else {"own": 1}
            assert custom == {"traceparent": TRACE["traceparent"]} | own


def lower(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


async def test_a_split_bodys_usage_is_added_up_with_its_details() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    usage |= {"prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": None}, "reasoning_tokens": 1}
    usage |= {"completion_tokens_details": {"reasoning_tokens": 2}}
    said = {"id": "x", "choices": [{"index": 0, "text": TEXT, "finish_reason": "length"}], "usage": usage}
    async with world("sglang", "vllm") as w:
        w.decode.act = lambda request, body: _raw(json.dumps(said).encode())
        _, answer = await w.ask("/v1/completions", COMPLETION | {"prompt": [[1], [2]], "n": 2})
        assert answer["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 12,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 6, "audio_tokens": None},
            "completion_tokens_details": {"reasoning_tokens": 8},
            "reasoning_tokens": 4,
        }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prefill", KINDS)
async def test_with_prefill_down_vllm_decodes_alone(prefill: str, is_stream: bool, path: str) -> None:
    async with world(prefill, "sglang,vllm") as w:
        w.prefill.is_healthy = False
        (engine,) = w.fleet.healthy(Role.PREFILL)
        await w.until(lambda: not engine.is_healthy)
        async with w.http.get(w.url + "/health") as answer:
            assert answer.status == 200
        status, answer = await w.ask(path, BODIES[path] | {"stream": is_stream})
        assert status == 200, answer
        assert "kv_transfer_params" not in w.all("decode")[1].body and not w.prefill.got
        assert 'kvbridge_proxy_prompts_without_prefill_total{reason="no_engine"} 1.0' in await w.metrics()


@pytest.mark.parametrize("prefill", KINDS)
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt_logprobs": 0}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"prompt_logprobs": 2}),
        ("/v1/chat/completions", {"echo": True}),
    ],
)
async def test_what_vllm_computes_whole_is_not_prefilled(prefill: str, path: str, more: dict[str, Any]) -> None:
    async with world(prefill, "sglang,vllm") as w:
        status, answer = await w.ask(path, BODIES[path] | more)
        assert status == 200, answer
        assert "kv_transfer_params" not in w.all("decode")[1].body and not w.prefill.got
        assert 'kvbridge_proxy_prompts_without_prefill_total{reason="reads_all"} 1.0' in await w.metrics()
        status, answer = await w.ask("/v1/completions", COMPLETION | {"echo": True})
        assert status == 200 and len(w.prefill.got) == 1, "nothing of the prompt is asked for but its text"


def anew(w: World) -> dict[Role, Backend]:
    """The engine of each side, as when the proxy starts: nothing is known of its health."""
    engines = [replace(each, is_healthy=False, is_checked=False) for role in Role for each in w.fleet.healthy(role)]
    w.fleet.replace([])
    w.fleet.replace(engines)
    return {each.role: each for each in engines}


@pytest.mark.parametrize("has_fallback", [True, False])
@pytest.mark.parametrize(("late", "other"), [tuple(Role), tuple(Role)[::-1]])
async def test_an_engine_is_waited_for_until_its_first_check(late: Role, other: Role, has_fallback: bool) -> None:
    """SGLang answers it after a second. Without a wait vLLM would compute the prompt itself, or nobody."""
    async with world("sglang", "vllm", replace(WAITS, health_s=60), has_fallback=has_fallback) as w:
        (engine,) = w.all(late)
        engine.hangs_until = asyncio.Event()
        engines = anew(w)
        asking = asyncio.create_task(w.ask("/v1/completions", COMPLETION))
        await w.until(lambda: engines[other].is_healthy)
        await asyncio.sleep(0.2)
        assert not asking.done()
        engine.hangs_until.set()
        assert (await asking)[0] == 200 and len(w.prefill.got) == len(w.decode.got) == 1


async def test_an_engine_that_does_not_answer_its_first_check_is_not_waited_for_longer() -> None:
    async with world("sglang", "vllm", replace(WAITS, health_s=1)) as w:
        w.prefill.hangs_until = asyncio.Event()
        engines = anew(w)
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert engines[Role.PREFILL].is_checked and not w.prefill.got


@pytest.mark.parametrize("prefill", KINDS)
async def test_a_prompt_whose_prefill_failed_everywhere_is_computed_by_vllm(prefill: str) -> None:
    async with world(f"{prefill},{prefill}", "vllm") as w:
        for each in w.all("prefill"):
            each.act = FAILURES["500"]
        if prefill == "sglang":
            w.decode.act = lambda request, body: _slowly("kv_transfer_params" in body)
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert status == 200, answer
        assert [len(each.got) for each in w.all("prefill")] == [1, 1]
        assert "kv_transfer_params" not in w.decode.got[-1][1]
        assert 'kvbridge_proxy_prompts_without_prefill_total{reason="engine_error"} 1.0' in await w.metrics()


@pytest.mark.parametrize(("decode", "has_fallback"), [("vllm", False), ("sglang", True)])
async def test_without_the_option_or_vllm_nobody_computes_it(decode: str, has_fallback: bool) -> None:
    async with world("vllm", decode, has_fallback=has_fallback) as w:
        (engine,) = w.fleet.healthy(Role.PREFILL)
        w.prefill.is_healthy = False
        await w.until(lambda: not engine.is_healthy)
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, answer["error"]["code"]) == (503, "no_engine") and not w.decode.got
        async with w.http.get(w.url + "/health") as reply:
            assert reply.status == 503


async def test_what_the_proxy_answers_503_and_whom_it_kept_waiting_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world("vllm", "vllm", replace(WAITS, patient_s=0.1), has_fallback=False) as w:
        w.decode.act = lambda request, body: _slowly(True)
        asking = asyncio.create_task(w.ask("/v1/completions", COMPLETION, headers=TRACE))
        await asyncio.wait_for(w.decode.busy.wait(), 60)
        await asyncio.sleep(0.2)
        asking.cancel()
        await w.until(lambda: "client_left: " in caplog.text)
        assert f"waited for decode engine {named(w.decode)}, X-Request-Id r1" in caplog.text
        w.prefill.is_healthy = False
        (engine,) = w.fleet.healthy(Role.PREFILL)
        await w.until(lambda: not engine.is_healthy)
        for _ in range(20):
            assert (await w.ask("/v1/completions", COMPLETION))[0] == 503
        assert 1 <= sum("answered 503: no prefill engine is healthy" in line for line in caplog.messages) < 10


async def test_an_engine_that_is_gone_leaves_the_metrics() -> None:
    async with world("vllm", "vllm,vllm", replace(WAITS, forget_s=0.1)) as w:
        leaving, staying = w.all("decode")
        assert f'engine_outstanding{{engine="{named(leaving)}",role="decode"}} 0.0' in await w.metrics()
        leaving.act = staying.act = FAILURES["500"]
        for _ in range(2):
            await w.ask("/v1/completions", COMPLETION)
        assert f'engine="{named(leaving)}",role="decode"' in await w.metrics()
        (prefill,) = w.fleet.healthy(Role.PREFILL)
        (gone,) = (each for each in w.fleet.healthy(Role.DECODE) if each.url == leaving.url)
        w.fleet.replace([prefill, *(each for each in w.fleet.healthy(Role.DECODE) if each.url == staying.url)])
        w.fleet.failed(LegFailed(gone, "unreachable", "a request under way failed"))
        assert f'engine_healthy{{engine="{named(leaving)}"' not in await w.metrics(), "an alert would fire"
        async with asyncio.timeout(60):
            while named(leaving) in await w.metrics():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert named(staying) in await w.metrics()


async def test_one_slow_check_does_not_drop_the_only_engine_and_three_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with world("vllm", "vllm", replace(WAITS, health_s=1), has_fallback=False) as w:
        (engine,) = w.fleet.healthy(Role.PREFILL)
        w.prefill.hangs_until = asyncio.Event()
        await w.until(lambda: engine.is_slow)
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        w.prefill.hangs_until.set()
        await w.until(lambda: not engine.is_slow)
        assert engine.is_healthy and "gets no requests" not in caplog.text
        w.prefill.hangs_until = asyncio.Event()
        await w.until(lambda: not engine.is_healthy)
        assert "did not answer within 1 s, 3 times" in caplog.text
        w.prefill.hangs_until.set()
        w.prefill.hangs_until = None
        await w.until(lambda: engine.is_healthy)


async def test_a_stall_of_the_proxy_is_no_engines_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with world("vllm", "vllm", replace(WAITS, health_s=0.5)) as w:
        w.prefill.hangs_until = asyncio.Event()
        checks = w.prefill.checks
        await w.until(lambda: w.prefill.checks > checks)
        time.sleep(1.5)  # noqa: ASYNC251 - the loop stands still, and the time for the answer passes
        w.prefill.hangs_until.set()
        w.prefill.hangs_until = None
        checks = w.prefill.checks
        await w.until(lambda: w.prefill.checks >= checks + 2)
        assert "is slow" not in caplog.text and "gets no requests" not in caplog.text
        stalled = re.search(r"^kvbridge_proxy_stalled_seconds_total (\S+)$", await w.metrics(), re.MULTILINE)
        assert float(stalled[1]) > 1.0


async def test_a_proxy_that_always_stands_still_asks_a_few_times_and_blames_nobody() -> None:
    asked = []

    async def stalls() -> None:
        asked.append(1)
        time.sleep(0.8)  # noqa: ASYNC251 - the loop stands still, and the time for the answer passes
        await asyncio.sleep(30)

    async with world("sglang", "vllm", replace(WAITS, connect_s=0.2, health_every_s=60)) as w:
        w.prefill.looks_up = stalls
        status, answer = await w.ask("/v1/completions", COMPLETION)
        assert (status, len(asked)) == (503, 3), answer
        assert answer["error"]["code"] == "busy"
        assert answer["error"]["code"] == "busy"
        assert "kvbridge_proxy_engine_failures_total{" not in await w.metrics()


async def test_a_body_for_which_there_is_no_room_is_refused_and_small_ones_are_not() -> None:
    async with world("vllm", "vllm", limits=ProxyLimits(held_bytes=4 << 20)) as w:
        gate = asyncio.Event()
        w.decode.act = lambda request, body: _until(gate)
        large = COMPLETION | {"prompt": "x" * (5 << 19)}
        first = asyncio.create_task(w.ask("/v1/completions", large))
        await asyncio.wait_for(w.decode.busy.wait(), 60)
        status, answer = await w.ask("/v1/completions", large)
        assert (status, answer["error"]["code"]) == (503, "busy")
        gate.set()
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert (await first)[0] == 200
        assert "kvbridge_proxy_held_bytes 0.0" in await w.metrics()
        assert 'outcome="busy",path="/v1/completions"} 1.0' in await w.metrics()


async def test_answers_that_are_put_together_are_bounded_too() -> None:
    said = {"id": "x" * (1 << 20), "choices": [{"index": 0, "text": TEXT, "finish_reason": "length"}]}
    async with world("vllm", "vllm", limits=ProxyLimits(held_bytes=4 << 20)) as w:
        w.decode.act = lambda request, body: _raw(json.dumps(said).encode())
        status, answer = await w.ask("/v1/completions", COMPLETION | {"prompt": [[n] for n in range(1, 17)]})
        assert (status, answer["error"]["code"]) == (503, "busy")
        assert (await w.ask("/v1/completions", COMPLETION))[0] == 200
        assert "engine_failures_total{" not in await w.metrics()


async def test_an_event_that_does_not_end_is_bounded_too() -> None:
    async def endless(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(CUT).encode() + b"\n\ndata: ")
        for _ in range(32):
            await response.write(b"x" * (1 << 18))
        return response

    async with world("vllm", "vllm", limits=ProxyLimits(held_bytes=4 << 20)) as w:
        w.decode.act = endless
        _, events = await w.ask("/v1/completions", COMPLETION | {"stream": True})
        assert json.loads(events[-1])["error"]["code"] == "busy"
        assert "kvbridge_proxy_held_bytes 0.0" in await w.metrics()


async def test_no_more_is_asked_of_engines_at_once_than_there_are_descriptors_for() -> None:
    async with world("vllm", "vllm", limits=ProxyLimits(asks=2)) as w:
        gate = asyncio.Event()
        w.decode.act = lambda request, body: _until(gate)
        asking = [asyncio.create_task(w.ask("/v1/completions", COMPLETION)) for _ in range(5)]
        await w.until(lambda: len(w.decode.got) == 2)
        await asyncio.sleep(0.2)
        assert len(w.decode.got) == 2
        gate.set()
        assert {(await each)[0] for each in asking} == {200}


async def test_a_connection_that_is_too_many_is_told_and_an_idle_one_makes_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world("vllm", "vllm", limits=ProxyLimits(connections=2)) as w:
        gate = asyncio.Event()
        w.decode.act = lambda request, body: _until(gate)
        idle, _ = await asyncio.open_connection(*w.place)
        asking = []
        for count in (1, 2):
            asking.append(asyncio.create_task(w.ask("/v1/completions", COMPLETION)))
            await w.until(lambda count=count: len(w.decode.got) == count)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(idle.read(), 50) == b""
        reader, writer = await asyncio.open_connection(*w.place)
        said = await asyncio.wait_for(reader.read(), 50)
        assert said.startswith(b"HTTP/1.1 503 ") and b'"code": "busy"' in said
        assert "answered 503: all 2 connections" in caplog.text
        writer.close()
        gate.set()
        assert {(await each)[0] for each in asking} == {200}
        metrics = await w.metrics()
        for reason in ("made_room", "refused"):
            assert re.search(rf'connections_ended_total{{reason="{reason}"}} [1-9]', metrics)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHo"], ids=["silent", "half a head"])
async def test_a_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    async with world("vllm", "vllm", replace(WAITS, client_s=0.3)) as w:
        reader, writer = await asyncio.open_connection(*w.place)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 50) == b""
        writer.close()


INPUTS = [[None, 1, None], [-0.5, 2, None]]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_the_prompts_logprobs_come_from_sglangs_prefill_server(is_stream: bool) -> None:
    async def prefills(request: web.Request, body: Any) -> web.Response:
        await asyncio.sleep(0.1)
        meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": INPUTS, "input_top_logprobs": [None, [1]]}
        return web.json_response({"text": "", "output_ids": [7], "meta_info": meta | {"cached_tokens": 9}})

    body = BODIES["/generate"] | {"return_logprob": True, "logprob_start_len": 0, "stream": is_stream}
    async with world("sglang", "sglang") as w:
        w.prefill.act = prefills
        status, answer = await w.ask("/generate", body)
        assert status == 200, answer
        for each in [json.loads(event) for event in answer[:-1]] if is_stream else [answer]:
            assert each["meta_info"]["input_token_logprobs"] == INPUTS
            assert each["meta_info"]["input_top_logprobs"] == [None, [1]] and "cached_tokens" not in each["meta_info"]
        w.prefill.act = lambda request, body: _raw(b'{"meta_info": {"input_token_logprobs": [[]]}}')
        status, answer = await w.ask("/generate", body | {"logprob_start_len": -1})
        assert status == 200 and "input_token_logprobs" not in str(answer)


async def test_a_decode_engine_that_is_gone_is_left_out_where_vllm_computes_alone_too() -> None:
    async with world("vllm", "vllm,vllm", replace(WAITS, health_every_s=30)) as w:
        gone, there = w.all("decode")
        (prefill,) = w.fleet.healthy(Role.PREFILL)
        prefill.is_healthy = False  # its next health check is in half a minute
        await gone.stop()
        for _ in range(3):
            status, answer = await w.ask("/v1/completions", COMPLETION)
            assert status == 200, answer
        assert len(there.got) == 3
        assert "kvbridge_proxy_retries_total 1.0" in await w.metrics()
        assert f'engine_outstanding{{engine="{named(gone)}",role="decode"}} 0.0' in await w.metrics()
