"""A streamed answer that another engine goes on with: every cut of it in pure code, then through the real proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvbridge.proxy import carry
from kvbridge.proxy.bodies import PromptAsk, encode, read
from kvbridge.proxy.events import DONE, StreamEvent
from kvbridge.proxy.fleet import Role, read_engine
from kvbridge.proxy.legs import Kind
from kvbridge.proxy.moves import MovableAnswer, why_stays
from tests.integration.proxy.standins import WAITS, StandIn, World, named, world

pytestmark = pytest.mark.timeout(180)

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
PROMPT = [500, 501, 502]
# Tokens of bytes, as a model's: characters of two to four bytes in pieces, several in one token, and bytes that are
# none. Token i of an answer is i, so that a token that is lost or repeated shows.
WORDS = [b"a", b" b", "ä".encode()[:1], "ä".encode()[1:], b"END", b" en", b"d.", b"", "\U0001f600".encode()[:2]]
WORDS += ["\U0001f600".encode()[2:3], "\U0001f600".encode()[3:] + b"x", b"EN", b"D", b"\xff", b"z", "äö".encode(), b"!"]
WORDS += ["好中".encode()[:5], "中".encode()[2:], b"y \xc3", b"\xb6", b"\n"]


def said(words: Sequence[bytes]) -> str:
    return b"".join(words).decode(errors="replace")


class Engine:
    """Streams an answer as vLLM does: text comes once its characters are complete, and `stop` holds back the last."""

    def __init__(self, body: dict[str, Any], path: str, words: Sequence[bytes], begin: int = 0) -> None:
        self.path, self.words, self.begin = path, words, begin
        body = body.get("sampling_params", body)
        stop = body.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else stop
        self.held = max(map(len, self.stop), default=1) - 1
        most = body.get("max_new_tokens", 128) if path == GENERATE else body.get("max_tokens", 16)
        self.end = len(words) if most is None else min(len(words), begin + most)

    def told(self, text: str, rest: str) -> str | None:
        """What the client has once `rest`, which is no whole character, follows `text`; None: there is no event."""
        return text[: max(0, len(text) - self.held)]

    def events(self, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Each event has so many tokens, over and over."""
        at, number, text, given, pending = self.begin, 0, "", 0, b""
        tokens, finish, is_first = list[int](), None, True
        while at < self.end and not finish:
            for _ in range(sizes[number % len(sizes)]):
                if at == self.end or finish:
                    break
                before = len(text)
                pending += self.words[at]
                tokens.append(at)
                at += 1
                if not (decoded := pending.decode(errors="replace")).endswith("�"):
                    text, pending = text + decoded, b""
                for each in self.stop:
                    if (found := text.find(each, max(0, before - len(each) + 1))) >= 0:
                        text, finish = text[:found], "stop"
            finish = finish or ("length" if at == self.end else None)
            told = text if finish else self.told(text, pending.decode(errors="replace"))
            number += 1
            if told is None:
                continue
            yield from self.said(told[given:], tokens, finish, is_first)
            given, tokens, is_first = max(given, len(told)), [], False

    def said(self, text: str, tokens: list[int], finish: str | None, is_first: bool) -> Iterator[dict[str, Any]]:
        yield self._event(text, tokens, finish, is_first)

    def _event(self, text: str, tokens: list[int], finish: str | None, is_first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if self.path == CHAT else {"text": text})
        choice |= {"logprobs": None, "finish_reason": finish, "token_ids": tokens}
        top = {"id": f"x{self.begin}", "object": "o", "created": self.begin, "model": "m"}
        prompt = {"prompt_token_ids": [*PROMPT, *range(self.begin)] if is_first else None}
        usage = {"prompt_tokens": len(PROMPT) + self.begin, "completion_tokens": tokens[-1] + 1 - self.begin}
        if self.path == CHAT:
            return top | prompt | {"choices": [choice], "usage": usage}
        return top | {"choices": [choice | prompt], "usage": usage}


class SGLangEngine(Engine):
    """As SGLang does: no event where a stop string may have begun, and what is printable of a part of a character.

    Of a chat each event with text but the last has the tokens since the one before. The first event has `role`.
    `repeats`: events of /generate have all of the answer so far.
    """

    def __init__(self, *args: Any, repeats: bool = True) -> None:
        super().__init__(*args)
        self.repeats, self.unsaid, self.text, self.ids = repeats, list[int](), "", list[int]()

    def said(self, text: str, tokens: list[int], finish: str | None, is_first: bool) -> Iterator[dict[str, Any]]:
        if self.path == COMPLETIONS:
            yield from super().said(text, tokens, finish, is_first)
            return
        self.unsaid += tokens
        if self.path == GENERATE:
            self.text, self.ids = (self.text + text, self.ids + tokens) if self.repeats else (text, tokens)
            count = (self.unsaid[-1] if self.unsaid else self.begin - 1) + 1 - self.begin
            meta = {"id": f"x{self.begin}", "prompt_tokens": len(PROMPT) + self.begin, "completion_tokens": count}
            meta["finish_reason"] = {"type": finish} | ({"length": count} if finish == "length" else {})
            meta |= {"cached_tokens": 2 * self.begin} | ({} if finish else {"finish_reason": None})
            event = {"text": self.text, "output_ids": self.ids, "meta_info": meta}
            yield event | ({"prompt_token_ids": [*PROMPT, *range(self.begin)]} if is_first else {})
            return
        if is_first:
            yield self._chunk({"role": "assistant", "content": ""})
            self.prompt = [*PROMPT, *range(self.begin)]
        if text:
            event = self._chunk({"content": text})
            if not finish:
                event["choices"][0] |= {"token_ids": self.unsaid, "prompt_token_ids": self.prompt}
            self.unsaid, self.prompt = [], None
            yield event
        if finish:
            yield self._chunk({}, finish)
            total = {"prompt_tokens": len(PROMPT) + self.begin, "completion_tokens": self.end - self.begin}
            yield self._chunk({}) | {"choices": [], "usage": total}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"reasoning_content": None} | delta, "finish_reason": finish}
        return {"id": f"x{self.begin}", "object": "o", "created": self.begin, "model": "m", "choices": [choice]}

    def told(self, text: str, rest: str) -> str | None:
        ends = ((text + rest).endswith(stop[:most]) for stop in self.stop for most in range(1, len(stop) + 1))
        return None if any(ends) else text + self.printable(rest)

    @staticmethod
    def printable(text: str) -> str:
        """`find_printable_text` of SGLang 0.5.23."""
        is_chinese = len(text) > 1 and "\u4e00" <= text[-2] <= "\u9fff"
        return text[:-1] if is_chinese else text[: text.rfind(" ") + 1]


