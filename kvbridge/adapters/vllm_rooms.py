"""Where prefill and decode of one request meet: names that both sides derive for themselves. Pure.

vLLM (0.32) turns the `X-Request-Id` that a proxy sends to both engines into `cmpl-<id>-<index>-<8 hex>` or
`chatcmpl-<id>-<8 hex>`, with other hex digits on each engine, and puts `<n>_` in front for the n-th of several samples.
The room undoes that. It also holds a digest of the prompt's tokens: a name that a client used twice, or a prompt
that the two engines cut into other tokens, must never meet another request's KV.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

MOST_CHARACTERS = 200
# A client may choose an id of a megabyte of digits: each run of them is looked at once, and only few make a number.
SAMPLE = re.compile(r"(?<!\d)\d+_(?=[a-z-]*cmpl-|generate-tokens-)")
RANDOM = re.compile(r"-[0-9a-fA-F]{8}\Z")
PREFIX = re.compile(r"cmpl-|chatcmpl-|generate-tokens-")
INDEX = re.compile(r"-(\d{1,9})\Z")
ROOM = re.compile(r"(.*)/(\d{1,9})/([0-9a-f]{16})\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Named:
    """How the caller knows a request: its own name for it, and which prompt of that call it is."""

    external: str
    index: int


def named(request_id: str) -> Named:
    """What was asked for, from the engine's own request id."""
    text = RANDOM.sub("", SAMPLE.sub("", request_id))
    prefix = PREFIX.match(text)
    if prefix is None:
        return Named(_short(text), 0)
    text = text[prefix.end() :]
    index = INDEX.search(text) if prefix.group() == "cmpl-" else None
    if index is None:
        return Named(_short(text), 0)
    return Named(_short(text[: index.start()]), int(index.group(1)))


def offered_room(request_id: str, prompt: Sequence[int]) -> str:
    """The room the prefill side offers."""
    who = named(request_id)
    return f"{who.external}/{who.index}/{digest_of(prompt)}"


def wanted_room(remote_request_id: str, request_id: str, prompt: Sequence[int]) -> str | None:
    """The room the decode side asks for; None if the other side says that its prompt was another one.

    `remote_request_id` is what a proxy hands over: the offered room (it waited for the prefill's answer) or the plain
    external id (it asks both engines at once). Of a call with several prompts a proxy hands over only the first
    one's; then our own index tells which is meant.
    """
    ours, digest = named(request_id), digest_of(prompt)
    room = ROOM.match(remote_request_id)
    theirs = Named(room.group(1), int(room.group(2))) if room else Named(_short(remote_request_id), 0)
    if ours.external in (theirs.external, _short(remote_request_id)):
        theirs = ours
    elif room and room.group(3) != digest:
        return None
    return f"{theirs.external}/{theirs.index}/{digest}"


def prompt_room(request: Any) -> str | None:
    """The room of a request nobody named for both sides: its prompt. Equal prompts share it, any of them will do.

    None if the tokens alone do not determine the KV (a prompt given as embeddings).
    """
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        return None
    hasher = blake2b(_bytes_of(request.prompt_token_ids), digest_size=16)
    for feature in request.mm_features or ():
        hasher.update(f"{feature.identifier}@{feature.mm_position.offset}".encode())
    if request.lora_request is not None:
        hasher.update(f"lora {request.lora_request.lora_name}".encode())
    return f"prompt-{hasher.hexdigest()}"


def message_name(request_id: str, attempt: int = 0) -> str:
    """How messages call a request: bounded, though clients may choose ids of any length; new after a preemption."""
    return f"{_short(request_id)}~{attempt}" if attempt else _short(request_id)


def digest_of(prompt: Sequence[int]) -> str:
    """16 hex digits for a prompt's tokens."""
    return blake2b(_bytes_of(prompt), digest_size=8).hexdigest()


def _bytes_of(prompt: Sequence[int]) -> bytes:
    return array("q", prompt).tobytes()


def _short(text: str) -> str:
    if len(text) <= MOST_CHARACTERS and text.isascii():
        return text
    return "long-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
