"""The scales of a worker's layers, when they differ from those that were attached.

vLLM up to 0.27 may compute scales from its first rows (`calculate_kv_scales`): each layer begins with 1 and computes
its own once, in the first forward, before it writes a row. After that they stay. And an engine that holds no rows yet
may take the scales of the engine that prefills for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge_proto.engine import Adopt, Decline, Rescale, Scales
from kvbridge_proto.pool import Pool

from .backends import backend_of

# These read the layer's scale tensors in every forward; on a CPU, where no graph is captured, the floats beside them.
# Others (FlashInfer's and those for latents, 0.26 to 0.33) multiply the floats into a factor in the first forward and
# keep it.
READ_ALWAYS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


class LayerScales:
    """What the agent is told about scales. `layers` are vLLM's, by name.

    `told` is set once they differ from those attached, `is_taking` until the agent has confirmed those that we took.
    """

    def __init__(self, pool: Pool, layers: Mapping[str, Any]) -> None:
        self.told: Rescale | None = None
        self.is_taking = False
        self.is_used = False  # rows may be there
        self.is_pending = are_pending(layers)
        self._pool = pool
        self._layers = layers

    def look(self) -> Rescale | None:
        """What to tell the agent once scales are computed, before rows under them are offered. Else None."""
        if not self.is_pending or are_pending(self._layers):
            return None
        self.is_pending = False
        if changed := changed_scales(self._pool, self._layers):
            self.told = Rescale(revision=1, scales=changed)
        return self.told

    def answer(self, question: Adopt) -> Rescale | Decline:
        """Take a sender's scales, if this engine holds no rows under its own."""
        if why := self._obstacle(question.scales):
            return Decline(revision=question.revision, reason=why)
        names = {(plane.layer, plane.part): plane.name for plane in self._pool.planes}
        for each in question.scales:
            _write(self._layers[names[each.layer, each.part]], _half(each.part), each.scales[0])
        self.told = Rescale(revision=question.revision, scales=changed_scales(self._pool, self._layers))
        self.is_taking = True
        return self.told

    def _obstacle(self, scales: tuple[Scales, ...]) -> str:
        if self.is_used:
            return "this engine holds rows under its own: a request was computed or received"
        if self.is_pending or self.told is not None:
            return "ours are computed with the first request" if self.is_pending else "others were taken before"
        planes = {(plane.layer, plane.part): plane for plane in self._pool.planes}
        for each in scales:
            plane = planes.get((each.layer, each.part))
            layer = None if plane is None else self._layers.get(plane.name)
            if layer is None:
                return f"layer {each.layer} {each.part}: this engine has none"
            if (backend := backend_of(layer)) not in READ_ALWAYS:
                return f"backend: {backend} keeps its first scales, must be one of {', '.join(READ_ALWAYS)}"
            if len(set(each.scales)) > 1 or getattr(layer, f"_{_half(each.part)}_scale").numel() > 1:
                return f"layer {each.layer} {each.part}: one for each head, must be one for the layer"
        return ""


def are_pending(layers: Mapping[str, Any]) -> bool:
    """Whether a layer still has to compute its scales."""
    return any(getattr(layer, "calculate_kv_scales", False) for layer in layers.values())


def changed_scales(pool: Pool, layers: Mapping[str, Any]) -> tuple[Scales, ...]:
    """The scales of vLLM's layers where they differ from the pool's. A plane has its layer's name."""
    found = []
    for plane in pool.planes:
        if len(plane.codec.scales) != 1 or plane.part not in ("k", "v", "latent"):
            continue  # other parts have the scale 1, whatever their layer has
        own = f"_{_half(plane.part)}_scale_float"
        scale = float(getattr(layers[plane.name], own, plane.codec.scales[0]))  # DeepSeek V4's layers have none
        if scale != plane.codec.scales[0]:
            found.append(Scales(plane.layer, plane.part, (scale,)))
    return tuple(found)


def _half(part: str) -> str:
    """vLLM's name for a part: a latent is a key."""
    return "v" if part == "v" else "k"


def _write(layer: Any, half: str, scale: float) -> None:
    """Written in stream order and in place: CUDA graphs hold the tensor's address."""
    getattr(layer, f"_{half}_scale").fill_(scale)
    setattr(layer, f"_{half}_scale_float", scale)
    copy = getattr(layer, f"_{half}_scale_cpu", None)  # vLLM since 0.32
    if copy is not None:
        copy.fill_(scale)
