"""Turns one ask into a request for a prefill and one for a decode engine, each in its own API. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..errors import EngineError
from .bodies import (
    CHAT,
    COMPLETIONS,
    CUSTOM_PARAM,
    GENERATE,
    MESSAGES,
    OF_VLLM,
    RESPONSES,
    SET_BY_PROXY,
    Body,
    ClientError,
    PromptAsk,
    is_set,
    parse,
)
from .generate import completions

SAYS_TOKENS = "kvbridge_says_tokens"  # in `custom_params`: has our SGLang adapter tell what SGLang does not
FOREIGN_HOST = "kvbridge"  # the `bootstrap_host` that tells SGLang that another engine has prefilled
TOKEN = "token_id:"  # how vLLM names a token if asked for ids (`return_tokens_as_token_ids`)
OF_CHATS = ("messages", "input_ids", "chat_template_kwargs", "tool_choice", "include_reasoning")
# vLLM does not know these. They affect the first token, which vLLM samples when SGLang decodes.
SGLANG_ONLY = ("regex", "ebnf", "json_schema", "stop_regex", "custom_logit_processor")
SHORTEST: dict[str, Body] = {RESPONSES: {"max_output_tokens": 1, "store": False}, MESSAGES: {"max_tokens": 1}}


class Kind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Leg:
    """A request to one engine."""

    path: str
    body: Body


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where a prefill engine's agent is."""

    host: str
    port: int
    key: str = ""

    @property
    def sender(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}" + (f"#{self.key}" if self.key else "")


@dataclass(frozen=True, slots=True)
class PrefilledLeg:
    """vLLM's answer to a prefill leg. `params` is None if it offered nothing."""

    params: Body | None
    first_token: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[float, int], ...] = ()  # best first


def vllm_prefill(ask: PromptAsk, room: int, decode: Kind) -> Leg:
    """Asks for one token, not streamed. If SGLang decodes, it is the answer's first token. Raises ClientError."""
    if decode is Kind.SGLANG and ask.path != GENERATE and (odd := [n for n in SGLANG_ONLY if is_set(ask.body.get(n))]):
        raise ClientError("not_supported", f"prefilled by vLLM and decoded by SGLang, not supported: {', '.join(odd)}")
    params: Body = {"do_remote_decode": True, "bootstrap_room": room} | ({"awaits_kept": True} if ask.is_kept else {})
    told = {"kv_transfer_params": params | ({"fetched_by": "sglang"} if decode is Kind.SGLANG else {})}
    if ask.path in OF_VLLM:
        return Leg(ask.path, _plain(ask) | {"stream": False} | SHORTEST[ask.path] | told)
    path = _vllm_path(ask)
    if ask.path == GENERATE:
        body = completions(ask, with_logprobs=decode is Kind.SGLANG)
    elif path != ask.path:
        body = {name: value for name, value in _plain(ask).items() if name not in OF_CHATS}
        body["prompt"] = ask.body["input_ids"]
    else:
        body = _plain(ask)
    asked = body.get("logprobs")  # 0 asks for the sampled token's only
    wants_logprobs = decode is Kind.SGLANG and asked is not None and asked is not False
    left_out: tuple[str, ...] = (
        "stream_options",
        "echo",
        "best_of",
        "prompt_logprobs",
        "suffix",
        "user",
        "stream_interval",
    )
    if not wants_logprobs:
        left_out += ("logprobs", "top_logprobs", "logprob_token_ids")
    least = body.pop("min_tokens", None)
    body = {name: value for name, value in body.items() if name not in left_out}
    body |= {"max_tokens": 1, "stream": False, "n": 1, "return_token_ids": True}
    if path == CHAT:
        body["max_completion_tokens"] = 1
    if type(least) is int and least > 0:
        body["min_tokens"] = 1  # else the first token might end the answer
    if wants_logprobs:
        body["return_tokens_as_token_ids"] = True
    return Leg(path, body | told)


def vllm_decode_after(ask: PromptAsk, prefilled: PrefilledLeg) -> Leg:
    """The decode leg after vLLM's prefill. If that offered no KV, the decode engine computes the prompt."""
    body, params = _vllm_decode(ask), prefilled.params
    if params is not None or ask.answered:
        body["kv_transfer_params"] = (params or {}) | _answered(ask)
    return Leg(_vllm_path(ask), body)


