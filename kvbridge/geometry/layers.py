"""Which layer of one engine is which of another: by name where the planes have names, by number otherwise. Pure.

Engines number layers alike as a rule. A draft model's are the exception: they come after the model's own on one side,
somewhere else or not at all on the other.
"""

from __future__ import annotations

import msgspec
from kvbridge_proto.pool import Layer, Plane, Pool


def align(source: Pool, sink: Pool) -> Pool:
    """The source with its layers numbered as the sink numbers them, without those that the sink does not have.

    A layer of the model that the source says nothing of is None. The source itself where the numbers agree.
    """
    if not any(plane.name for plane in sink.planes):
        return source
    origins = _origins(source, sink)
    if all(origin == layer for layer, origin in origins.items()):
        return source
    targets = {origin: layer for layer, origin in origins.items()}
    return msgspec.structs.replace(
        source,
        model=msgspec.structs.replace(source.model, layers=_layers(source, sink, origins)),
        planes=tuple(
            msgspec.structs.replace(plane, layer=targets[plane.layer])
            for plane in source.planes
            if plane.layer in targets
        ),
    )


def _origins(source: Pool, sink: Pool) -> dict[int, int]:
    """The source's number of each layer that both have."""
    mine, yours = _names(source.planes), _names(sink.planes)
    named = {name: layer for layer, name in mine.items() if name}
    elsewhere = {name for name in yours.values() if name}
    origins: dict[int, int] = {}
    for layer, name in yours.items():
        if name in named:
            origins[layer] = named[name]
        elif layer in mine and mine[layer] not in elsewhere:
            origins[layer] = layer
    return origins


def _names(planes: tuple[Plane, ...]) -> dict[int, str]:
    return {plane.layer: plane.name for plane in planes}


def _layers(source: Pool, sink: Pool, origins: dict[int, int]) -> tuple[Layer | None, ...]:
    known, taken = source.model.layers, set(origins.values())
    held = _names(sink.planes)
    layers: list[Layer | None] = []
    for layer in range(len(sink.model.layers)):
        if layer in origins:
            layers.append(known[origins[layer]])
        else:
            is_another = layer in held or layer in taken or layer >= len(known)
            layers.append(None if is_another else known[layer])
    return tuple(layers)
