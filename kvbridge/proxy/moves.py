"""A streamed answer that goes on at another engine: whether it can, where it may be cut, what is asked there. Pure.

Engines tell the tokens of each event (`return_token_ids`), but not which of them have their text in it: vLLM holds back
the text of an incomplete character, and with `stop` the last characters; SGLang the whole event where a stop string may
have begun, and of what ends within a character it gives the text up to the last space, or to a Chinese character. An
answer is cut only where the text that the client has ends with a token. Tokens after that are dropped, and computed
again.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import msgspec

from ..errors import EngineError
from .bodies import CHAT, COMPLETIONS, Body, PromptAsk, encode, is_set, parse
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
USUAL_TOKENS = 16  # of a completion that names no max_tokens
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
    if ask.path not in (COMPLETIONS, CHAT):
        return ask.path
    for name, value in ask.body.items():
        if name in NEUTRAL:
            is_same = value is None or (not isinstance(value, msgspec.Raw) and value == NEUTRAL[name])
        else:
            is_same = name in GOES_ALONG or name in USED_UP or not is_set(value)
        if not is_same:
            return name
    return "media" if ask.path == CHAT and _has_media(ask.body["messages"]) else ""


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
        self._stops = _stops(ask.body)
        self._longest = max(map(len, self._stops), default=1) - 1  # that may have begun, in characters
        self._last = ""  # so many, which the client has
        self._moved = 0  # tokens of the engines before
        self._is_over = self._is_moved = False
        self._shape: Fields = {}  # of an event of the first engine
        self._wants_tokens = ask.body.get("return_token_ids") is True

    def first(self) -> PromptAsk:
        """What the first engine is asked."""
        return replace(self._ask, wants_ids=True)

    def begun_at(self, kind: Kind) -> None:
        """A decode engine of this kind answers: others of its kind may go on."""
        self._kind = kind
        if self.stays or kind is not Kind.SGLANG:
            return
        if self._ask.body.get("repetition_penalty") not in (None, 1):
            self.stays = "repetition_penalty"  # it counts no token of the prompt, so none of the answer before
        elif self._ask.path == CHAT:
            self.stays = CHAT

    @property
    def can_be_cut(self) -> bool:
        count = self._cut()
        left = self._left(count)
        return not (self.stays or self._is_over) and count > 0 and (left is None or left > 0)

    def rest(self, is_kept: bool = True) -> PromptAsk:
        """What another engine is asked, to go on from here. `is_kept`: the engine before keeps the KV."""
        count = self._cut()
        assert count
        prompt = self.prompt[:-1] + b"," + ",".join(map(str, self._tokens[:count])).encode() + b"]"
        body = {name: value for name, value in self._ask.body.items() if name in GOES_ALONG and value is not None}
        left = self._left(count)
        body |= {"prompt": msgspec.Raw(prompt), "max_tokens": left, "stream": True}
        if type(least := self._ask.body.get("min_tokens")) is int and least > count:
            body["min_tokens"] = least - count
        limited = {"is_kept": is_kept, "has_limit": left is not None}
        return PromptAsk(COMPLETIONS, body, wants_ids=True, answered=count, kind=self._kind, **limited)

    def goes_on(self, rest: PromptAsk) -> None:
        """All events from now on are an answer to `rest`."""
        del self._tokens[rest.answered :]
        self._ends.clear()
        self._moved, self._is_moved = rest.answered, True

    def _cut(self) -> int:
        """How many tokens the client has the text of. 0 if that ends within one, or nobody knows.

        Or if it ends with the beginning of a stop string: of a prompt that ends so, the next engine would not see it.
        """
        if any(self._last.endswith(stop[:most]) for stop in self._stops for most in range(1, len(stop))):
            return 0
        count = next((tokens for tokens, end in self._ends if end == self._given), 0)
        return 0 if self._wants_tokens and count < len(self._tokens) else count  # the client has the ids of the others

    def _left(self, count: int) -> int | None:
        """How many more tokens there may be; None: as many as the engine takes."""
        body = self._ask.body
        most = body.get("max_tokens")
        if self._ask.path == CHAT:
            most = most if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
        elif "max_tokens" not in body:
            most = USUAL_TOKENS
        return most - count if type(most) is int else None

    def event(self, event: StreamEvent) -> StreamEvent:
        """The client's event. Raises EngineError."""
        if event.data == DONE:
            return event
        try:
            read, fields = parse(event.data, _Chunk), parse(event.data, Fields)
            own = self._own(read, fields)
        except (ValueError, TypeError, KeyError):
            if self._is_moved:
                raise EngineError("bad_answer", "an event that cannot be read") from None
            self.stays = "unread"
            return event
        return StreamEvent(encode(own), event.name)

    def _own(self, read: _Chunk, fields: Fields) -> Fields:
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
        self._note(read, choice)
        return own | {"choices": msgspec.Raw(b"[" + encode(self._choice(choice)) + b"]")}

    def _note(self, read: _Chunk, choice: Fields) -> None:
        """Note the tokens and the text of an event."""
        if not self.prompt:
            self.prompt = bytes(choice.get("prompt_token_ids", NULL)).strip()
            self.prompt = bytes(read.prompt_token_ids).strip() if self.prompt == b"null" else self.prompt
            self.prompt = b"" if self.prompt in (b"null", b"[]") else self.prompt
        delta = parse(choice.get("delta", b"{}"), Fields)
        if any(is_set(parse(delta[name])) for name in PARSED if name in delta):
            self.stays = self.stays or "parsed"
        text = parse(delta.get("content", b"null") if "delta" in choice else choice["text"], str | None) or ""
        tokens = parse(choice.get("token_ids", b"null"), list[int] | None) or []
        self._is_over = self._is_over or parse(choice.get("finish_reason", b"null")) is not None
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
        if not self._is_moved:
            hidden = () if self._wants_tokens else ("token_ids", "prompt_token_ids")
            return own | {name: NULL for name in hidden if name in own}
        own = _without(own, "prompt_token_ids")
        own = own if self._wants_tokens else _without(own, "token_ids")
        if self._ask.path != CHAT:
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


def _is_chinese(code: int) -> bool:
    """At least for all of which SGLang's `_is_chinese_char` says so."""
    return 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x2FA1F


def _without(fields: Fields, name: str) -> Fields:
    return {each: value for each, value in fields.items() if each != name}


def _stops(body: Body) -> list[str]:
    stop = body.get("stop")
    if isinstance(stop, str):
        return [stop]
    return parse(stop, list[str]) if isinstance(stop, msgspec.Raw) else []