ENGINES: dict[Kind, type[Engine]] = {Kind.VLLM: Engine, Kind.SGLANG: SGLangEngine}


def ask(path: str, **more: Any) -> PromptAsk:
    if path == GENERATE:
        return read(path, json.dumps({"text": "hi", "stream": True} | more).encode()).asks[0]
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return read(path, json.dumps(prompt | {"model": "m", "stream": True} | more).encode()).asks[0]


def taken(answer: MovableAnswer, event: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(answer.event(StreamEvent(json.dumps(event).encode())).data))


def without_prompt(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "prompt_token_ids"}


def text_of(events: Sequence[dict[str, Any]]) -> str:
    if events and "meta_info" in events[0]:
        texts = [each["text"] for each in events]
        return texts[-1] if repeats(events) else "".join(texts)
    choices = [choice for each in events for choice in each["choices"]]
    return "".join(each["delta"].get("content") or "" if "delta" in each else each["text"] for each in choices)


def repeats(events: Sequence[dict[str, Any]]) -> bool:
    return all(len(each["output_ids"]) == each["meta_info"]["completion_tokens"] for each in events)


def rest_of(answer: MovableAnswer) -> tuple[dict[str, Any], int]:
    rest = answer.rest()
    answer.goes_on(rest)
    body = json.loads(encode(rest.body))
    prompt = body["prompt"] if rest.path == COMPLETIONS else body["input_ids"]
    count = len(prompt) - len(PROMPT)
    most = body["sampling_params"]["max_new_tokens"] if rest.path == GENERATE else body["max_tokens"]
    assert (rest.answered, rest.has_limit) == (count, most is not None)
    assert prompt == [*PROMPT, *range(count)]
    return body, count


STOPS: list[Any] = [[], ["."], ["END"], [" end.", "!"], "zä"]
SIZES = [(1,), (1, 2), (3, 1, 1)]


STREAMS: list[tuple[Kind, str, list[bool]]] = [  # for /generate, which of three servers repeat
    *((Kind.VLLM, path, []) for path in (COMPLETIONS, CHAT)),
    *((Kind.SGLANG, path, []) for path in (COMPLETIONS, CHAT)),
    *((Kind.SGLANG, GENERATE, each) for each in ([True] * 3, [False] * 3, [True, False, True], [False, True, False])),
]


@pytest.mark.parametrize(("kind", "path", "repeating"), STREAMS, ids=str)
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_wherever_an_answer_is_cut_twice_no_text_is_lost_or_repeated(
    kind: Kind, path: str, repeating: list[bool], stop: Any
) -> None:
    cuts = 0
    body: dict[str, Any] = {"max_new_tokens" if path == GENERATE else "max_tokens": 100, "stop": stop}
    body = {"sampling_params": body} if path == GENERATE else body
    on_path = COMPLETIONS if kind is Kind.VLLM else path

    def engine(number: int, *args: Any) -> Engine:
        return ENGINES[kind](*args, **({"repeats": repeating[number]} if path == GENERATE else {}))

    for first in range(0, len(WORDS), 2):  # the answer begins with other words
        words = WORDS[first:] + WORDS[:first]
        whole = text_of(list(engine(0, body, path, words).events([1])))
        for sizes in SIZES:
            for at in range(1, len(words)):
                answer, got = MovableAnswer(ask(path, **body)), []
                answer.begun_at(kind)
                left = at
                for event in engine(0, body, path, words).events(sizes):
                    got.append(taken(answer, event))
                    left -= 1
                    if left <= 0 and answer.can_be_cut:
                        break
                else:
                    assert text_of(got) == whole
                    continue
                for number in (1, 2):
                    if not answer.can_be_cut:
                        break
                    asked, count = rest_of(answer)
                    assert said(words[:count]) == text_of(got), "a token is cut"
                    limits = asked.get("sampling_params", asked)
                    assert 100 - count in limits.values() and limits.get("stop", []) == stop
                    cuts += 1
                    for event in engine(number, asked, on_path, words, count).events(sizes):
                        got.append(taken(answer, event))
                        if number == 1 and answer.can_be_cut:
                            break
                assert text_of(got) == whole, (words, sizes, at)
                (assert_generated if path == GENERATE else assert_chunks)(got, path)
    assert cuts > 50


