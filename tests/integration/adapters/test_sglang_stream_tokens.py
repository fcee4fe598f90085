"""Token ids of streams, as SGLang's HTTP server says them to a router that asks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.adapters.sglang.stream_tokens import ASKED, hooks

GENERATE, CHAT = hooks().values()
PROMPT, ANSWER = [5, 6], [10, 11, 12, 13, 14]
WORDS = ["a", "", " b", "c", "d"]  # of the second token no event comes


def call(**params: Any) -> SimpleNamespace:
    params = {"custom_params": {ASKED: True}} | params
    return SimpleNamespace(sampling_params=params, stream=True, return_prompt_token_ids=False)


class Server:
    """What SGLang's servers have of what is asked here."""

    def __init__(self, is_incremental: bool = False, **changed: Any) -> None:
        self.is_incremental, self.closed = is_incremental, 0
        self.preferred_sampling_params, self.reasoning_parser = None, None
        self.is_parsed, self.output = False, None
        self.template_manager = SimpleNamespace(chat_template_name=None)
        for name, value in changed.items():
            setattr(self, name, value)
        self.tokenizer_manager = self

    def _tool_call_parsing_active(self, request: Any) -> bool:
        return self.is_parsed

    def _requires_response_template_detokenization(self, request: Any) -> bool:
        return False

    def _encoding_output(self) -> Any:
        return self.output

    async def generate(self, asked: Any) -> AsyncGenerator[dict[str, Any], None]:
        ids, new = list[int](), list[int]()
        try:
            for at, token in enumerate(ANSWER):
                ids.append(token)
                new.append(token)
                meta = {"completion_tokens": at + 1, "finish_reason": {"type": "stop"} if token == 14 else None}
                output = {"text": WORDS[at], "output_ids": new if self.is_incremental else ids, "meta_info": meta}
                if WORDS[at]:
                    yield output | ({"prompt_token_ids": PROMPT} if asked.return_prompt_token_ids else {})
                    new = []
        finally:
            self.closed += 1

    async def chat(self, asked: Any, request: Any) -> AsyncGenerator[str, None]:
        try:
            yield said({"role": "assistant", "content": ""})
            async for output in GENERATE(lambda _, asked: self.generate(asked), self, asked):
                yield said({"content": output["text"]})
            yield said({}, "stop")
            yield "data: [DONE]\n\n"
        finally:
            self.closed += 1


def said(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'id': 'x', 'choices': [{'delta': delta, 'finish_reason': finish}]})}\n\n"


async def chunks(server: Server, asked: Any, **request: Any) -> list[str]:
    request = {"separate_reasoning": True} | request
    stream = CHAT(lambda _, asked, request: server.chat(asked, request), server, asked, SimpleNamespace(**request))
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_of_a_chat_each_event_with_text_has_the_tokens_since_the_one_before(is_incremental: bool) -> None:
    """But the last: what a stop string cuts off has tokens, and this event does not say that it is the last."""
    found = await chunks(Server(is_incremental), call())
    events = [json.loads(each.removeprefix("data: ")) for each in found[:-1]]
    told = [each["choices"][0] for each in events]
    assert [each.get("token_ids") for each in told] == [None, [10], [11, 12], [13], None, None]
    assert [each.get("prompt_token_ids") for each in told] == [None, PROMPT, None, None, None, None]
    assert [each["delta"].get("content") for each in told] == ["", "a", " b", "c", "d", None]
    assert found[-1] == "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("server", "asked"),
    [
        (Server(), call(custom_params=None)),
        (Server(), call(custom_params={ASKED: 1})),
        (Server(), call(repetition_penalty=1.05)),
        (Server(), call(frequency_penalty=0.1)),
        (Server(preferred_sampling_params={"top_p": 0.5}), call()),
        (Server(), call(structural_tag="{}")),
        (Server(reasoning_parser="qwen3"), call()),
        (Server(is_parsed=True), call()),
        (Server(output=object()), call()),
        (Server(template_manager=SimpleNamespace(chat_template_name="vicuna")), call()),
    ],
)
async def test_none_are_said_where_another_server_might_go_on_otherwise(server: Server, asked: Any) -> None:
    assert "token_ids" not in "".join(await chunks(server, asked))


async def test_a_chat_whose_reasoning_stays_in_its_text_has_them() -> None:
    found = await chunks(Server(reasoning_parser="qwen3"), call(repetition_penalty=1.0), separate_reasoning=False)
    assert "token_ids" in found[1]


async def test_generate_says_a_prompt_once() -> None:
    server = Server()
    stream = GENERATE(lambda _, asked: server.generate(asked), server, call())
    assert [each.get("prompt_token_ids") async for each in stream] == [PROMPT, None, None, None]
    plain = GENERATE(lambda _, asked: server.generate(asked), server, call(repetition_penalty=2))
    assert not any(["prompt_token_ids" in each async for each in plain])


@pytest.mark.parametrize(
    ("preferred", "says"),
    [({"frequency_penalty": 0.5}, True), ({"structural_tag": "{}"}, False), ({"stop": ["a"]}, False)],
)
async def test_of_completions_no_prompt_is_said_where_the_server_chooses_more(
    preferred: dict[str, Any], says: bool
) -> None:
    """SGLang would say it."""
    asked = call(frequency_penalty=0.0, repetition_penalty=1.0, stop=None)
    asked.return_prompt_token_ids = True
    server = Server(preferred_sampling_params=preferred)
    stream = GENERATE(lambda _, asked: server.generate(asked), server, asked)
    assert [each.get("prompt_token_ids") async for each in stream] == [PROMPT if says else None, None, None, None]


async def test_a_stream_that_is_closed_ends_at_once() -> None:
    server = Server()
    for stream in (
        CHAT(lambda _, asked, request: server.chat(asked, request), server, call(), SimpleNamespace()),
        GENERATE(lambda _, asked: server.generate(asked), server, call()),
    ):
        closed = server.closed
        await anext(stream)
        await stream.aclose()
        assert server.closed == closed + 1
