"""The digest of all that decides the KV of an SGLang request's prompt, and whether that KV may be carried. Pure."""

from __future__ import annotations

from array import array
from typing import Any

from kvbridge_proto.common import MOST_PREFIXES, PREFIX_TOKENS

from ..engine.prompts import PromptDigest


def why_not_carried(req: Any) -> str:
    """Why this prompt is not carried: nothing tells its KV from another prompt's. "" if it is carried."""
    for name in ("input_embeds", "positional_embed_overrides"):
        if getattr(req, name, None) is not None:
            return f"{name}: prompt embeddings do not travel"
    return ""


def prompt_digest(req: Any, lora: tuple[str, str]) -> str:
    """The digest of all that decides the prompt's KV: what SGLang's prefix cache uses as key, and a little more.

    The token ids already stand for media, because SGLang fills their places with numbers made from their hashes. The
    whole hashes are added here. `lora` is the adapter's name and path.
    """
    digest = PromptDigest(prompt_tokens(req))
    for item in getattr(getattr(req, "multimodal_inputs", None), "mm_items", None) or ():
        digest.add("media", str(item.modality), str(item.hash), str(item.offsets))
    _add_variant(digest, req, lora)
    if (types := getattr(req, "token_type_ids", None)) is not None:
        digest.add("types", array("q", map(int, types)).tobytes())
    return digest.text()


def prefixes(req: Any, lora: tuple[str, str], end: int) -> tuple[bytes, ...]:
    """Digests of what this request and others may have in common, up to token `end`; none if nothing identifies that.

    The same bytes as vLLM's. Media are left out: tokens of one may see each other, so a prefix that ends there has
    other KV.
    """
    media = getattr(getattr(req, "multimodal_inputs", None), "mm_items", None)
    if media or getattr(req, "token_type_ids", None) is not None or why_not_carried(req):
        return ()
    digest = PromptDigest(())
    _add_variant(digest, req, lora)
    return digest.prefixes([*req.origin_input_ids, *req.output_ids][:end], PREFIX_TOKENS, MOST_PREFIXES)


def _add_variant(digest: PromptDigest, req: Any, lora: tuple[str, str]) -> None:
    """Add what makes the KV of equal tokens differ."""
    if req.lora_id:
        digest.add_adapter(*lora)
    if extra := (req.extra_key or "").removesuffix(req.lora_id or ""):
        digest.add("extra", extra)
    if req.cache_salt:
        digest.add("salt", req.cache_salt)


def prompt_tokens(req: Any) -> list[int]:
    """The tokens whose KV is carried: the prompt, and after a retraction the output so far (`_pre_alloc_fill_len`)."""
    tokens = list(req.origin_input_ids)
    if getattr(req, "pd_rebootstrap_in_progress", False):
        tokens += list(req.output_ids)
    return tokens
