"""Reads and checks a client's request: one body becomes one ask for each prompt and sample. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import KVBridgeError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/generate"
PATHS = (COMPLETIONS, CHAT, GENERATE)

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")
OURS = ("kv_transfer_params", *BOOTSTRAP)  # set by the proxy, refused from clients
REPLICAS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")  # refused: rooms choose replicas
KEY = "kvbridge"  # in `custom_params`: set by the proxy, refused from clients
MOST_ASKS = 256  # prompts times samples of one body
# Fields of /generate that have one value for each prompt of a batch, or one for all.
PER_PROMPT = (
    *("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path", "extra_key"),
    *("cache_salt", "return_hidden_states", "custom_logit_processor"),
)
NOT_CARRIED = {
    COMPLETIONS: ("prompt_embeds", "use_beam_search"),
    CHAT: ("use_beam_search",),
    GENERATE: ("input_embeds", "positional_embed_overrides"),
}

Body = dict[str, Any]


class ClientError(KVBridgeError):
    """An error that the client can fix. `status` is the HTTP status."""

    def __init__(self, code: str, *reasons: str, status: int = 400) -> None:
        super().__init__(code, *reasons)
        self.status = status


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """One prompt, one sample: what one prefill engine and one decode engine do together."""

    path: str
    body: Body

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Asks:
    """All asks of one body; the `samples` of a prompt stand together. `is_list`: SGLang would answer with a list."""

    asks: tuple[PromptAsk, ...]
    samples: int = 1
    is_list: bool = False


def parse(raw: bytes) -> Any:
    """Parse strict JSON, without NaN and infinity. Raises only ValueError, whatever the bytes are."""
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def encode(body: Any) -> bytes:
    """Raises ClientError. A number that is too large was parsed as infinity, which engines do not take."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        raise ClientError("bad_json", "the body has a number that JSON cannot say, or is nested too deeply") from None