def assert_chunks(got: list[dict[str, Any]], path: str) -> None:
    *_, last = (each for each in got if each["choices"])
    assert {each["id"] for each in got} == {"x0"} and "token_ids" not in last["choices"][0]
    assert ("delta" in last["choices"][0]) is (path == CHAT)
    assert sum("role" in choice.get("delta", {}) for each in got for choice in each["choices"]) <= 1
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    usage = got[-1]["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["total_tokens"] == len(PROMPT) + usage["completion_tokens"]


def assert_generated(got: list[dict[str, Any]], _: str) -> None:
    tokens = got[-1]["output_ids"] if repeats(got) else [token for each in got for token in each["output_ids"]]
    meta = got[-1]["meta_info"]
    assert {each["meta_info"]["id"] for each in got} == {"x0"} and not any("prompt_token_ids" in each for each in got)
    assert tokens == list(range(len(tokens))) and meta["completion_tokens"] == len(tokens)
    assert meta["prompt_tokens"] == len(PROMPT) >= meta["cached_tokens"]
    assert meta["finish_reason"] in ({"type": "stop"}, {"type": "length", "length": len(tokens)})


@pytest.mark.parametrize("stop", ["END", ["Ex!", "?"]], ids=str)
def test_no_answer_is_cut_where_a_stop_string_may_have_begun(stop: Any) -> None:
    """What follows is sampled anew, and the next engine looks for a stop string in that alone."""
    body, cut = {"max_tokens": 100, "stop": stop}, []
    answer, got = MovableAnswer(ask(COMPLETIONS, **body)), []
    for event in Engine(body, COMPLETIONS, [b"a", b"b", b"E", b"x", b"E", b"N", b"y", b"z", b"z", b"z"]).events([1]):
        got.append(taken(answer, event))
        cut += [text_of(got)] if answer.can_be_cut else []
    begun = [each for each in cut if each.endswith(("E", "EN") if stop == "END" else ("E", "Ex"))]
    assert cut and not begun, cut


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        (COMPLETIONS, {}, ""),
        (COMPLETIONS, {"n": 1, "presence_penalty": 0.0, "logit_bias": {"7": 1}, "echo": False, "seed": None}, ""),
        (CHAT, {"max_completion_tokens": 9, "tools": [], "tool_choice": "none", "metadata": {"a": "b"}}, ""),
        (COMPLETIONS, {"stream": False}, "not streamed"),
        (COMPLETIONS, {"seed": 0}, "seed"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (COMPLETIONS, {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"bad_words": ["x"]}, "bad_words"),
        (COMPLETIONS, {"unheard_of": 1}, "unheard_of"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"include_reasoning": False}, "include_reasoning"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, ""),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "media"),
        (CHAT, {"messages": [7]}, "media"),
        (GENERATE, {}, ""),
        (GENERATE, {"sampling_params": {"stop": ["a"], "repetition_penalty": 1.0, "custom_params": {}}}, ""),
        (GENERATE, {"rid": "a", "top_logprobs_num": 0, "logprob_start_len": -1, "lora_path": None}, ""),
        (GENERATE, {"stream": False}, "not streamed"),
        (GENERATE, {"return_logprob": True}, "return_logprob"),
        (GENERATE, {"return_prompt_token_ids": True}, "return_prompt_token_ids"),
        (GENERATE, {"image_data": ["a"]}, "image_data"),
        (GENERATE, {"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        (GENERATE, {"sampling_params": {"sampling_seed": 7}}, "sampling_seed"),
        (GENERATE, {"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        (GENERATE, {"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
    ],
)
def test_what_could_differ_after_a_move_stays_and_says_why(path: str, more: dict[str, Any], reason: str) -> None:
    assert why_stays(ask(path, **more)) == reason


@pytest.mark.parametrize(("stop", "reason"), [(["a", None], "stop"), (["a"] * 900, ""), ("x" * 2000, "")])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_stop_strings_that_cannot_be_looked_for_are_for_the_engine_to_refuse(path: str, stop: Any, reason: str) -> None:
    more = {"sampling_params": {"stop": stop}} if path == GENERATE else {"stop": stop}
    assert MovableAnswer(ask(path, **more)).stays == reason


@pytest.mark.parametrize("name", ["separate_reasoning", "stream_reasoning"])
def test_what_is_off_that_sglang_has_on_goes_along(name: str) -> None:
    answer = MovableAnswer(ask(CHAT, max_tokens=9, **{name: False}))
    answer.begun_at(Kind.SGLANG)
    for event in SGLangEngine({"max_tokens": 9}, CHAT, WORDS).events([1]):
        taken(answer, event)
        if answer.can_be_cut:
            break
    assert rest_of(answer)[0][name] is False


def test_what_an_engine_says_may_keep_an_answer_where_it_is() -> None:
    for path, change, reason in (
        (CHAT, {"delta": {"reasoning": "hm", "content": None}}, "parsed"),
        (CHAT, {"delta": {"tool_calls": [{"index": 0}]}}, "parsed"),
        (COMPLETIONS, {"token_ids": None}, "no token_ids"),
        (COMPLETIONS, {"text": 7}, "unread"),
    ):
        answer = MovableAnswer(ask(path, max_tokens=9))
        (event,) = list(Engine({"max_tokens": 1}, path, WORDS).events([1]))
        event["choices"][0] |= change
        shown = taken(answer, event)["choices"][0]
        assert shown.items() >= change.items() or path == COMPLETIONS
        assert answer.stays == reason and not answer.can_be_cut, path
    for change, reason in (({"text": None}, "no text"), ({"output_ids": [1, 2]}, "unread"), ({}, "no token_ids")):
        answer = MovableAnswer(ask(GENERATE))
        answer.begun_at(Kind.SGLANG)
        for event in SGLangEngine({}, GENERATE, WORDS).events([1]):
            event = {name: value for name, value in (event | change).items() if value is not None}
            told = event if change else {name: event[name] for name in ("text", "output_ids", "meta_info")}
            assert taken(answer, told) in (told, without_prompt(told))
        assert answer.stays == reason and not answer.can_be_cut
    answer = MovableAnswer(ask(COMPLETIONS, max_tokens=9))
    for data in (b"{}", b"[]", DONE, b'{"choices":[]}'):
        assert answer.event(StreamEvent(data)).data == data


def test_a_client_that_asks_for_token_ids_gets_each_once() -> None:
    words = [b"a", "ä".encode()[:1], "ä".encode()[1:], b"b", b"c"]
    for at in range(1, 5):
        answer, got = MovableAnswer(ask(COMPLETIONS, max_tokens=9, return_token_ids=True)), []
        for number, event in enumerate(Engine({"max_tokens": 9}, COMPLETIONS, words).events([1]), 1):
            got.append(taken(answer, event))
            if number >= at and answer.can_be_cut:
                asked, count = rest_of(answer)
                got += [taken(answer, each) for each in Engine(asked, COMPLETIONS, words, count).events([1])]
                break
        assert [token for each in got for token in each["choices"][0]["token_ids"]] == [0, 1, 2, 3, 4], at
        assert got[0]["choices"][0]["prompt_token_ids"] == PROMPT


def test_limits_count_what_was_answered_before() -> None:
    for path, more, count in (
        (COMPLETIONS, {"max_tokens": 9, "min_tokens": 5}, 6),
        (COMPLETIONS, {}, 13),
        (COMPLETIONS, {"max_tokens": None}, None),
        (CHAT, {"max_completion_tokens": 4, "max_tokens": 9}, 1),
        (CHAT, {}, None),
    ):
        answer = MovableAnswer(ask(path, **more))
        for event in Engine({"max_tokens": 3}, path, [b"a", b"b", b"c", b"d"]).events([1]):
            event["choices"][0]["finish_reason"] = None
            taken(answer, event)
        assert answer.can_be_cut
        asked, _ = rest_of(answer)
        assert asked["max_tokens"] == count and asked.get("min_tokens") == (2 if "min_tokens" in more else None)
    answer = MovableAnswer(ask(COMPLETIONS, max_tokens=1))
    (event,) = Engine({"max_tokens": 1}, COMPLETIONS, [b"a", b"b"]).events([1])
    event["choices"][0]["finish_reason"] = None  # it comes by itself
    taken(answer, event)
    assert not answer.can_be_cut


# Through the proxy:


class Counting:
    """An engine whose tokens are numbers, one an event, `hold`ing before each that is not allowed yet."""

    def __init__(self, engine: StandIn) -> None:
        self.engine, self.allowed, self.changed = engine, 0, asyncio.Event()
        self.given = 0
        self.fails: Any = None  # instead of an answer
        self.has_adapter = True  # one that says what SGLang does not
        self.says: Any = None  # instead of the first event that is not allowed
        engine.act = self.act

    def allow(self, count: int) -> None:
        self.allowed, before, self.changed = count, self.changed, asyncio.Event()
        before.set()

    async def act(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if not body.get("stream"):
            return None
        if self.fails is not None:
            return await self.fails(request)
        prompt = body.get("prompt", body.get("input_ids"))
        begin = len(prompt) - len(PROMPT) if isinstance(prompt, list) else 0
        words = [f" {each}".encode() for each in range(200)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        kind = Kind(self.engine.kind)
        if kind is Kind.SGLANG:
            assert body["bootstrap_room"] and not (request.path != COMPLETIONS and "return_token_ids" in body)
        number = begin
        for event in ENGINES[kind](body, request.path, words, begin).events([1]):
            self._untold(event, body)
            is_token = bool(text_of([event])) or "meta_info" in event
            while number >= self.allowed and self.says is None and (is_token or number == begin):
                await self.changed.wait()
            number += is_token
            if number > self.allowed:
                event = self.says
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            self.given = number
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _untold(self, event: dict[str, Any], body: dict[str, Any]) -> None:
        """Leave out the token ids that nobody asked for."""
        custom = body.get("sampling_params", body).get("custom_params") or {}
        if not (body.get("return_token_ids") or (custom.get("kvbridge_says_tokens") and self.has_adapter)):
            for each in (event, *event.get("choices", ())):
                for name in ("token_ids", "prompt_token_ids"):
                    each.pop(name, None)


BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": PROMPT, "max_tokens": 40, "stream": True},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True},
}
OF_SGLANG = BODIES | {
    GENERATE: {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 40}, "stream": True},
}
WHOLE = "".join(f" {each}" for each in range(40))


@asynccontextmanager
async def counting(
    decode: int = 2, kind: str = "vllm", prefill: str = "", **more: Any
) -> AsyncIterator[tuple[World, list[Counting]]]:
    """The first decode engine is asked first."""
    async with world(prefill or kind, ",".join([kind] * decode), **more) as w:
        yield w, [Counting(each) for each in w.all("decode")]


def answer_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]", events[-3:]
    return text_of([json.loads(each) for each in events[:-1]])


async def started(w: World, engine: Counting, path: str = COMPLETIONS, **more: Any) -> asyncio.Task[Any]:
    """A stream that has got 10 tokens of the first engine, and gets no more for now."""
    engine.allow(10)
    task = asyncio.create_task(w.ask(path, OF_SGLANG[path] | more))
    await w.until(lambda: bool(engine.engine.got))
    return task


def drain(w: World, engine: Counting) -> None:
    assert w.fleet.drain(named(engine.engine), True)
    engine.allow(11)


async def moved_twice(w: World, engines: list[Counting], path: str) -> Any:
    """What a client gets whose engine drains, and whose next one dies."""
    first, second, third = engines
    task = await started(w, first, path)
    second.allow(20)
    drain(w, first)
    await w.until(lambda: second.given == 20)
    await second.engine.stop()
    third.allow(100)
    return await task


@pytest.mark.parametrize("how", ["drained", "removed"])
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_goes_on_at_another_engine(path: str, how: str) -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first, path)
        if how == "drained":
            drain(w, first)
        else:
            left = [each for each in w.engines if each is not first.engine]
            w.fleet.replace([read_engine(Role(each.role), f"vllm={each.url}") for each in left])
            first.allow(11)
        await w.until(lambda: bool(second.engine.got))
        await w.until(lambda: first.engine.left == 1)
        assert f'engine_outstanding{{engine="{named(first.engine)}",role="decode"}} 1.0' in await w.metrics()
        second.allow(100)
        status, events = await task
        assert status == 200 and answer_of(events) == WHOLE
        _, prefill = w.prefill.got[1][:2]
        given = {"do_remote_decode": True, "awaits_kept": True}
        assert prefill["kv_transfer_params"].items() >= given.items()
        assert prefill["prompt"][:3] == PROMPT and prefill["max_tokens"] == 1
        path, body, _ = second.engine.got[0]
        assert path == COMPLETIONS and body["max_tokens"] == 40 - (len(body["prompt"]) - 3)
        told = {"do_remote_prefill": True, "answered": len(body["prompt"]) - 3, "has_limit": True}
        assert body["kv_transfer_params"].items() >= told.items()
        metrics = await w.metrics()
        assert f'moves_total{{engine="{named(first.engine)}",outcome="moved"}} 1.0' in metrics
        assert f'engine_outstanding{{engine="{named(first.engine)}",role="decode"}} 0.0' in metrics


