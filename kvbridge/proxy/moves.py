"""A streamed answer that goes on at another engine: whether it can, where it may be cut, what is asked there. Pure.

Engines tell the tokens of each event (`return_token_ids`; of SGLang's chats our adapter does), but not which of them
have their text in it: vLLM holds back the text of an incomplete character, and with `stop` the last characters; SGLang
the whole event where a stop string may have begun, and of what ends within a character it gives the text up to the last
space, or to a Chinese character. An answer is cut only where the text that the client has ends with a token. Tokens
after that are dropped, and computed again.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..errors import EngineError
from .bodies import CHAT, COMPLETIONS, GENERATE, Body, PromptAsk, encode, is_set, parse
from .events import DONE, StreamEvent
from .legs import Kind

# What has its meaning wherever an answer goes on.
GOES_ALONG = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "stream_options", "cache_salt", "priority"),
    "user",
)
# What is in the prompt's tokens, or counts what is left.
USED_UP = (
    *("prompt", "messages", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "documents", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("stream", "return_token_ids", "metadata", "store", "parallel_tool_calls"),
)
NEUTRAL: Body = {
    **{"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "length_penalty": 1, "tool_choice": "none"},
    **{"spaces_between_special_tokens": True, "include_reasoning": True},
}
OF_SGLANGS_CHATS = ("messages", "chat_template_kwargs", "separate_reasoning", "stream_reasoning")
# The same for /generate, and for what is in its `sampling_params`.
GENERATE_GOES_ALONG = ("lora_path", "cache_salt", "extra_key", "priority", "log_metrics", "no_logs")
GENERATE_USED_UP = (
    *("text", "input_ids", "sampling_params", "stream", "rid", "top_logprobs_num", "logprob_start_len"),
    "return_text_in_logprobs",
)
PARAMS_GO_ALONG = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "stop", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
)
PARAMS_USED_UP = ("max_new_tokens", "min_new_tokens")
PARAMS_NEUTRAL: Body = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
USUAL_TOKENS = {COMPLETIONS: 16, GENERATE: 128}  # of an answer for which no limit is named
PARSED = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")  # of a chat's delta

Fields = dict[str, msgspec.Raw]
NULL = msgspec.Raw(b"null")
OF_ONE_EVENT = ("choices", "usage", "prompt_token_ids", "prompt_text")


class _Part(msgspec.Struct):
    type: Any = None


class _Message(msgspec.Struct):
    content: msgspec.Raw = NULL


def why_stays(ask: PromptAsk) -> str:
    """What has an answer finished by the engine that began it; "" if another one can go on."""
    if not ask.is_stream:
        return "not streamed"
    if ask.path not in (COMPLETIONS, CHAT, GENERATE):
        return ask.path
    if ask.path == GENERATE:
        params = _odd(ask.body["sampling_params"], (*PARAMS_GO_ALONG, *PARAMS_USED_UP), PARAMS_NEUTRAL)
        return params or _odd(ask.body, (*GENERATE_GOES_ALONG, *GENERATE_USED_UP), {})
    if odd := _odd(ask.body, (*GOES_ALONG, *USED_UP), NEUTRAL):
        return odd
    return "media" if ask.path == CHAT and _has_media(ask.body["messages"]) else ""


def _odd(fields: Body, known: Collection[str], neutral: Body) -> str:
    """The first field that is set, is not among the `known`, and is not neutral; "" if there is none."""
    for name, value in fields.items():
        if name in neutral:
            is_same = value is None or (not isinstance(value, msgspec.Raw) and value == neutral[name])
        else:
            is_same = name in known or not is_set(value)
        if not is_same:
            return name
    return ""


def _has_media(messages: msgspec.Raw) -> bool:
    try:
        for message in parse(messages, list[_Message]):
            is_list = bytes(message.content).lstrip().startswith(b"[")
            if is_list and any(part.type != "text" for part in parse(message.content, list[_Part])):
                return True
    except ValueError:
        return True
    return False


class _Chunk(msgspec.Struct):
    """What is read of an event: of `choices`, the only one."""

    choices: list[Fields] = []
    prompt_token_ids: msgspec.Raw = NULL
    usage: dict[str, Any] | None = None


class MovableAnswer:
    """An answer to `ask`, event by event, by one engine after the other. `stays`: why it cannot be moved (any more)."""

    def __init__(self, ask: PromptAsk) -> None:
        self._ask, self.stays = ask, why_stays(ask)
        self._kind = Kind.VLLM
        self.prompt = b""  # its token ids, in JSON
        self._tokens = array("q")
        self._given = 0  # characters that the client has
        self._ends: list[tuple[int, int]] = []  # tokens and characters up to the end of a token that is not given yet
        self._params: Body = ask.body["sampling_params"] if ask.path == GENERATE else ask.body
        try:
            self._stops = _stops(self._params)
        except ValueError:  # the engine will say so, or it is too long to look for
            self._stops, self.stays = [], self.stays or "stop"
        self._longest = max(map(len, self._stops), default=1) - 1  # that may have begun, in characters
        self._last = ""  # so many, which the client has
        self._moved = 0  # tokens of the engines before
        self._is_over = self._is_moved = False
        self._shape: Fields = {}  # of an event of the first engine
        self._wants_tokens = ask.path == GENERATE or ask.body.get("return_token_ids") is True
        self._generated = Generated()

    def first(self) -> PromptAsk:
        """What the first engine is asked."""
        return replace(self._ask, wants_ids=True)

    def begun_at(self, kind: Kind) -> None:
        """A decode engine of this kind answers: others of its kind may go on."""
        self._kind = kind
        if self.stays:
            return
        if kind is Kind.VLLM and self._ask.path == GENERATE:
            self.stays = GENERATE
        elif kind is Kind.SGLANG and self._ask.body.get("repetition_penalty") not in (None, 1):
            self.stays = "repetition_penalty"  # it counts no token of the prompt, so none of the answer before

    @property
    def can_be_cut(self) -> bool:
        count = self._cut()
        left = self._left(count)
        return not (self.stays or self._is_over) and count > 0 and (left is None or left > 0)

    def rest(self, is_kept: bool = True) -> PromptAsk:
        """What another engine is asked, to go on from here. `is_kept`: the engine before keeps the KV."""
        count = self._cut()
        assert count
        left, params, body = self._left(count), self._params, self._ask.body
        path, is_generate = self._ask.path, self._ask.path == GENERATE
        most, least = ("max_new_tokens", "min_new_tokens") if is_generate else ("max_tokens", "min_tokens")
        limits: Body = {most: left}
        if type(number := params.get(least)) is int and number > count:
            limits[least] = number - count
        answered = ",".join(map(str, self._tokens[:count])).encode()
        prompt = msgspec.Raw(self.prompt[:-1] + b"," + answered + b"]")
        if is_generate:
            limits = {"sampling_params": _named(params, PARAMS_GO_ALONG) | limits}
            body = _named(body, GENERATE_GOES_ALONG) | {"input_ids": prompt}
        elif path == CHAT and self._kind is Kind.SGLANG:  # its completions have other defaults
            body = _named(body, (*GOES_ALONG, *NEUTRAL, *OF_SGLANGS_CHATS)) | {"input_ids": prompt}
        else:
            path, body = COMPLETIONS, _named(body, GOES_ALONG) | {"prompt": prompt}
        body |= limits | {"stream": True}
        limited = {"is_kept": is_kept, "has_limit": left is not None}
        return PromptAsk(path, body, wants_ids=True, answered=count, kind=self._kind, **limited)

    def goes_on(self, rest: PromptAsk) -> None:
        """All events from now on are an answer to `rest`."""
        del self._tokens[rest.answered :]
        self._ends.clear()
        self._moved, self._is_moved = rest.answered, True
        self._generated.goes_on()

    def _cut(self) -> int:
        """How many tokens the client has the text of. 0 if that ends within one, or nobody knows.

        Or if it ends with the beginning of a stop string: of a prompt that ends so, the next engine would not see it.
        """
        if any(self._last.endswith(stop[:most]) for stop in self._stops for most in range(1, len(stop))):
            return 0
        if self._ask.path == GENERATE and self._generated.repeats is None:
            return 0
        count = next((tokens for tokens, end in self._ends if end == self._given), 0)
        return 0 if self._wants_tokens and count < len(self._tokens) else count  # the client has the ids of the others

    def _left(self, count: int) -> int | None:
        """How many more tokens there may be; None: as many as the engine takes."""
        path = self._ask.path
        most = self._params.get("max_new_tokens" if path == GENERATE else "max_tokens", USUAL_TOKENS.get(path))
        if path == CHAT and self._params.get("max_completion_tokens") is not None:
            most = self._params["max_completion_tokens"]
        return most - count if type(most) is int else None

    def event(self, event: StreamEvent) -> StreamEvent:
        """The client's event. Raises EngineError."""
        is_generate = self._ask.path == GENERATE
        if event.data == DONE or (is_generate and self.stays and self._shape and not self._is_moved):
            return event
        try:
            fields = parse(event.data, Fields)
            own = self._own_of_generate(fields) if is_generate else self._own(event.data, fields)
        except (ValueError, TypeError, KeyError):
            if self._is_moved:
                raise EngineError("bad_answer", "an event that cannot be read") from None
            self.stays = "unread"
            return event
        return StreamEvent(encode(own), event.name)

    def _own_of_generate(self, fields: Fields) -> Fields:
        if "text" not in fields and not self._is_moved:  # of a server without tokenizer
            self.stays = self.stays or "no text"
            return _without(fields, "prompt_token_ids")
        generated, meta = self._generated, parse(fields["meta_info"], Fields)
        tokens, text = generated.new(fields, meta)
        self.prompt = self.prompt or _ids(fields.get("prompt_token_ids", NULL))
        reason = parse(meta.get("finish_reason", NULL))
        self._is_over = self._is_over or reason is not None
        self._note(tokens, text)
        own = _without(fields, "prompt_token_ids")
        if not self._is_moved:
            self._shape = self._shape or {"id": msgspec.Raw(bytes(meta["id"]))}
            return own
        all_tokens, prompt = list(self._tokens), self.prompt.count(b",") + 1
        whole: Body = {"prompt_tokens": prompt, "completion_tokens": len(all_tokens)}
        if isinstance(reason, dict) and type(reason.get("length")) is int:
            whole["finish_reason"] = reason | {"length": self._moved + reason["length"]}
        if cached := parse(meta.get("cached_tokens", NULL)):
            whole["cached_tokens"] = min(prompt, int(cached))
        said: Body = {"text": text, "output_ids": tokens}
        if generated.repeats:
            said = {"text": generated.text, "output_ids": all_tokens}
        said["meta_info"] = meta | _raw(whole) | self._shape
        return own | _raw(said)

    def _own(self, data: bytes, fields: Fields) -> Fields:
        read = parse(data, _Chunk)
        if not self._shape:
            self._shape = {name: msgspec.Raw(bytes(v)) for name, v in fields.items() if name not in OF_ONE_EVENT}
        own = (
            self._shape | {name: v for name, v in fields.items() if name in OF_ONE_EVENT} if self._is_moved else fields
        )
        if "prompt_token_ids" in own and not self._wants_tokens:
            own = own | {"prompt_token_ids": NULL}
        if read.usage is not None and self._is_moved:
            own = own | {"usage": msgspec.Raw(encode(self._usage(read.usage)))}
        if not read.choices:
            return own
        (choice,) = read.choices
        self._note_choice(read, choice)
        return own | {"choices": msgspec.Raw(b"[" + encode(self._choice(choice)) + b"]")}

    def _note_choice(self, read: _Chunk, choice: Fields) -> None:
        self.prompt = self.prompt or _ids(choice.get("prompt_token_ids", NULL)) or _ids(read.prompt_token_ids)
        delta = parse(choice.get("delta", b"{}"), Fields)
        if any(is_set(parse(delta[name])) for name in PARSED if name in delta):
            self.stays = self.stays or "parsed"
        text = parse(delta.get("content", b"null") if "delta" in choice else choice["text"], str | None) or ""
        tokens = parse(choice.get("token_ids", b"null"), list[int] | None) or []
        self._is_over = self._is_over or parse(choice.get("finish_reason", b"null")) is not None
        self._note(tokens, text)

    def _note(self, tokens: Sequence[int], text: str) -> None:
        """Note what is new in an event."""
        if text and not (tokens and self.prompt):
            self.stays = self.stays or "no token_ids"
        self._tokens.extend(tokens)
        self._given += len(text)
        self._last = (self._last + text)[-self._longest :] if self._longest else ""
        self._ends = [each for each in self._ends if each[1] >= self._given]
        if text and len(tokens) == 1:  # the text of a token comes whole, and all before it with it
            if self._kind is Kind.VLLM:
                self._ends.append((len(self._tokens), self._given + self._longest))
            elif not (text.endswith(" ") or _is_chinese(ord(text[-1]))):
                self._ends.append((len(self._tokens), self._given))

    def _choice(self, choice: Fields) -> Fields:
        own = dict(choice)
        hidden = () if self._wants_tokens else ("token_ids", "prompt_token_ids")
        if not self._is_moved and self._kind is Kind.VLLM:
            return own | {name: NULL for name in hidden if name in own}
        own = {name: value for name, value in own.items() if name not in hidden}
        if not self._is_moved:
            return own
        own = _without(own, "prompt_token_ids")
        if "delta" in own:  # the client has had `role`
            own["delta"] = msgspec.Raw(encode(_without(parse(own["delta"], Fields), "role")))
        if self._ask.path != CHAT or "delta" in own:
            return own
        text = own.pop("text")
        return {"index": own["index"], "delta": msgspec.Raw(b'{"content":' + bytes(text) + b"}")} | own

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """That of the whole answer."""
        prompt, sampled = self.prompt.count(b",") + 1, self._moved + int(usage.get("completion_tokens") or 0)
        own = usage | {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        if isinstance(details := usage.get("prompt_tokens_details"), dict) and details.get("cached_tokens"):
            own["prompt_tokens_details"] = details | {"cached_tokens": min(prompt, int(details["cached_tokens"]))}
        return own


class Generated:
    """What /generate says, event by event: all of the answer so far, or what is new, by a setting of the server.

    The client goes on getting what the first server gave: `repeats`, unknown until that has sent two events.
    """

    def __init__(self) -> None:
        self.repeats: bool | None = None
        self.text = ""  # of the whole answer, unless each event has only what is new
        self._count = self._length = 0  # tokens and characters of this server's

    def goes_on(self) -> None:
        self._count = self._length = 0

    def new(self, fields: Fields, meta: Fields) -> tuple[list[int], str]:
        """The tokens and the text of an event that are not in those before. Raises ValueError."""
        ids, text = parse(fields["output_ids"], list[int]), parse(fields["text"], str)
        count = parse(meta["completion_tokens"], int)
        new, has_all = count - self._count, len(ids) == count
        if len(ids) not in (count, new):
            raise ValueError("other tokens than were counted")
        if self._count and self.repeats is None:
            self.repeats = has_all
        text = text[self._length :] if has_all else text
        self._count, self._length = count, self._length + len(text)
        if self.repeats is not False:
            self.text += text
        return ids[len(ids) - new :], text


def _raw(fields: Body) -> Fields:
    return {name: msgspec.Raw(encode(value)) for name, value in fields.items()}


def _named(fields: Body, names: Collection[str]) -> Body:
    return {name: value for name, value in fields.items() if name in names and value is not None}


def _ids(raw: msgspec.Raw) -> bytes:
    """A list of token ids; empty if there is none."""
    ids = bytes(raw).strip()
    return b"" if ids in (b"null", b"[]") else ids


def _is_chinese(code: int) -> bool:
    """At least for all of which SGLang's `_is_chinese_char` says so."""
    return 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x2FA1F


def _without(fields: Fields, name: str) -> Fields:
    return {each: value for each, value in fields.items() if each != name}


def _stops(body: Body) -> list[str]:
    """Raises ValueError."""
    stop = body.get("stop")
    found = parse(stop, list[str] | str) if isinstance(stop, msgspec.Raw) else stop or []
    return [found] if isinstance(found, str) else found
