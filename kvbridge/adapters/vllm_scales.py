"""Scales that vLLM up to 0.27 takes from the first rows it computes (`calculate_kv_scales`). Pure.

Each layer begins with 1 and computes its own once, in the first forward, before it writes a row; then they stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import Pool


def are_pending(layers: Mapping[str, Any]) -> bool:
    """Whether a layer has still to compute its scales."""
    return any(getattr(layer, "calculate_kv_scales", False) for layer in layers.values())


def changed_scales(pool: Pool, layers: Mapping[str, Any]) -> tuple[Scales, ...]:
    """What vLLM's layers say now, where that is not what the pool says. Planes are found by their layer's name."""
    found = []
    for plane in pool.planes:
        if len(plane.codec.scales) != 1:
            continue
        scale = float(getattr(layers[plane.name], "_v_scale_float" if plane.part == "v" else "_k_scale_float"))
        if scale != plane.codec.scales[0]:
            found.append(Scales(plane.layer, plane.part, (scale,)))
    return tuple(found)