async def test_an_answer_goes_on_though_its_engine_left_before_it_began() -> None:
    async with counting() as (w, (first, second)):
        task = asyncio.create_task(w.ask(COMPLETIONS, BODIES[COMPLETIONS]))
        await w.until(lambda: bool(first.engine.got))
        left = [each for each in w.engines if each is not first.engine]
        w.fleet.replace([read_engine(Role(each.role), f"vllm={each.url}") for each in left])
        first.allow(1)
        await w.until(lambda: bool(second.engine.got))
        second.allow(100)
        status, events = await task
        assert status == 200 and answer_of(events) == WHOLE


@pytest.mark.parametrize("path", OF_SGLANG)
@pytest.mark.parametrize("prefill", ["sglang", "vllm"])
async def test_an_answer_of_sglang_goes_on_at_another_engine(prefill: str, path: str) -> None:
    """The first one ends it only once the other has begun."""
    async with counting(kind="sglang", prefill=prefill) as (w, (first, second)):
        task = await started(w, first, path)
        drain(w, first)
        await w.until(lambda: bool(second.engine.got))
        assert not first.engine.left
        second.allow(100)
        status, events = await task
        assert status == 200 and answer_of(events) == WHOLE and "token_ids" not in "".join(events)
        await w.until(lambda: first.engine.left == 1)
        asked_on, body, _ = second.engine.got[0]
        limits, tokens = body.get("sampling_params", body), body["prompt" if path == COMPLETIONS else "input_ids"]
        count = len(tokens) - len(PROMPT)
        assert asked_on == path and 40 - count == limits["max_new_tokens" if path == GENERATE else "max_tokens"]
        assert body.get("return_token_ids", path != COMPLETIONS) and limits["custom_params"]["kvbridge_says_tokens"]
        given_on, given, _ = w.prefill.got[1]
        if prefill == "vllm":
            assert given_on == COMPLETIONS and given["prompt"] == tokens and "messages" not in given
            assert "awaits_kept" not in given["kv_transfer_params"]
        else:
            assert given_on == path and given["prompt" if path == COMPLETIONS else "input_ids"] == tokens
            assert not given.get("return_token_ids"), "nobody reads them"
        metrics = await w.metrics()
        assert f'moves_total{{engine="{named(first.engine)}",outcome="moved"}} 1.0' in metrics
        assert f'engine_outstanding{{engine="{named(first.engine)}",role="decode"}} 0.0' in metrics


