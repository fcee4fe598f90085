"""The name under which both engines' requests for one prompt meet: SGLang's room, and a digest of all that decides KV.

A room alone is a number that a client may choose. The digest is made by each engine of its own request: whatever room
a client or a router gives, two requests meet only where their KV is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 20  # 160 bits: a client can try out prompts for two of one digest, so half of them must be out of reach


def rendezvous(room: int, digest: str) -> str:
    """The rendezvous id of an offer and a want."""
    return f"sglang/{room}/{digest}"


def stays_here(req: Any) -> str:
    """Why this prompt does not travel: nothing tells its KV from another's. "" if something does."""
    for name in ("input_embeds", "positional_embed_overrides"):
        if getattr(req, name, None) is not None:
            return f"{name}: prompt embeddings do not travel"
    return ""


def prompt_digest(req: Any, lora: Iterable[str]) -> str:
    """Of all that decides the KV of a request's prompt: what SGLang's prefix cache goes by, and a little more.

    Media are in the token ids already (SGLang fills their places with numbers made of their hashes), and here again
    with their whole hashes. `lora` says which adapter: its numbers differ between engines. Each field says what it is
    and how long it is: no two requests are written alike.
    """
    hasher = blake2b(digest_size=DIGEST_BYTES)

    def add(*words: str | int | bytes) -> None:
        for word in words:
            written = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            hasher.update(len(written).to_bytes(8, "little"))
            hasher.update(written)

    add("tokens", array("q", prompt_tokens(req)).tobytes())
    for item in getattr(getattr(req, "multimodal_inputs", None), "mm_items", None) or ():
        add("media", str(item.modality), str(item.hash), str(item.offsets))
    if req.lora_id:
        add("lora", *lora)
    if extra := (req.extra_key or "").removesuffix(req.lora_id or ""):
        add("extra", extra)
    if req.cache_salt:
        add("salt", req.cache_salt)
    if (types := getattr(req, "token_type_ids", None)) is not None:
        add("types", array("q", map(int, types)).tobytes())
    return hasher.hexdigest()


def prompt_tokens(req: Any) -> list[int]:
    """Whose KV travels: the prompt, and after a retraction what had been said before it (`_pre_alloc_fill_len`)."""
    tokens = list(req.origin_input_ids)
    if getattr(req, "pd_rebootstrap_in_progress", False):
        tokens += list(req.output_ids)
    return tokens
