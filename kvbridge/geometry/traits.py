"""What schedulers need to know about an engine's pool to choose pairs before anything is sent. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
from kvbridge_proto.pool import MOST_COUNT, Layer, Pool
from kvbridge_proto.status import PromptSize, Traits

from ..cache_kinds import comes_last
from .compat import ATTENTION_KINDS, form_of
from .wire import is_scale

KEY_DIGITS = 16
MOST_VALUE = 63  # characters in the value of a Kubernetes label


def model_key(pool: Pool) -> str:
    """A short hash of what no conversion changes: the model, and the shapes of the layers that this rank knows.

    Pools whose rows can move between them have the same key, if every rank holds layers of each kind. Pairs with the
    same key may still differ in something that cannot be converted, such as windows: `kvbridge plan` decides.
    """
    layers = sorted({_shape(layer) for layer in pool.model.layers if layer is not None})
    encoded = msgspec.json.encode([pool.model.name, pool.model.depth, layers])
    return hashlib.sha256(encoded).hexdigest()[:KEY_DIGITS]


def _shape(layer: Layer) -> tuple[str, int, int, int, int]:
    """The fields that must be equal in two layers. A window need not be: an engine may keep all tokens."""
    kind = "attention" if layer.kind in ATTENTION_KINDS else layer.kind
    return kind, layer.kv_heads, layer.key_width, layer.value_width, layer.rope_width


def traits(pool: Pool) -> Traits:
    """What may differ between two engines and is then converted. Each value can be a Kubernetes label's."""
    shard = pool.shard
    rows = [plane for plane in pool.planes if not is_scale(plane.part)]
    return Traits(
        engine=pool.engine.kind,
        tp_size=shard.tp_size,
        pp_size=shard.pp_size,
        cp_size=shard.cp_size,
        block_tokens=_each(str(group.block_tokens) for group in pool.groups),
        dtype=_each(form_of(plane).replace(" ", "-") for plane in rows),
    )


def prompt_size(pool: Pool) -> PromptSize:
    """What a prompt takes of the memory of this rank, which holds a share of its tokens if it is context parallel."""
    share, bytes_of = 1 / pool.shard.cp_size, [0.0] * len(pool.groups)
    for plane in pool.planes:
        bytes_of[plane.group] += plane.heads * plane.codec.row_bytes / plane.row_tokens
    each = list(zip(pool.groups, bytes_of, strict=True))
    return PromptSize(
        token_bytes=sum(size * share for group, size in each if not comes_last(group.kind)),
        prompt_bytes=sum(size * (group.window or 1) for group, size in each if comes_last(group.kind)),
        tokens=min(MOST_COUNT, _room(pool)),
    )


def _room(pool: Pool) -> int:
    """How many tokens there is room for. Groups of the same memory, as vLLM has them, share its blocks."""
    places = [{(each.region, each.offset) for each in pool.planes if each.group == i} for i in range(len(pool.groups))]
    full = [(group, at) for group, at in zip(pool.groups, places, strict=True) if group.kind == "full"]
    rooms = (
        group.blocks // sum(not at.isdisjoint(other) for _, other in full) * group.block_tokens for group, at in full
    )
    return min(rooms, default=0) * pool.shard.cp_size


def _each(values: Iterable[str]) -> str:
    """The distinct values, cut to the length of a label's value."""
    return "_".join(dict.fromkeys(values))[:MOST_VALUE]