async def test_answers_move_between_engines_of_one_kind() -> None:
    """Where decode engines are of both, and either kind prefills."""
    async with world("vllm,sglang", "vllm,sglang,vllm,sglang") as w:
        engines = [Counting(each) for each in w.all("decode")]
        tasks = [await started(w, each) for each in engines[:2]]
        for each in engines[:2]:
            drain(w, each)
        for each in engines[2:]:
            each.allow(100)
        assert [answer_of(events) for _, events in await asyncio.gather(*tasks)] == [WHOLE] * 2
        for before, after in zip(engines[:2], engines[2:], strict=True):
            assert len(after.engine.got) == 1
            await w.until(lambda before=before: before.engine.left == 1)


@pytest.mark.parametrize(("path", "most"), [(COMPLETIONS, 40), (CHAT, 40), (CHAT, None)])
async def test_an_answer_of_vllm_goes_on_where_sglang_prefills(path: str, most: int | None) -> None:
    async def refuses_null(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        is_null = request.path == COMPLETIONS and body.get("max_tokens", 16) is None
        return web.json_response({"error": {"message": "max_tokens: null"}}, status=400) if is_null else None

    async with counting(prefill="sglang") as (w, (first, second)):
        w.prefill.act = refuses_null
        task = await started(w, first, path, max_tokens=most)
        drain(w, first)
        await w.until(lambda: len(w.prefill.got) == 2 and bool(second.engine.got))
        await asyncio.sleep(0.1)  # for a refusal to be heard; decode waits for the KV
        assert len(first.engine.got) == 1
        second.allow(300)
        assert answer_of((await task)[1]) == "".join(f" {each}" for each in range(most or 200))
        told = second.engine.body
        answered = {"do_remote_prefill": True, "answered": len(told["prompt"]) - 3, "has_limit": most is not None}
        assert told["kv_transfer_params"].items() >= answered.items()


async def test_without_an_engine_of_its_kind_an_answer_stays() -> None:
    async with world("vllm", "sglang,vllm,vllm") as w:
        first, *others = (Counting(each) for each in w.all("decode"))
        task = await started(w, first)
        drain(w, first)
        stays = lambda: [each.stays for engine in w.fleet.listed() for each in engine.running]  # noqa: E731
        await w.until(lambda: stays() == ["no other engine"])
        first.allow(100)
        assert answer_of((await task)[1]) == WHOLE and not any(each.engine.got for each in others)


async def test_while_no_engine_of_its_kind_is_healthy_an_answer_is_not_given_up() -> None:
    async with world("sglang", "sglang,sglang,vllm") as w:
        first, second, _ = (Counting(each) for each in w.all("decode"))
        task = await started(w, first)
        second.engine.is_healthy = False
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 2)
        drain(w, first)
        first.allow(100)
        assert answer_of((await task)[1]) == WHOLE and "moves_total{" not in await w.metrics()


