"""Matches the layers of two engines: by name where the planes have names, by number otherwise. Pure.

Engines usually number layers alike. A draft model's layers are the exception: on one side they come after the model's
own, on the other somewhere else or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from kvbridge_proto.pool import Layer, Plane, Pool


def align(sender: Pool, receiver: Pool) -> Pool:
    """The sender with its layers numbered as the receiver numbers them, without those that the receiver does not have.

    A layer of the model that the sender does not describe is None. Returns the sender itself if the numbers agree.
    """
    return align_all((sender,), receiver)[0]


def align_all(senders: Sequence[Pool], receiver: Pool) -> list[Pool]:
    """`align` for each of many senders."""
    yours = _names(receiver.planes)
    return [_aligned(sender, receiver, yours) for sender in senders] if any(yours.values()) else list(senders)


def unfilled(aligned: Sequence[Pool], receiver: Pool) -> tuple[int, ...]:
    """The receiver's draft layers of which these senders, all ranks of an engine and aligned, hold nothing."""
    drafts = set(receiver.model.drafts)
    held = {plane.layer for sender in aligned for plane in sender.planes} if drafts else drafts
    return tuple(sorted({plane.layer for plane in receiver.planes} & drafts - held))


def _aligned(sender: Pool, receiver: Pool, yours: Mapping[int, str]) -> Pool:
    mine = _names(sender.planes)
    if mine.items() <= yours.items():
        return sender
    origins = _origins(mine, yours)
    if all(origin == layer for layer, origin in origins.items()):
        return sender
    targets = {origin: layer for layer, origin in origins.items()}
    return msgspec.structs.replace(
        sender,
        model=msgspec.structs.replace(sender.model, layers=_layers(sender, receiver, yours, origins)),
        planes=tuple(
            msgspec.structs.replace(plane, layer=targets[plane.layer])
            for plane in sender.planes
            if plane.layer in targets
        ),
    )


def _origins(mine: Mapping[int, str], yours: Mapping[int, str]) -> dict[int, int]:
    """The sender's number of each layer that both have, by the receiver's number."""
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


def _layers(
    sender: Pool, receiver: Pool, held: Mapping[int, str], origins: Mapping[int, int]
) -> tuple[Layer | None, ...]:
    known, taken = sender.model.layers, set(origins.values())
    layers: list[Layer | None] = []
    for layer in range(len(receiver.model.layers)):
        if layer in origins:
            layers.append(known[origins[layer]])
        else:
            is_another = layer in held or layer in taken or layer >= len(known)
            layers.append(None if is_another else known[layer])
    return tuple(layers)
