"""Reads and checks a client's request: one body becomes one ask for each prompt and sample. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import KVBridgeError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/generate"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
OF_VLLM = (RESPONSES, MESSAGES)  # carried only between vLLM engines: their answers do not tell the first token
PATHS = (COMPLETIONS, CHAT, GENERATE, *OF_VLLM)

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")
SET_BY_PROXY = ("kv_transfer_params", *BOOTSTRAP)  # set by the proxy, refused from clients
REPLICAS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")  # refused: rooms choose replicas
CUSTOM_PARAM = "kvbridge"  # in `custom_params`: set by the proxy, refused from clients
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
    RESPONSES: ("background", "previous_response_id"),  # they need what one engine remembers
    MESSAGES: (),
}

# What the prompt is in, and what may be large besides. Passed on as bytes, like everything that is not looked into.
LARGE = (
    *("prompt", "messages", "text", "input_ids", "image_data", "video_data", "audio_data", "tools", "documents"),
    *("prompt_embeds", "input_embeds", "input", "instructions", "system"),
)
GREEDY = 1e-5  # vLLM takes a lower temperature for 0
REST_BYTES = 1 << 20  # of all other fields together
MOST_FIELDS = 256  # of an object that is looked into
SCALAR_BYTES = 1024  # a longer number or string is passed on as bytes
BLANK = b" \t\r\n"
BETWEEN = re.compile(r"[ \t\r\n,]*")  # two elements of a list

# What the proxy looks into is a Python value. Everything else is msgspec.Raw: the client's bytes, never parsed, because
# Python's objects take twenty times the memory of a body of lists, and building them stalls everybody.
Body = dict[str, Any]
Large = msgspec.defstruct("Large", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in LARGE])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_large = msgspec.json.Decoder(Large).decode


class ClientError(KVBridgeError):
    """An error that the client can fix. `status` is the HTTP status."""

    def __init__(self, code: str, *reasons: str, status: int = 400) -> None:
        super().__init__(code, *reasons)
        self.status = status


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """One prompt: what one prefill engine and one decode engine do together. `samples`: answers, of vLLM's own `n`.

    `wants_ids`: the decode engine is to tell token ids, if it can. `answered`: so many of the prompt's last tokens are
    an answer that another engine of this `kind` began. `is_kept`: that one keeps the KV of it. `has_limit`: the client
    named the most tokens.
    """

    path: str
    body: Body
    samples: int = 1
    wants_ids: bool = False
    answered: int = 0
    kind: str = ""
    is_kept: bool = False
    has_limit: bool = False

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Asks:
    """All asks of one body; the `samples` for a prompt stand together. `is_list`: SGLang would answer with a list."""

    asks: tuple[PromptAsk, ...]
    samples: int = 1
    is_list: bool = False


def parse(raw: bytes, kind: Any = Any) -> Any:
    """Parse strict JSON, without NaN and infinity, as a `kind`. Raises only ValueError, whatever the bytes are."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):  # their texts may quote the body
        raise ValueError("no JSON, or not what was expected") from None


def encode(body: Any) -> bytes:
    return b"".join(pieces(body))


def pieces(body: Any) -> list[bytes | memoryview]:
    """A body in JSON, in pieces: what is large in it is not copied, however many legs have it."""
    if not isinstance(body, dict):
        return [msgspec.json.encode(body)]
    found: list[bytes | memoryview] = []
    small = bytearray(b"{")
    for name, value in body.items():
        small += (b"" if len(small) == 1 and not found else b",") + msgspec.json.encode(name) + b":"
        if isinstance(value, msgspec.Raw) and len(memoryview(value)) > SCALAR_BYTES:
            found += (bytes(small), memoryview(value))
            small.clear()
        else:
            small += msgspec.json.encode(value)
    return [*found, bytes(small + b"}")]