@pytest.mark.parametrize("path", OF_SGLANG)
@pytest.mark.parametrize("fails", ["the other engine", "prefill", "prefill's health"])
async def test_if_no_other_engine_takes_it_sglang_goes_on_with_what_it_has(fails: str, path: str) -> None:
    async with counting(kind="sglang") as (w, (first, second)):
        task = await started(w, first, path)
        if fails == "the other engine":
            second.fails = breaks
        elif fails == "prefill":
            w.prefill.act = lambda request, _: breaks(request)
        else:
            w.prefill.is_healthy = False
            await w.until(lambda: not w.fleet.healthy(Role.PREFILL))
        drain(w, first)
        first.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE and len(first.engine.got) == 1
        told = f'moves_total{{engine="{named(first.engine)}",outcome="returned"}} 1.0' in await w.metrics()
        assert told is (fails != "prefill's health")


@pytest.mark.parametrize("fails", ["the engine", "prefill, too"])
async def test_if_an_engine_of_sglang_fails_its_answers_go_on_at_another(fails: str) -> None:
    """Not at one of vLLM, which could do without prefill."""
    async with world("sglang", "sglang,sglang,vllm") as w:
        first, second, third = (Counting(each) for each in w.all("decode"))
        second.allow(100 if fails == "the engine" else 0)
        third.allow(100)
        task = await started(w, first)
        await w.until(lambda: first.given == 10)
        if fails == "prefill, too":
            w.prefill.act = lambda request, _: breaks(request)
        await first.engine.stop()
        _, events = await task
        assert not third.engine.got
        if fails == "prefill, too":
            assert json.loads(events[-1])["error"]["code"] == "ended_early"
        else:
            assert answer_of(events) == WHOLE and {json.loads(each)["id"] for each in events[:-1]} == {"x0"}
            assert f'moves_total{{engine="{named(first.engine)}",outcome="resumed"}} 1.0' in await w.metrics()


@pytest.mark.parametrize("path", OF_SGLANG)
async def test_an_answer_of_sglang_moves_again_and_goes_on_if_that_engine_dies(path: str) -> None:
    async with counting(3, kind="sglang") as (w, engines):
        first, second, _ = engines
        _, events = await moved_twice(w, engines, path)
        assert answer_of(events) == WHOLE
        metrics = await w.metrics()
        assert f'moves_total{{engine="{named(first.engine)}",outcome="moved"}} 1.0' in metrics
        assert f'moves_total{{engine="{named(second.engine)}",outcome="resumed"}} 1.0' in metrics


