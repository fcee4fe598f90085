"""Puts the prompt's log probabilities, which SGLang's prefill server computes, into the answer of its pair. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from .bodies import CHAT, COMPLETIONS, GENERATE, Body, PromptAsk, encode, parse

Fields = dict[str, msgspec.Raw]
TOKEN_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def wants_inputs(ask: PromptAsk) -> bool:
    """Whether the answer has log probabilities of the prompt's tokens."""
    if ask.path == GENERATE:
        start = ask.body.get("logprob_start_len")
        return bool(ask.body.get("return_logprob")) and type(start) is int and start >= 0
    return ask.path == COMPLETIONS and bool(ask.body.get("echo") and ask.body.get("logprobs"))


def reads_all(ask: PromptAsk) -> bool:
    """Whether vLLM has to compute the whole prompt itself, so that fetching is no use."""
    body = ask.body
    if body.get("prompt_logprobs") is not None:
        return True
    asked = {COMPLETIONS: body.get("logprobs"), CHAT: body.get("top_logprobs", 0)}.get(ask.path)
    return bool(body.get("echo")) and asked is not None


def with_inputs(ask: PromptAsk, prefilled: bytes, answer: bytes) -> bytes:
    """The decode server's answer, or an event of its stream, with what prefill's answer has. Raises ValueError."""
    body, first = parse(answer, Fields), parse(prefilled, Fields)
    if ask.path == GENERATE:
        found = {name: value for name, value in _fields(first, "meta_info").items() if name.startswith("input_")}
        return encode(body | {"meta_info": _fields(body, "meta_info") | found})
    choices = parse(body.get("choices", b"[]"), list[Fields])
    if not choices:
        return answer
    own, theirs = _logprobs(first), _logprobs(body)
    sampled = parse(first["usage"], dict[str, Any])["completion_tokens"]  # the decode server tells it too
    merged = {name: _list(own, name)[:-sampled] + _list(theirs, name) for name in TOKEN_LISTS if own.get(name)}
    return encode(body | {"choices": [choices[0] | {"logprobs": theirs | merged}, *choices[1:]]})


def _fields(body: Fields, name: str) -> Fields:
    return parse(body[name], Fields) if name in body else {}


def _logprobs(body: Fields) -> Body:
    choice = parse(body.get("choices", b"[]"), list[Fields])[0]
    return parse(choice.get("logprobs", b"null"), Body | None) or {}


def _list(logprobs: Body, name: str) -> list[Any]:
    return logprobs.get(name) or []