def read(path: str, raw: bytes, are_shared: bool = False) -> Asks:
    """Read a client's body. `are_shared`: one engine may make several answers to a prompt. Raises ClientError."""
    try:
        raw.decode()
        large = sum(len(memoryview(getattr(each, name))) for each in (_large(raw),) for name in LARGE)
        if len(raw) - large > REST_BYTES:
            raise ClientError("too_large", f"{REST_BYTES} bytes at most besides {', '.join(LARGE)}", status=413)
        body = _looked_into(raw)
    except msgspec.ValidationError:
        raise ClientError("bad_json", f"the body must be a JSON object, got {_kind(raw)}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ClientError("bad_json", "the body is no JSON, or nested too deeply") from None
    _refuse_ours(body)
    if unfit := [name for name in NOT_CARRIED[path] if is_set(body.get(name))]:
        raise ClientError("not_supported", f"not supported here: {', '.join(unfit)}")
    _check_flag(body, "stream")
    body = _with_custom(body, "custom_params")
    return _split_generate(body) if path == GENERATE else _split_openai(path, body, are_shared)


def _looked_into(raw: bytes | msgspec.Raw) -> Body:
    """An object's numbers, flags and short strings as Python values, all else as bytes."""
    fields = _object(raw)
    if len(fields) > MOST_FIELDS:
        raise ClientError("too_many", f"an object of {len(fields)} fields: {MOST_FIELDS} at most")
    return {name: _scalar(value) for name, value in fields.items()}


def _scalar(value: msgspec.Raw) -> Any:
    is_short = len(memoryview(value)) <= SCALAR_BYTES
    try:
        return value if not is_short or bytes(value)[:1] in (b"{", b"[") else msgspec.json.decode(value)
    except msgspec.ValidationError:
        raise ClientError("bad_json", "the body has a number that no engine can take") from None


def is_set(value: Any) -> bool:
    """Whether a field asks for anything. One that is off does not."""
    if isinstance(value, msgspec.Raw):
        return len(memoryview(value)) > SCALAR_BYTES or bytes(value).translate(None, BLANK) not in (b"[]", b"{}")
    return value is not None and value is not False and value not in ("", [], {})


def _refuse_ours(body: Body) -> None:
    found = [name for name in (*SET_BY_PROXY, *REPLICAS) if body.get(name) is not None]
    if isinstance(extra := body.get("vllm_xargs"), msgspec.Raw) and _kind(extra) == "an object":
        inside = _looked_into(extra).get("kv_transfer_params")
        found += [] if inside is None else ["vllm_xargs.kv_transfer_params"]
    if found:
        has_both = "kv_transfer_params" in found and len(found) > 1
        which = " (of two styles at once)" if has_both else ""
        raise ClientError("has_transfer_params", f"the proxy sets these itself{which}, leave out: {', '.join(found)}")


def _with_custom(body: Body, name: str) -> Body:
    """The body with its `custom_params` looked into. Raises ClientError if they have what they may not have.

    SGLang 0.5.23 takes scalars, and lists and objects of scalars. Anything deeper crashes its scheduler.
    """
    custom = body.get("custom_params")
    if custom is None:
        return body
    if not isinstance(custom, msgspec.Raw) or _kind(custom) != "an object":
        raise ClientError("bad_request", f"{name} must be an object")
    inside = _looked_into(custom)
    if CUSTOM_PARAM in inside:
        raise ClientError("has_transfer_params", f"the proxy sets this itself, leave out: custom_params.{CUSTOM_PARAM}")
    for each, value in inside.items():
        if isinstance(value, msgspec.Raw) and _is_deep(value):
            raise ClientError("bad_request", f"custom_params.{each}: too deep, one level may be there")
    return body | {"custom_params": inside}


def _is_deep(value: msgspec.Raw) -> bool:
    """Whether a list or an object has another one in it."""
    if _kind(value) == "a string":
        return False
    inner = _list(value) if _kind(value) == "a list" else _object(value).values()
    return any(_kind(each) in ("a list", "an object") for each in inner)


def _split_openai(path: str, body: Body, are_shared: bool) -> Asks:
    if path in OF_VLLM:
        return Asks((PromptAsk(path, body),))
    samples = _count(body, "n")
    if _count(body, "best_of") > 1:
        raise ClientError("not_supported", "not supported here: best_of > 1")
    are_shared &= not _is_greedy(body)
    if path == CHAT:
        messages = body.get("messages")
        if _kind(messages) != "a list" or not is_set(messages):
            raise ClientError("bad_request", "messages must be a list that is not empty")
        return _asks(path, [body], samples, "n", False, are_shared)
    prompts = _prompts(body.get("prompt"), "prompt")
    return _asks(path, [body | {"prompt": prompt} for prompt in prompts], samples, "n", False, are_shared)


def _is_greedy(body: Body) -> bool:
    """Whether vLLM would refuse several answers to a prompt, as all are the same."""
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature < GREEDY


def _split_generate(body: Body) -> Asks:
    named = [name for name in ("text", "input_ids") if body.get(name) is not None]
    if len(named) != 1:
        raise ClientError("bad_request", f"one of text and input_ids must be there, got {len(named)}")
    (name,) = named
    prompts = _prompts(body[name], name)
    is_batch = prompts[0] is not body[name]
    each = _of_prompts(body, len(prompts)) if is_batch else [body]
    each = [own | {name: prompt} for own, prompt in zip(each, prompts, strict=True)]
    params = [_params(one) for one in each]
    counts = {_count(one, "n") for one in params}
    if len(counts) > 1:
        raise ClientError("not_supported", "not supported here: sampling_params.n that differs within a batch")
    samples = counts.pop()
    if is_batch and body.get("stream"):
        raise ClientError("not_supported", "not supported here: a batch with stream")
    plain = [one | {"sampling_params": own} for one, own in zip(each, params, strict=True)]
    return _asks(GENERATE, plain, samples, "sampling_params.n", is_batch or samples > 1)


def _of_prompts(body: Body, count: int) -> list[Body]:
    """The body for each prompt of a batch."""
    own = [dict(body) for _ in range(count)]
    for name in PER_PROMPT:
        value = body.get(name)
        if _kind(value) == "a list":
            values = _list(value or b"")
            if len(values) != count:
                raise ClientError("bad_request", f"{name}: {len(values)} for {count} prompts")
            for one, each in zip(own, values, strict=True):
                one[name] = _scalar(each)
        elif name == "rid" and isinstance(value, str):
            for place, one in enumerate(own):
                one[name] = f"{value}_{place}"
    return own


def _params(body: Body) -> Body:
    params = body.get("sampling_params")
    if params is None:
        return {}
    if not isinstance(params, msgspec.Raw) or _kind(params) != "an object":
        raise ClientError("bad_request", f"sampling_params must be an object, got {_kind(params)}")
    return _with_custom(_looked_into(params), "sampling_params.custom_params")


def _asks(path: str, bodies: Sequence[Body], samples: int, name: str, is_list: bool, are_shared: bool = False) -> Asks:
    if len(bodies) * samples > MOST_ASKS:
        raise ClientError("too_many", f"{len(bodies)} prompts times {name} {samples}: {MOST_ASKS} at most")
    if len(bodies) * samples > 1 and bodies[0].get("stream"):
        what = f"{name} > 1" if samples > 1 else "several prompts"
        raise ClientError("not_supported", f"not supported here: {what} with stream")
    if samples == 1 or are_shared:
        return Asks(tuple(PromptAsk(path, body, samples) for body in bodies), 1, is_list)
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
    """The prompts of a field: itself, or what its list has. No objects are made of tokens."""
    kind = _kind(value)
    if kind == "a string":
        return [value]
    if kind == "a list":
        raw = bytes(value)
        inside = raw[1:].lstrip(BLANK)
        if inside.startswith(b'"'):
            return _texts(raw, name)
        rest = raw.translate(None, b"0123456789" + BLANK)[1:-1]  # strict JSON, so these are all numbers
        if not rest.strip(b",") and not inside.startswith(b"]"):
            return [value]
        if rest.startswith(b"[") and rest.endswith(b"]"):
            _check_many(rest.count(b"["), name)
            lists = list(_list(value)) if not any(each.strip(b",") for each in rest[1:-1].split(b"],[")) else []
            if lists and all(map(is_set, lists)):
                return lists
    raise ClientError("bad_request", f"{name} must be text, token ids or a list of either, and not empty")


def _texts(raw: bytes, name: str) -> list[msgspec.Raw]:
    """The strings of a list, one after the other: no more of them are read than there may be."""
    found: list[msgspec.Raw] = []
    text, at, next_of = raw.decode(), 1, json.JSONDecoder().raw_decode
    while True:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text[at] == "]":
            return found
        if text[at] != '"':
            raise ClientError("bad_request", f"{name} must be text, token ids or a list of either, and not empty")
        _, end = next_of(text, at)
        found.append(msgspec.Raw(text[at:end].encode()))
        _check_many(len(found), name)
        at = end


def _check_many(count: int, name: str) -> None:
    if count > MOST_ASKS:
        raise ClientError("too_many", f"{name}: {MOST_ASKS} prompts at most")


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


def _kind(value: Any) -> str:
    if isinstance(value, bytes | msgspec.Raw):
        first = bytes(memoryview(value)[:64]).lstrip(BLANK)[:1]
        return {b"[": "a list", b"{": "an object", b'"': "a string"}.get(first, "a number")
    return {str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}.get(type(value), "a number")


def merge(asked: Asks, answers: Sequence[bytes]) -> bytes:
    """Merge the answers, in the order of the asks, into one for the client. Raises ValueError."""
    if asked.asks[0].path == GENERATE:
        return b"[" + b",".join(answers) + b"]" if asked.is_list else answers[0]
    if len(answers) == 1:
        return answers[0]
    each = [parse(answer, dict[str, msgspec.Raw]) for answer in answers]
    choices = [choice for answer in each for choice in parse(answer["choices"], list[dict[str, msgspec.Raw]])]
    numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
    used = [parse(answer.get("usage", b"null"), dict[str, Any] | None) or {} for answer in each]
    return encode(each[0] | {"choices": numbered, "usage": _usage(used, asked.samples)})


def _usage(used: Sequence[Body], samples: int) -> Body:
    """A prompt counts once, however many samples it has."""
    prompts = _sum([_with(each, True) for each in used[::samples]])
    total = {"prompt_tokens": 0} | prompts | {"completion_tokens": 0} | _sum([_with(each, False) for each in used])
    return total | {"total_tokens": total["prompt_tokens"] + total["completion_tokens"]}


def _with(usage: Body, is_prompt: bool) -> Body:
    return {name: value for name, value in usage.items() if name.startswith("prompt") is is_prompt}


def _sum(each: Sequence[Body]) -> Body:
    """Numbers added up by name, also those of objects inside; anything else as it is in the first that has it."""
    total: Body = {}
    for usage in each:
        for name, value in usage.items():
            old = total.get(name)
            if isinstance(old, dict) and isinstance(value, dict):
                total[name] = _sum([old, value])
            elif type(old) in (int, float) and type(value) in (int, float):
                total[name] = old + value
            elif old is None:
                total[name] = value
    return total
