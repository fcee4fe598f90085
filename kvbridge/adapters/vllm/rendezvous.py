"""Where prefill and decode of one request meet: names that both sides derive for themselves. Pure.

vLLM (0.32) turns the `X-Request-Id` that a proxy sends to both engines into `cmpl-<id>-<index>-<8 hex>` or
`chatcmpl-<id>-<8 hex>`, with other hex digits on each engine, and puts `<n>_` in front for the n-th of several samples.
The room undoes that. It also holds a digest of all that decides the prompt's KV, made by each engine of its own
request: whatever names a client or a proxy gives, two requests meet only where their KV is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..engine.prompts import DIGEST_BYTES, PromptDigest

MOST_CHARACTERS = 200
# A client may choose an id of a megabyte of digits: each run of them is looked at once, and only few make a number.
SAMPLE = re.compile(r"(?<!\d)\d+_(?=[a-z-]*cmpl-|generate-tokens-)")
RANDOM = re.compile(r"-[0-9a-fA-F]{8}\Z")
PREFIX = re.compile(r"cmpl-|chatcmpl-|generate-tokens-")
INDEX = re.compile(r"-(\d{1,9})\Z")
ROOM = re.compile(rf"(.*)/(\d{{1,9}})/([0-9a-f]{{{2 * DIGEST_BYTES}}})\Z", re.DOTALL)
PROMPT_RENDEZVOUS = re.compile(rf"prompt-([0-9a-f]{{{2 * DIGEST_BYTES}}})\Z")


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


def offered_rendezvous(request_id: str, digest: str) -> str:
    """The room the prefill side offers."""
    who = named(request_id)
    return f"{who.external}/{who.index}/{digest}"


def wanted_rendezvous(told: str, request_id: str, digest: str) -> str | None:
    """The room the decode side asks for; None if it was told that another prompt was prefilled for this one.

    `told` is what a proxy hands over (`remote_request_id`): the offered room (it waited for the prefill's answer) or
    the plain external id (it asks both engines at once). vLLM answers a call of several prompts with the room of the
    first one alone; the others know their own places in it. A room of nobody's name (`prompt_rendezvous`) has no
    places.
    """
    shared = PROMPT_RENDEZVOUS.match(told)
    if shared is not None and _short(told) != named(request_id).external:
        is_first = named(request_id).index == 0
        return None if is_first and shared.group(1) != digest else prompt_rendezvous(digest)
    first, first_digest = _told(told, request_id)
    index = named(request_id).index or first.index
    if first_digest and index == first.index and first_digest != digest:
        return None
    return f"{first.external}/{index}/{digest}"


def is_for(told: str, request_id: str) -> bool:
    """Whether the told room is this request's own, by name and place; so it may be declined, and no sibling misses it.

    Two engines that were sent no common id make up one each. Then nothing says for whom the room is.
    """
    ours, (first, first_digest) = named(request_id), _told(told, request_id)
    return bool(first_digest) and ours.external == first.external and ours.index in (0, first.index)


def is_rendezvous(told: str) -> bool:
    """Whether this names one offer: not just a call, nor a prompt, whose other offers are for others."""
    return ROOM.match(told) is not None


def prompt_rendezvous(digest: str) -> str:
    """The room of a request nobody named for both sides. Equal prompts share it, any of them will do."""
    return f"prompt-{digest}"


def message_name(request_id: str, attempt: int = 0) -> str:
    """How messages call a request: bounded, though a client's id may be of any length or empty; new when preempted."""
    name = _short(request_id) or "nameless"
    return f"{name}~{attempt}" if attempt else name


def stays_here(request: Any, has_media_hashes: bool = True) -> str:
    """Why this prompt is neither offered nor wanted: nothing tells its KV from another's. "" if something does."""
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return "prompt embeddings do not travel"
    if getattr(request, "resumable", False):
        return "a prompt that goes on to grow does not travel"
    if request.mm_features and not has_media_hashes:
        return "media without hashes do not travel"
    return ""


def has_media_hashes(config: Any) -> bool:
    """Whether vLLM calls images, audio and video by what is in them.

    With neither of its two caches (0.26 to 0.32) it counts them instead, in each process from one on: two engines, or
    one before and after a restart, then give one identifier to two images.
    """
    media = config.model_config.multimodal_config
    return media is None or media.mm_processor_cache_gb != 0 or bool(config.cache_config.enable_prefix_caching)


def prompt_digest(request: Any) -> str:
    """Of all that decides the KV of a prompt that may travel: what vLLM's prefix cache goes by, and a little more.

    (`generate_block_hash_extra_keys`.)
    """
    digest = PromptDigest(request.prompt_token_ids)
    for feature in request.mm_features or ():
        where = feature.mm_position
        digest.add("media", feature.modality, feature.identifier, where.offset, where.length)
    if request.lora_request is not None:
        digest.add_adapter(request.lora_request.lora_name, request.lora_request.lora_path)
    if request.cache_salt:
        digest.add("salt", request.cache_salt)
    return digest.text()


def _told(told: str, request_id: str) -> tuple[Named, str]:
    """Whose room this is, and its digest; "" where a proxy told the call's plain id, which may look like a room too."""
    room = ROOM.match(told)
    if room is None or _short(told) == named(request_id).external:
        return Named(_short(told), 0), ""
    return Named(_short(room.group(1)), int(room.group(2))), room.group(3)


def _short(text: str) -> str:
    if len(text) <= MOST_CHARACTERS and text.isascii():
        return text
    return "long-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