def read(path: str, raw: bytes) -> Asks:
    """Read a client's body. Raises ClientError."""
    try:
        body = parse(raw)
    except ValueError:  # the error's text may quote the body
        raise ClientError("bad_json", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise ClientError("bad_json", f"the body must be a JSON object, got {_kind(body)}")
    _refuse_ours(body)
    if unfit := [name for name in NOT_CARRIED[path] if body.get(name)]:
        raise ClientError("not_supported", f"not supported here: {', '.join(unfit)}")
    _check_flag(body, "stream")
    _check_custom(body)
    if not isinstance(body.get("custom_params"), dict | None):
        raise ClientError("bad_request", "custom_params must be an object")
    return _split_generate(body) if path == GENERATE else _split_openai(path, body)


def _refuse_ours(body: Body) -> None:
    found = [name for name in (*OURS, *REPLICAS) if body.get(name) is not None]
    if isinstance(extra := body.get("vllm_xargs"), dict) and extra.get("kv_transfer_params") is not None:
        found.append("vllm_xargs.kv_transfer_params")
    if any(KEY in custom for custom in _customs(body)):
        found.append(f"custom_params.{KEY}")
    if found:
        has_both = "kv_transfer_params" in found and len(found) > 1
        which = " (of two styles at once)" if has_both else ""
        raise ClientError("has_transfer_params", f"the proxy sets these itself{which}, leave out: {', '.join(found)}")


def _check_custom(body: Body) -> None:
    """SGLang 0.5.23 takes scalars, and lists and objects of scalars. Anything deeper crashes its scheduler."""
    for custom in _customs(body):
        for name, value in custom.items():
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if any(isinstance(each, dict | list) for each in inner):
                raise ClientError("bad_request", f"custom_params.{name}: too deep, one level may be there")


def _customs(body: Body) -> list[Body]:
    """All `custom_params` of a body: at its top, and in each prompt's sampling_params."""
    params = body.get("sampling_params")
    every = [body, *(params if isinstance(params, list) else [params])]
    return [_object(each.get("custom_params")) or {} for each in every if isinstance(each, dict)]


def _split_openai(path: str, body: Body) -> Asks:
    samples = _count(body, "n")
    if _count(body, "best_of") > 1:
        raise ClientError("not_supported", "not supported here: best_of > 1")
    if path == CHAT:
        if not (isinstance(body.get("messages"), list) and body["messages"]):
            raise ClientError("bad_request", "messages must be a list that is not empty")
        return _asks(path, [body], samples, "n", False)
    prompts = _prompts(body.get("prompt"), "prompt")
    return _asks(path, [body | {"prompt": prompt} for prompt in prompts], samples, "n", False)


def _split_generate(body: Body) -> Asks:
    named = [name for name in ("text", "input_ids") if body.get(name) is not None]
    if len(named) != 1:
        raise ClientError("bad_request", f"one of text and input_ids must be there, got {len(named)}")
    (name,) = named
    value = body[name]
    prompts = _prompts(value, name)
    is_batch = isinstance(value, list) and prompts[0] is not value
    each = [_of_prompt(body, place, len(prompts)) | {name: prompt} for place, prompt in enumerate(prompts)]
    each = each if is_batch else [body]
    params = [_params(one) for one in each]
    counts = {_count(one, "n") for one in params}
    if len(counts) > 1:
        raise ClientError("not_supported", "not supported here: sampling_params.n that differs within a batch")
    samples = counts.pop()
    if is_batch and body.get("stream"):
        raise ClientError("not_supported", "not supported here: a batch with stream")
    plain = [one | {"sampling_params": own} for one, own in zip(each, params, strict=True)]
    return _asks(GENERATE, plain, samples, "sampling_params.n", is_batch or samples > 1)


def _of_prompt(body: Body, place: int, count: int) -> Body:
    """The body for one prompt of a batch."""
    own = dict(body)
    for name in PER_PROMPT:
        value = body.get(name)
        if isinstance(value, list):
            if len(value) != count:
                raise ClientError("bad_request", f"{name}: {len(value)} for {count} prompts")
            own[name] = value[place]
        elif name == "rid" and isinstance(value, str):
            own[name] = f"{value}_{place}"
    return own


def _params(body: Body) -> Body:
    params = body.get("sampling_params")
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise ClientError("bad_request", f"sampling_params must be an object, got {_kind(params)}")
    if not isinstance(params.get("custom_params"), dict | None):
        raise ClientError("bad_request", "sampling_params.custom_params must be an object")
    return params


def _asks(path: str, bodies: Sequence[Body], samples: int, name: str, is_list: bool) -> Asks:
    if len(bodies) * samples > MOST_ASKS:
        raise ClientError("too_many", f"{len(bodies)} prompts times {name} {samples}: {MOST_ASKS} at most")
    if len(bodies) * samples > 1 and bodies[0].get("stream"):
        what = f"{name} > 1" if samples > 1 else "several prompts"
        raise ClientError("not_supported", f"not supported here: {what} with stream")
    if samples == 1:
        return Asks(tuple(PromptAsk(path, body) for body in bodies), 1, is_list)
    return Asks(
        tuple(PromptAsk(path, _sample(path, body, i)) for body in bodies for i in range(samples)), samples, is_list
    )


def _sample(path: str, body: Body, index: int) -> Body:
    """The body of one of `n` samples. Each has a seed of its own, as in engines: one seed would give equal samples."""
    if path == GENERATE:
        own = body | {"sampling_params": _seeded(body["sampling_params"] | {"n": 1}, "sampling_seed", index)}
        return own | {"rid": f"{own['rid']}_{index}"} if isinstance(own.get("rid"), str) else own
    return _seeded(body | {"n": 1}, "seed", index)


def _seeded(body: Body, name: str, index: int) -> Body:
    seed = body.get(name)
    return body | {name: seed + index} if type(seed) is int else body


def _prompts(value: Any, name: str) -> list[Any]:
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and value and (all(map(_is_tokens, value)) or all(isinstance(v, str) for v in value)):
        return value
    raise ClientError("bad_request", f"{name} must be text, token ids or a list of either, and not empty")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _count(body: Body, name: str) -> int:
    value = body.get(name)
    if value is None:
        return 1
    if type(value) is not int or value < 1:
        raise ClientError("bad_request", f"{name} must be a number from 1 on")
    return value


def _check_flag(body: Body, name: str) -> None:
    if body.get(name) not in (None, True, False):
        raise ClientError("bad_request", f"{name} must be true or false")


def _object(value: Any) -> Body | None:
    return value if isinstance(value, dict) else None


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}.get(
        type(value), "a number"
    )


def merge(asked: Asks, answers: Sequence[Body]) -> Any:
    """Merge the answers, in the order of the asks, into one for the client."""
    path = asked.asks[0].path
    if path == GENERATE:
        return list(answers) if asked.is_list else answers[0]
    if len(answers) == 1:
        return answers[0]
    choices = [answer["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
    return answers[0] | {"choices": choices, "usage": _usage(answers, asked.samples)}


def _usage(answers: Sequence[Body], samples: int) -> Body:
    """A prompt counts once, however many samples it has."""
    used = [_object(answer.get("usage")) or {} for answer in answers]
    prompt = sum(_number(each, "prompt_tokens") for each in used[::samples])
    completion = sum(_number(each, "completion_tokens") for each in used)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _number(values: Body, name: str) -> int:
    value = values.get(name)
    return value if type(value) is int else 0
