"""What of an SGLang request decides the KV of its prompt, and whether that may travel. Pure."""

from __future__ import annotations

from array import array
from typing import Any

from ..engine.prompts import PromptDigest


def stays_here(req: Any) -> str:
    """Why this prompt does not travel: nothing tells its KV from another's. "" if something does."""
    for name in ("input_embeds", "positional_embed_overrides"):
        if getattr(req, name, None) is not None:
            return f"{name}: prompt embeddings do not travel"
    return ""


def prompt_digest(req: Any, lora: tuple[str, str]) -> str:
    """Of all that decides the KV of a request's prompt: what SGLang's prefix cache goes by, and a little more.

    Media are in the token ids already (SGLang fills their places with numbers made of their hashes), and here again
    with their whole hashes. `lora` is the adapter's name and path.
    """
    digest = PromptDigest(prompt_tokens(req))
    for item in getattr(getattr(req, "multimodal_inputs", None), "mm_items", None) or ():
        digest.add("media", str(item.modality), str(item.hash), str(item.offsets))
    if req.lora_id:
        digest.add_adapter(*lora)
    if extra := (req.extra_key or "").removesuffix(req.lora_id or ""):
        digest.add("extra", extra)
    if req.cache_salt:
        digest.add("salt", req.cache_salt)
    if (types := getattr(req, "token_type_ids", None)) is not None:
        digest.add("types", array("q", map(int, types)).tobytes())
    return digest.text()


def prompt_tokens(req: Any) -> list[int]:
    """Whose KV travels: the prompt, and after a retraction what had been said before it (`_pre_alloc_fill_len`)."""
    tokens = list(req.origin_input_ids)
    if getattr(req, "pd_rebootstrap_in_progress", False):
        tokens += list(req.output_ids)
    return tokens