@pytest.mark.parametrize("path", OF_SGLANG)
async def test_without_moves_sglang_is_asked_as_the_client_asked(path: str) -> None:
    async with counting(kind="sglang", moves=False) as (w, (first, _)):
        first.allow(100)
        _, events = await w.ask(path, OF_SGLANG[path])
        assert answer_of(events) == WHOLE
        body = {name: value for name, value in first.engine.body.items() if not name.startswith("bootstrap_")}
        assert body == OF_SGLANG[path]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (COMPLETIONS, "repetition_penalty"),
        (CHAT, "repetition_penalty"),
        (CHAT, "no token_ids"),
        (GENERATE, "no token_ids"),
    ],
)
async def test_what_stays_at_sglang_says_why(path: str, why: str) -> None:
    """No ids are said by a server whose parser reads the text, or whose adapter is an older one."""
    async with counting(kind="sglang") as (w, (first, second)):
        first.has_adapter = False
        task = await started(w, first, path, **({why: 1.1} if why == "repetition_penalty" else {}))
        await w.until(lambda: first.given == 10)
        drain(w, first)
        await w.until(lambda: first.given == 11)
        await w.until(lambda: {each.stays for engine in w.fleet.listed() for each in engine.running} == {why})
        first.allow(100)
        assert answer_of((await task)[1]) == WHOLE and not second.engine.got


async def test_generate_of_vllm_stays() -> None:
    async with counting(prefill="sglang") as (w, (first, second)):
        first.allow(10)
        task = asyncio.create_task(w.ask(GENERATE, OF_SGLANG[GENERATE]))
        await w.until(lambda: bool(first.engine.got))
        drain(w, first)
        await w.until(lambda: {each.stays for engine in w.fleet.listed() for each in engine.running} == {GENERATE})
        first.allow(100)
        _, events = await task
        assert text_of([json.loads(each) for each in events[:-1]]) == WHOLE and not second.engine.got


async def test_an_answer_moves_as_often_as_its_engine_drains() -> None:
    async with counting(3) as (w, (first, second, third)):
        task = await started(w, first)
        drain(w, first)
        second.allow(20)
        await w.until(lambda: bool(second.engine.got))
        assert w.fleet.drain(named(second.engine), True)
        second.allow(22)
        third.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE and third.engine.got


async def refuses(_: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "no", "code": 400}}, status=400)


async def breaks(_: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=500)


async def dies(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def forbids(_: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "no such adapter"}}, status=404)


async def test_if_all_engines_refuse_the_rest_its_client_has_a_beginning_and_an_error() -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        first.fails = second.fails = forbids
        drain(w, first)
        first.allow(11)
        status, events = await task
        assert status == 200 and json.loads(events[-1])["error"]["code"] == "refused"
        assert WHOLE.startswith(text_of([json.loads(each) for each in events[:-1]]))


@pytest.mark.parametrize("fails", [refuses, forbids, breaks, dies])
async def test_if_no_other_engine_takes_it_it_goes_on_where_it_was(fails: Any) -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        second.fails = fails
        drain(w, first)
        await w.until(lambda: len(first.engine.got) == 2)
        first.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE
        assert f'moves_total{{engine="{named(first.engine)}",outcome="returned"}} 1.0' in await w.metrics()


async def test_without_prefill_the_other_engine_computes_what_was_answered() -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        w.prefill.is_healthy = False
        await w.until(lambda: not w.fleet.healthy(Role.PREFILL))
        drain(w, first)
        second.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE
        body = second.engine.got[0][1]
        assert body["kv_transfer_params"] == {"answered": len(body["prompt"]) - 3, "has_limit": True}


@pytest.mark.parametrize("when", ["the other engine is asked", "the other engine is dead too", "before the cut"])
async def test_the_draining_engine_dies(when: str) -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        second.allow(0 if when != "before the cut" else 100)
        if when == "before the cut":
            assert w.fleet.drain(named(first.engine), True)
        else:
            drain(w, first)
            await w.until(lambda: bool(second.engine.got))
        await first.engine.stop()
        if when == "the other engine is dead too":
            await second.engine.stop()
            _, events = await task
            assert json.loads(events[-1])["error"]["code"] in ("ended_early", "unreachable"), events[-1]
            said = [json.loads(each) for each in events[:-1]]
            assert WHOLE.startswith(text_of(said)), "what was said is right"
            return
        second.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE


@pytest.mark.parametrize("path", BODIES)
async def test_if_the_engine_dies_that_it_moved_to_it_goes_on_at_another(path: str) -> None:
    async with counting(3) as (w, engines):
        first, second, _ = engines
        status, events = await moved_twice(w, engines, path)
        assert status == 200 and answer_of(events) == WHOLE
        _, prefill = w.prefill.got[2][:2]
        assert "awaits_kept" not in prefill["kv_transfer_params"], "nobody keeps it"
        metrics = await w.metrics()
        assert f'moves_total{{engine="{named(first.engine)}",outcome="moved"}} 1.0' in metrics
        assert f'moves_total{{engine="{named(second.engine)}",outcome="resumed"}} 1.0' in metrics
        assert f'failures_total{{code="ended_early",engine="{named(second.engine)}",role="decode"}} 1.0' in metrics
        assert f'engine_outstanding{{engine="{named(second.engine)}",role="decode"}} 0.0' in metrics