def vllm_decode_beside(ask: PromptAsk, room: int, agent: AgentPlace) -> Leg:
    """The decode leg while SGLang prefills."""
    params: Body = {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room}
    params |= {"remote_host": agent.host, "remote_port": agent.port}
    params |= {"remote_key": agent.key} if agent.key else {}
    return Leg(_vllm_path(ask), _vllm_decode(ask) | {"kv_transfer_params": params | _answered(ask)})


def sglang_prefill(ask: PromptAsk, room: int, host: str, port: int, decode: Kind) -> Leg:
    """The client's whole body: SGLang's prefill server stops after one token by itself.

    Of its answer only the prompt's log probabilities are used. Completions refuse `max_tokens` null, as the rest of a
    chat that names none has it.
    """
    body = {name: value for name, value in _plain(ask).items() if name != "stream_options"}
    if body.get("max_tokens") is None:
        body.pop("max_tokens", None)
    body |= {"stream": False, "bootstrap_host": host, "bootstrap_room": room}
    if decode is Kind.SGLANG:
        return Leg(ask.path, body | {"bootstrap_port": port})
    for name in ("logprobs", "top_logprobs", "return_logprob", "top_logprobs_num", "echo"):
        body.pop(name, None)
    return Leg(ask.path, _told(ask.path, body, {"fetched_by": "vllm"}))


def sglang_decode_beside(ask: PromptAsk, room: int, host: str, port: int) -> Leg:
    """The decode leg while SGLang prefills. The two servers talk to each other themselves."""
    return Leg(ask.path, _sglang_decode(ask) | {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room})


def sglang_decode_after(ask: PromptAsk, room: int, prefilled: PrefilledLeg) -> Leg:
    """The decode leg after vLLM's prefill. Raises EngineError without KV: SGLang's decode side computes no prompt."""
    if prefilled.params is None:
        raise EngineError("not_offered", "the prefill engine offered no KV: its answer has no kv_transfer_params")
    if prefilled.first_token is None:
        raise EngineError("bad_answer", "the prefill engine told no token_ids")
    told: Body = {"sender": _place(prefilled.params).sender, "first_token": prefilled.first_token}
    if name := prefilled.params.get("remote_request_id"):
        told["rendezvous"] = name
    if prefilled.logprob is not None:
        told["logprob"] = prefilled.logprob
    if prefilled.top_logprobs:  # as text: SGLang passes on no lists inside an object
        told["top_logprobs"] = json.dumps(prefilled.top_logprobs)
    body = _sglang_decode(ask) | {"bootstrap_host": FOREIGN_HOST, "bootstrap_room": room}
    return Leg(ask.path, _told(ask.path, body, told))


def _vllm_path(ask: PromptAsk) -> str:
    """A chat that goes on is one of SGLang's, with its prompt as token ids, which vLLM's chats do not take."""
    return COMPLETIONS if ask.path == GENERATE or (ask.path == CHAT and ask.answered) else ask.path


def _vllm_decode(ask: PromptAsk) -> Body:
    return completions(ask) if ask.path == GENERATE else _plain(ask) | _ids(ask)


def _sglang_decode(ask: PromptAsk) -> Body:
    if not ask.wants_ids:
        return _plain(ask)
    ids = _ids(ask) if ask.path == COMPLETIONS else {}
    return _with_custom(ask.path, _plain(ask) | ids, lambda custom: custom | {SAYS_TOKENS: True})


def _ids(ask: PromptAsk) -> Body:
    return {"return_token_ids": True} if ask.wants_ids else {}


def _answered(ask: PromptAsk) -> Body:
    return {"answered": ask.answered, "has_limit": ask.has_limit} if ask.answered else {}


def _plain(ask: PromptAsk) -> Body:
    """The client's body without the fields that only the proxy sets. A client may have set them to null."""
    return {name: value for name, value in ask.body.items() if name not in SET_BY_PROXY}


def traced(leg: Leg, kind: Kind, traceparent: str) -> Leg:
    """The leg with a trace context where kvbridge's adapter looks for it, unless the client has put one there."""
    if kind is Kind.SGLANG:
        return Leg(leg.path, _with_custom(leg.path, leg.body, lambda custom: {"traceparent": traceparent} | custom))
    if (params := leg.body.get("kv_transfer_params")) is None:
        return leg
    return Leg(leg.path, leg.body | {"kv_transfer_params": {"traceparent": traceparent} | params})


def _told(path: str, body: Body, told: Body) -> Body:
    """The body with `told` where SGLang passes it on to its adapter."""
    return _with_custom(path, body, lambda custom: custom | {CUSTOM_PARAM: told})


