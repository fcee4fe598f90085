"""Has SGLang's HTTP server say the token ids of a stream to a router that moves running answers to other servers.

SGLang says none of a streamed chat, and a prompt's in every event of /generate. The router asks for them with ASKED in
`custom_params`, and takes them to mean that a server which gets prompt and answer as token ids goes on just as this one
would. So none are said if a parser or a template's own stop strings make something else of the text, or if a grammar
of the server's own, or a penalty by its default, which would not count what was in the prompt, chooses the tokens. Of
completions, which SGLang says itself, the prompt's are left out then: the router moves no answer without them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

ASKED = "kvbridge_says_tokens"
SERVER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
EVENT = "data: {"
NEUTRAL = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")  # which would begin anew


def hooks() -> dict[str, Callable[..., Any]]:
    return {f"{SERVER}.generate_request": _generate_request, f"{CHAT}._generate_chat_stream": _generate_chat_stream}


@dataclass(slots=True)
class StreamTokens:
    """Token ids of a chat that are to be said with its next text."""

    unsaid: list[int] = field(default_factory=list)
    count: int = 0  # of the answer so far
    prompt: list[int] | None = None

    def sampled(self, output: dict[str, Any]) -> None:
        """Of all tokens, or of those since the output before: a setting of the server.

        Those of the last output are not said: a stop string is cut off its text, and the event does not say the end.
        """
        meta, ids = output["meta_info"], output.get("output_ids") or []
        count = meta.get("completion_tokens", 0)
        new = max(0, min(count - self.count, len(ids)))
        self.unsaid += ids[len(ids) - new :]
        self.count, self.prompt = count, output.get("prompt_token_ids", self.prompt)
        if meta.get("finish_reason") is not None:
            self.unsaid.clear()

    def said(self, chunk: str) -> str:
        """An event with the ids, if it has text."""
        if not (self.unsaid and chunk.startswith(EVENT)):
            return chunk
        event = msgspec.json.decode(chunk[len(EVENT) - 1 :])
        choices = event.get("choices") or [{}]
        if not choices[0].get("delta", {}).get("content"):
            return chunk
        choices[0] |= {"token_ids": self.unsaid, "prompt_token_ids": self.prompt}
        self.unsaid, self.prompt = [], None
        return f"data: {msgspec.json.encode(event).decode()}\n\n"


def _generate_request(original: Callable[..., Any], manager: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(manager, call, *args, **kwargs)
    if not _is_asked(call):
        return outputs
    call.return_prompt_token_ids = _goes_on_alike(manager, call)
    return _with_one_prompt(outputs, getattr(call, "kvbridge_tokens", None))


def _generate_chat_stream(
    original: Callable[..., Any], serving: Any, call: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    chunks = original(serving, call, request, *args, **kwargs)
    if not (_is_asked(call) and _goes_on_alike(serving.tokenizer_manager, call) and _is_plain(serving, request)):
        return chunks
    call.kvbridge_tokens = StreamTokens()
    return _with_tokens(chunks, call.kvbridge_tokens)


def _is_asked(call: Any) -> bool:
    """Whether a router asks for the tokens of this stream."""
    params = getattr(call, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) and getattr(call, "stream", False) else None
    return isinstance(custom, dict) and custom.get(ASKED) is True


def _goes_on_alike(manager: Any, call: Any) -> bool:
    """Whether sampling is such that another server may go on. Completions give most parameters themselves."""
    params = call.sampling_params
    if any(params.get(name) is None for name in manager.preferred_sampling_params or ()):
        return False  # the server's own counts
    if any(params.get(name) for name in GRAMMARS):
        return False
    return all(params.get(name) in (None, value) for name, value in NEUTRAL.items())


def _is_plain(serving: Any, request: Any) -> bool:
    """Whether the chat's text is that of its tokens."""
    return not (
        (serving.reasoning_parser and request.separate_reasoning)
        or serving._tool_call_parsing_active(request)
        or serving._requires_response_template_detokenization(request)
        or serving._encoding_output() is not None
        or serving.template_manager.chat_template_name is not None  # has stop strings
    )


async def _with_one_prompt(outputs: Any, tokens: StreamTokens | None) -> AsyncGenerator[Any, None]:
    """The prompt is in the first output only."""
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if not is_first:
                output.pop("prompt_token_ids", None)
            is_first = False
            if tokens is not None:
                tokens.sampled(output)
            yield output


async def _with_tokens(chunks: Any, tokens: StreamTokens) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield tokens.said(chunk)
