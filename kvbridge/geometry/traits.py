"""What schedulers need to know of an engine's pool, to choose pairs before anything is sent. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
from kvbridge_proto.pool import Layer, Pool
from kvbridge_proto.status import Traits

from .compat import ATTENTION, form_of
from .wire import is_scale

KEY_DIGITS = 16
MOST_VALUE = 63  # of a label in Kubernetes


def model_key(pool: Pool) -> str:
    """A short hash of what nothing converts: the model, and the shapes of the layers that this rank knows.

    Pools between which rows can be carried have the same key, where every rank holds layers of each kind. Of the same
    key some pairs still differ in what cannot be converted, such as windows: `kvbridge plan` has the last word.
    """
    layers = sorted({_shape(layer) for layer in pool.model.layers if layer is not None})
    said = msgspec.json.encode([pool.model.name, pool.model.depth, layers])
    return hashlib.sha256(said).hexdigest()[:KEY_DIGITS]


def _shape(layer: Layer) -> tuple[str, int, int, int, int]:
    """All fields that must be equal, of two layers; a window need not be (an engine may keep all tokens)."""
    kind = "attention" if layer.kind in ATTENTION else layer.kind
    return kind, layer.kv_heads, layer.key_width, layer.value_width, layer.rope_width


def traits(pool: Pool) -> Traits:
    """What may differ between two engines, and is converted then; all of it can be a label in Kubernetes."""
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


def _each(values: Iterable[str]) -> str:
    """The different ones, as long as a label's value may be."""
    return "_".join(dict.fromkeys(values))[:MOST_VALUE]