@pytest.mark.parametrize("how", ["dies", "says an error", "is silent"])
async def test_if_an_engine_fails_its_answers_go_on_at_another(how: str) -> None:
    async with counting(waits=replace(WAITS, answer_s=5) if how == "is silent" else WAITS) as (w, (first, second)):
        second.allow(100)
        task = await started(w, first)
        if how == "dies":
            await first.engine.stop()
        elif how == "says an error":
            first.says = {"error": {"message": "EngineCore is dead", "code": 500}}
            first.allow(10)
        status, events = await task
        assert status == 200 and answer_of(events) == WHOLE
        assert f'moves_total{{engine="{named(first.engine)}",outcome="resumed"}} 1.0' in await w.metrics()


async def test_not_all_answers_of_an_engine_that_fails_go_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "MOVES_AT_ONCE", 1)
    async with counting() as (w, (first, second)):
        assert w.fleet.drain(named(second.engine), True)
        tasks = [await started(w, first) for _ in range(3)]
        await w.until(lambda: len(first.engine.got) == 3 and first.given == 10)
        assert w.fleet.drain(named(second.engine), False)
        await first.engine.stop()
        await w.until(lambda: bool(second.engine.got))
        await asyncio.sleep(0.3)
        assert (len(w.prefill.got), len(second.engine.got)) == (4, 1), "the others wait"
        second.allow(100)
        assert [answer_of(events) for _, events in await asyncio.gather(*tasks)] == [WHOLE] * 3


async def test_an_answer_that_ends_its_engines_goes_on_twice_and_no_more() -> None:
    async with counting(4) as (w, engines):
        for count, engine in enumerate(engines, 1):
            engine.says = {"error": {"message": "EngineCore is dead"}}
            engine.allow(count)
        _, events = await w.ask(COMPLETIONS, BODIES[COMPLETIONS])
        assert json.loads(events[-1])["error"]["code"] == "engine_error"
        assert text_of([json.loads(each) for each in events[:-1]]) == " 0 1 2"
        assert [len(each.engine.got) for each in engines] == [1, 1, 1, 0]


@pytest.mark.parametrize("why", ["moves are off", "seed", "no other engine"])
async def test_what_stays_ends_with_its_engine(why: str) -> None:
    async with counting(1 if why == "no other engine" else 2, moves=why != "moves are off") as (w, (first, *_)):
        task = await started(w, first, **({"seed": 7} if why == "seed" else {}))
        await first.engine.stop()
        _, events = await task
        assert json.loads(events[-1])["error"]["code"] == "ended_early"
        assert text_of([json.loads(each) for each in events[:-1]]) == "".join(f" {each}" for each in range(10))


@pytest.mark.parametrize("when", ["before the cut", "while the other engine is asked", "after it"])
async def test_the_client_goes_away_and_nothing_is_left(when: str) -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        if when != "before the cut":
            if when == "after it":
                second.allow(20)
            drain(w, first)
            await w.until(lambda: bool(second.engine.got))
        task.cancel()
        await w.until(lambda: first.engine.left == 1)
        await w.until(lambda: when == "before the cut" or second.engine.left == 1)
        await w.shows('outcome="client_left"')
        assert "kvbridge_proxy_held_bytes 0.0" in await w.metrics()


async def test_what_stays_is_finished_where_it_is() -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first, seed=7)
        drain(w, first)
        first.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE and not second.engine.got
        assert "return_token_ids" not in first.engine.got[0][1]


async def test_without_a_healthy_one_to_go_to_an_answer_goes_on_and_moves_later() -> None:
    async with counting() as (w, (first, second)):
        task = await started(w, first)
        second.engine.is_healthy = False
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 1)
        drain(w, first)
        first.allow(20)
        second.engine.is_healthy = True
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 1)
        first.allow(21)
        second.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE and len(second.engine.got[0][1]["prompt"]) > 3 + 10


async def test_many_answers_move() -> None:
    async with counting() as (w, (first, second)):
        first.allow(10)
        second.engine.is_healthy = False
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 1)
        tasks = [asyncio.create_task(w.ask(path, BODIES[path])) for path in BODIES for _ in range(10)]
        await w.until(lambda: len(first.engine.got) == 20)
        second.engine.is_healthy = True
        await w.until(lambda: len(w.fleet.healthy(Role.DECODE)) == 2)
        second.allow(100)
        drain(w, first)
        for number in range(12, 60):
            first.allow(number)
            await asyncio.sleep(0)
        for _, events in await asyncio.gather(*tasks):
            assert answer_of(events) == WHOLE
        assert len(second.engine.got) == 20 - (20 - first.engine.left) and second.engine.got


async def test_a_prefill_engine_counts_as_used_until_its_prompt_was_fetched() -> None:
    async with counting() as (w, (first, _)):
        first.allow(0)
        task = asyncio.create_task(w.ask(COMPLETIONS, BODIES[COMPLETIONS]))
        await w.until(lambda: bool(first.engine.got))
        assert f'engine_outstanding{{engine="{named(w.prefill)}",role="prefill"}} 1.0' in await w.metrics()
        first.allow(1)
        await w.shows(f'engine_outstanding{{engine="{named(w.prefill)}",role="prefill"}} 0.0')
        first.allow(100)
        _, events = await task
        assert answer_of(events) == WHOLE
