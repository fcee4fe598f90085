"""Where prefill and decode of one request meet: rendezvous ids that both sides derive for themselves. Pure.

vLLM turns the `X-Request-Id` that a proxy sends to both engines into `cmpl-<id>-<index>-<8 hex>` or
`chatcmpl-<id>-<8 hex>`, with different hex digits on each engine, and puts `<n>_` in front for the n-th of several
samples. The rendezvous id undoes that. It also holds a digest of all that decides the prompt's KV, which each engine
computes from its own request: whatever names a client or a proxy gives, two requests meet only if their KV is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvbridge_proto.common import MOST_PREFIXES, PREFIX_TOKENS

from ..engine.prompts import DIGEST_BYTES, PromptDigest, is_in, rendezvous, short

# A client may choose an id of a megabyte of digits: each run of digits is scanned once, and long runs are no numbers.
SAMPLE = re.compile(r"(?<!\d)\d+_(?=[a-z-]*cmpl-|generate-tokens-)")
RANDOM = re.compile(r"-[0-9a-fA-F]{8}\Z")
ID_PREFIX = re.compile(r"cmpl-|chatcmpl-|generate-tokens-")
INDEX = re.compile(r"-(\d{1,9})\Z")
CALL_RENDEZVOUS = re.compile(rf"(.*)/(\d{{1,9}})/([0-9a-f]{{{2 * DIGEST_BYTES}}})\Z", re.DOTALL)
PROMPT_RENDEZVOUS = re.compile(rf"prompt-([0-9a-f]{{{2 * DIGEST_BYTES}}})\Z")


@dataclass(frozen=True, slots=True)
class Named:
    """How the caller knows a request: its own name for the call, and which prompt of that call it is."""

    external: str
    index: int


@lru_cache(maxsize=4)  # a prompt's own is asked for several times in a row
def named(request_id: str) -> Named:
    """The caller's name, from the engine's own request id."""
    text = RANDOM.sub("", SAMPLE.sub("", request_id))
    prefix = ID_PREFIX.match(text)
    if prefix is None:
        return Named(short(text), 0)
    text = text[prefix.end() :]
    index = INDEX.search(text) if prefix.group() == "cmpl-" else None
    if index is None:
        return Named(short(text), 0)
    return Named(short(text[: index.start()]), int(index.group(1)))


def offered_rendezvous(request_id: str, digest: str) -> str:
    """The rendezvous id that the prefill side offers."""
    who = named(request_id)
    return f"{who.external}/{who.index}/{digest}"


def wanted_rendezvous(told: str, request_id: str, room: int, digest: str) -> str | None:
    """The rendezvous id that the decode side wants; None if it was told that another prompt was prefilled for it.

    `told` is what a proxy hands over (`remote_request_id`): the offered rendezvous id if the proxy waited for the
    prefill's answer, or the plain external id if it asks both engines at once; in a `room` ("" there: nothing is told)
    no id but that of the room. vLLM answers a call of several prompts with the rendezvous id of the first one only; the
    others know their own index. A rendezvous id without a name (`prompt_rendezvous`) has no index.
    """
    if room:
        agreed = rendezvous(room, digest)
        return agreed if told in ("", agreed) or named(request_id).index else None
    shared = PROMPT_RENDEZVOUS.match(told)
    if shared is not None and short(told) != named(request_id).external:
        is_first = named(request_id).index == 0
        return None if is_first and shared.group(1) != digest else prompt_rendezvous(digest)
    first, first_digest = _told(told, request_id)
    index = named(request_id).index or first.index
    if first_digest and index == first.index and first_digest != digest:
        return None
    return f"{first.external}/{index}/{digest}"


def is_offered(told: str, request_id: str, room: int) -> bool:
    """Whether this is the rendezvous id of an offer. The prefill side answers with it: its call has ended by then.

    So whatever that call offers was offered before, under this id and under those of the call's other prompts.
    """
    if room:
        return is_in(told, room)
    is_shared = PROMPT_RENDEZVOUS.match(told) is not None and short(told) != named(request_id).external
    return is_shared or bool(_told(told, request_id)[1])


def is_for(told: str, request_id: str, room: int) -> bool:
    """Whether the told rendezvous id is this request's own, by name and index. If so no sibling needs it: decline it.

    Two engines that were sent no common id make up one each. Then nothing says for whom the rendezvous id is.
    """
    if room:
        return is_in(told, room)
    ours, (first, first_digest) = named(request_id), _told(told, request_id)
    return bool(first_digest) and ours.external == first.external and ours.index in (0, first.index)


def is_rendezvous(told: str) -> bool:
    """Whether this names a single offer. A call's id, or a prompt's rendezvous id, may cover other requests' offers."""
    return CALL_RENDEZVOUS.match(told) is not None


def prompt_rendezvous(digest: str) -> str:
    """The rendezvous id of a request that nobody named for both sides. Equal prompts share it: any of them will do."""
    return f"prompt-{digest}"


def message_name(request_id: str) -> str:
    """A request's name in messages and logs: bounded and never empty, whatever id a client chose."""
    return short(request_id) or "nameless"


def why_not_carried(request: Any, has_media_hashes: bool = True) -> str:
    """Why this prompt is neither offered nor wanted: nothing here identifies its KV. "" if it may travel."""
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return "prompt embeddings do not travel"
    if getattr(request, "resumable", False):
        return "a prompt that goes on to grow does not travel"
    if request.mm_features and not has_media_hashes:
        return "media without hashes do not travel"
    return ""


def has_media_hashes(config: Any) -> bool:
    """Whether vLLM identifies images, audio and video by their content.

    With neither of its two caches (0.26 to 0.33) it numbers them instead, from one on in each process. Then two
    engines, or one engine before and after a restart, give the same identifier to different images.
    """
    media = config.model_config.multimodal_config
    return media is None or media.mm_processor_cache_gb != 0 or bool(config.cache_config.enable_prefix_caching)


def prompt_digest(request: Any) -> str:
    """Digest of all that decides the KV of a prompt that may travel.

    That is what vLLM's prefix cache hashes (`generate_block_hash_extra_keys`), and a little more.
    """
    digest = PromptDigest(request.prompt_token_ids)
    for feature in request.mm_features or ():
        where = feature.mm_position
        digest.add("media", feature.modality, feature.identifier, where.offset, where.length)
    _add_variant(digest, request)
    return digest.text()


def prefixes(request: Any, end: int) -> tuple[bytes, ...]:
    """Digests of what this request and others may have in common, up to token `end`; none if nothing identifies that.

    Images and the like are left out: tokens of one may see each other, so a prefix that ends there has other KV.
    """
    if request.mm_features or why_not_carried(request):
        return ()
    digest = PromptDigest(())
    _add_variant(digest, request)
    return digest.prefixes(request.all_token_ids[:end], PREFIX_TOKENS, MOST_PREFIXES)


def _add_variant(digest: PromptDigest, request: Any) -> None:
    """Add what makes the KV of equal tokens differ."""
    if request.lora_request is not None:
        digest.add_adapter(request.lora_request.lora_name, request.lora_request.lora_path)
    if request.cache_salt:
        digest.add("salt", request.cache_salt)


def _told(told: str, request_id: str) -> tuple[Named, str]:
    """Whom a rendezvous id names, and its digest. That is "" for a call's plain id, which may look like one too."""
    found = CALL_RENDEZVOUS.match(told)
    if found is None or short(told) == named(request_id).external:
        return Named(short(told), 0), ""
    return Named(short(found.group(1)), int(found.group(2))), found.group(3)
