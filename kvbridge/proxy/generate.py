"""Translates SGLang's /generate for a vLLM engine: the request to /v1/completions, and the answer back. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import EngineError
from .bodies import Body, ClientError, PromptAsk, is_set, parse

# Names in sampling_params -> names in /v1/completions. `_params` handles those whose meaning differs.
SAME = {
    **{name: name for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")},
    **{name: name for name in ("repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logit_bias")},
    **{name: name for name in ("skip_special_tokens", "spaces_between_special_tokens", "stream_interval")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
GRAMMARS = {"regex": "regex", "json_schema": "json", "ebnf": "grammar"}
# SGLang's defaults: vLLM would take missing values from the model's folder.
DEFAULTS = {"max_tokens": 128, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
KNOWN = ("text", "input_ids", "sampling_params", "stream", "rid", "log_metrics", "no_logs", "lora_path", "cache_salt")
LOGPROBS = ("return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs")


def completions(ask: PromptAsk, with_logprobs: bool = False) -> Body:
    """The body for /v1/completions. Raises ClientError naming the fields that vLLM does not have.

    `with_logprobs` is for a prefill leg, which needs the first token's log probabilities. Those of prompt tokens are
    refused there too.
    """
    body = ask.body
    unknown = [name for name, value in body.items() if name not in (*KNOWN, *LOGPROBS, "priority") and is_set(value)]
    if body.get("return_logprob"):
        unknown += [] if with_logprobs else ["return_logprob"]
        unknown += [] if body.get("logprob_start_len") in (None, -1) else ["logprob_start_len"]
    own, unknown_params = _params(body["sampling_params"], with_logprobs)
    unknown += [f"sampling_params.{name}" for name in unknown_params]
    if unknown:
        raise ClientError("not_supported", f"/generate through a vLLM engine does not support: {', '.join(unknown)}")
    own["prompt"] = body["text"] if body.get("text") is not None else body["input_ids"]
    own["return_token_ids"] = True
    own |= {"model": body["lora_path"]} if body.get("lora_path") else {}
    own |= {name: body[name] for name in ("cache_salt", "priority") if body.get(name) is not None}
    if body.get("return_logprob"):
        own["logprobs"] = body.get("top_logprobs_num") or 0
    if ask.is_stream:
        own["stream"] = True
    return own


def _params(params: Body, with_custom: bool) -> tuple[Body, list[str]]:
    """The parameters under vLLM's names, and those that vLLM does not have."""
    own: Body = dict(DEFAULTS)
    unknown = []
    for name, value in params.items():
        if name == "n":
            continue  # always 1 here (`bodies.py`)
        if name == "max_new_tokens" and value is None:
            unknown.append("max_new_tokens: null")
        elif value is None:
            continue
        elif name in SAME:
            own[SAME[name]] = value
        elif name == "top_k":
            own["top_k"] = 0 if value == -1 else value
        elif name in GRAMMARS:
            own |= {"structured_outputs": {GRAMMARS[name]: value}} if value else {}
        elif is_set(value) and not (with_custom and name == "custom_params"):
            unknown.append(name)
    return own, unknown


@dataclass(slots=True)
class Answering:
    """Translates one answer of vLLM, whole or event by event. An event of SGLang repeats the answer so far."""

    rid: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    finish: Body | None = None

    def whole(self, answer: Body) -> Body:
        """The whole answer in SGLang's format. Raises EngineError."""
        self._add(answer)
        if self.finish is None:
            raise EngineError("bad_answer", "an answer without finish_reason")
        return self._answer()

    def event(self, answer: Body) -> Body | None:
        """The event in SGLang's format; None if it has no news. Raises EngineError."""
        if not answer.get("choices"):
            return None  # usage
        self._add(answer)
        return self._answer()

    def _add(self, answer: Body) -> None:
        try:
            choice = answer["choices"][0]
            tokens, text, prompt = choice.get("token_ids") or [], choice.get("text") or "", answer.get("usage") or {}
            self.tokens += tokens
            self.text += text
            self.prompt_tokens = len(choice.get("prompt_token_ids") or ()) or self.prompt_tokens
            self.prompt_tokens = self.prompt_tokens or int(prompt.get("prompt_tokens") or 0)
            reason = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise EngineError("bad_answer", "an answer without choices, text and token_ids") from None
        if not self.tokens and reason is not None:
            raise EngineError("bad_answer", "an answer without token_ids")
        if reason is not None:
            self.finish = self._finish(str(reason), choice.get("stop_reason"))

    def _finish(self, reason: str, matched: Any) -> Body:
        if reason == "length":
            return {"type": "length", "length": len(self.tokens)}
        return {"type": reason, "matched": self.tokens[-1] if matched is None else matched}

    def _answer(self) -> Body:
        return {
            "text": self.text,
            "output_ids": list(self.tokens),
            "meta_info": {
                "id": self.rid,
                "finish_reason": self.finish,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.tokens),
            },
        }


class _Meta(msgspec.Struct):
    finish_reason: Any = None


class _Event(msgspec.Struct):
    meta_info: _Meta


def is_finished(event: bytes) -> bool:
    """Whether an event of a /generate stream is the last one of its prompt."""
    try:
        return parse(event, _Event).meta_info.finish_reason is not None
    except ValueError:
        return False
