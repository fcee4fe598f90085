"""Which layer of one engine is which of another: by name where the planes have names, by number otherwise. Pure.

Engines number layers alike as a rule. A draft model's are the exception: they come after the model's own on one side,
somewhere else or not at all on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from kvbridge_proto.pool import Layer, Plane, Pool


def align(source: Pool, sink: Pool) -> Pool:
    """The source with its layers numbered as the sink numbers them, without those that the sink does not have.

    A layer of the model that the source says nothing of is None. The source itself where the numbers agree.
    """
    return align_all((source,), sink)[0]


def align_all(sources: Sequence[Pool], sink: Pool) -> list[Pool]:
    """Each of many sources, aligned."""
    yours = _names(sink.planes)
    return [_aligned(source, sink, yours) for source in sources] if any(yours.values()) else list(sources)


def _aligned(source: Pool, sink: Pool, yours: Mapping[int, str]) -> Pool:
    mine = _names(source.planes)
    if mine.items() <= yours.items():
        return source
    origins = _origins(mine, yours)
    if all(origin == layer for layer, origin in origins.items()):
        return source
    targets = {origin: layer for layer, origin in origins.items()}
    return msgspec.structs.replace(
        source,
        model=msgspec.structs.replace(source.model, layers=_layers(source, sink, yours, origins)),
        planes=tuple(
            msgspec.structs.replace(plane, layer=targets[plane.layer])
            for plane in source.planes
            if plane.layer in targets
        ),
    )


def _origins(mine: Mapping[int, str], yours: Mapping[int, str]) -> dict[int, int]:
    """The source's number of each layer that both have."""
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


def _layers(source: Pool, sink: Pool, held: Mapping[int, str], origins: Mapping[int, int]) -> tuple[Layer | None, ...]:
    known, taken = source.model.layers, set(origins.values())
    layers: list[Layer | None] = []
    for layer in range(len(sink.model.layers)):
        if layer in origins:
            layers.append(known[origins[layer]])
        else:
            is_another = layer in held or layer in taken or layer >= len(known)
            layers.append(None if is_another else known[layer])
    return tuple(layers)