def _with_custom(path: str, body: Body, change: Callable[[Body], Body]) -> Body:
    holder = body["sampling_params"] if path == GENERATE else body
    changed = holder | {"custom_params": change(holder.get("custom_params") or {})}
    return body | {"sampling_params": changed} if path == GENERATE else changed


class _FirstChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: Any = None


class _Prefilled(msgspec.Struct):
    """What is read of an answer. The prompt's tokens, which it also has, are skipped."""

    choices: list[_FirstChoice] = []
    kv_transfer_params: dict[str, Any] | None = None


def read_prefilled(ask: PromptAsk, answer: bytes, wants_token: bool) -> PrefilledLeg:
    """Read vLLM's answer to `vllm_prefill`. Raises EngineError."""
    try:
        read = parse(answer, _Prefilled)
    except ValueError:
        raise EngineError("bad_answer", "the prefill engine's answer cannot be read") from None
    params = read.kv_transfer_params or None
    if not read.choices and ask.path not in OF_VLLM:
        raise EngineError("bad_answer", "the prefill engine's answer has no choices")
    if params is not None:
        _place(params)
    if not wants_token or params is None:
        return PrefilledLeg(params)
    tokens, logprobs = read.choices[0].token_ids, read.choices[0].logprobs
    if not tokens:
        raise EngineError("bad_answer", "the prefill engine told no token_ids")
    if not logprobs:
        return PrefilledLeg(params, tokens[0])
    try:
        logprob, top = _chat_logprobs(logprobs) if ask.path == CHAT else _logprobs(logprobs)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise EngineError("bad_answer", "the prefill engine's logprobs cannot be read") from None
    best = sorted(((value, token) for token, value in top), reverse=True)[: _top_asked(ask)]
    return PrefilledLeg(params, tokens[0], logprob, tuple(best))


def _logprobs(logprobs: Body) -> tuple[float, list[tuple[int, float]]]:
    top = (logprobs.get("top_logprobs") or [None])[0] or {}
    return float(logprobs["token_logprobs"][0]), [(_token(name), float(value)) for name, value in top.items()]


def _chat_logprobs(logprobs: Body) -> tuple[float, list[tuple[int, float]]]:
    first = logprobs["content"][0]
    top = first.get("top_logprobs") or []
    return float(first["logprob"]), [(_token(each["token"]), float(each["logprob"])) for each in top]


def _token(text: str) -> int:
    if not text.startswith(TOKEN):
        raise ValueError(text)
    return int(text.removeprefix(TOKEN))


def _top_asked(ask: PromptAsk) -> int:
    name = {COMPLETIONS: "logprobs", CHAT: "top_logprobs", GENERATE: "top_logprobs_num"}[ask.path]
    asked = ask.body.get(name)
    return asked if type(asked) is int else 0


def _place(params: Body) -> AgentPlace:
    host, port, key = (params.get(name) for name in ("remote_host", "remote_port", "remote_key"))
    is_port = type(port) is int or (isinstance(port, str) and port.isdecimal())
    if not (isinstance(host, str) and host and is_port and isinstance(key, str | None)):
        raise EngineError("bad_answer", "kv_transfer_params without remote_host and remote_port")
    return AgentPlace(host, int(port or 0), key or "")


def read_replicas(answer: Any) -> int:
    """How many replicas SGLang's bootstrap server has. Raises EngineError, also if rooms do not choose them."""
    count = answer.get("dp_size") if isinstance(answer, dict) else None
    if type(count) is not int or count < 1:
        raise EngineError("bad_answer", "the bootstrap server tells no dp_size")
    if count > 1 and not answer.get("follow_bootstrap_room"):
        reason = "its load balance method: must be follow_bootstrap_room where it has replicas and vLLM decodes"
        raise EngineError("bad_answer", reason)
    return count


def read_agent(answer: Any) -> AgentPlace:
    """The first agent of a replica, from [[pp_rank, tp_rank, address, ...], ...]. Raises EngineError."""
    try:
        _, _, address = min((pp, tp, address) for pp, tp, address, *_ in answer)
        place = urlsplit(address)
        host, port = place.hostname, place.port
    except (TypeError, ValueError, AttributeError):
        host = port = None
    if not (host and port):
        raise EngineError("bad_answer", "the bootstrap server tells no agents: is the kvbridge backend on there?")
    return AgentPlace(host, port, place.fragment)
