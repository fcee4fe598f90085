"""Whether one pool's rows can become another's, and what changes on the way. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from kvbridge_proto.pool import Layer, Model, Plane, Pool

from .check import check_pool as check_pool
from .check import extent as extent
from .check import shortened
from .wire import PLAIN, is_same_row, is_same_scales


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing has to be converted."""


@dataclass(frozen=True, slots=True)
class Convertible:
    """Everything can be moved; `changes` say what becomes different, with both values."""

    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Incompatible:
    """Nothing can be moved; `reasons` name each field and both values."""

    reasons: tuple[str, ...]


Verdict = Same | Convertible | Incompatible


@dataclass(frozen=True, slots=True)
class Difference:
    """One field on both sides, the same or not; `place` says where, if it is not one of the whole pool."""

    field: str
    source: object
    sink: object
    place: str = ""


def fingerprint(model: Model) -> str:
    """A name for the identity of a cache: equal exactly where the models are."""
    return hashlib.blake2b(msgspec.msgpack.encode(model), digest_size=16).hexdigest()


def verdict(source: Pool, sink: Pool) -> Verdict:
    """Whether rows of `source` can become rows of `sink`. Both agents judge the same two pools alike."""
    reasons = [f"source {reason}" for reason in check_pool(source)]
    reasons += [f"sink {reason}" for reason in check_pool(sink)]
    if not reasons:
        reasons = _spelled([*_other_model(source.model, sink.model), *_other_form(source, sink)])
        reasons += _not_yet(source, sink)
    if reasons:
        return Incompatible(shortened(reasons))
    changes = _spelled(_changes(source, sink))
    return Convertible(shortened(changes)) if changes else Same()


def _other_model(source: Model, sink: Model) -> Iterator[Difference]:
    yield Difference("model", source.name, sink.name)
    yield Difference("layers", len(source.layers), len(sink.layers))
    if len(source.layers) != len(sink.layers):
        return
    for index, (ours, theirs) in enumerate(zip(source.layers, sink.layers, strict=True)):
        if ours is None or theirs is None:
            continue
        for name in Layer.__struct_fields__:
            yield Difference(name, getattr(ours, name), getattr(theirs, name), f"layer {index}")


def _not_yet(source: Pool, sink: Pool) -> Iterator[str]:
    """What the records can hold but nothing moves yet."""
    kinds = [sorted({pool.groups[plane.group].kind for plane in pool.planes}) for pool in (source, sink)]
    if kinds[0] not in (kinds[1], ["full"]) or ("state" in kinds[1]) != ("state" in kinds[0]):
        yield f"kind: source {' '.join(kinds[0])}, sink {' '.join(kinds[1])}; needs the same, or full at the source"


def _other_form(source: Pool, sink: Pool) -> Iterator[Difference]:
    """Rows that no conversion takes from one form to the other."""
    for ours, theirs in _common_planes(source, sink):
        if not is_same_row(ours.codec, theirs.codec) and not {ours.codec.name, theirs.codec.name} <= set(PLAIN):
            yield Difference("codec", _form(ours), _form(theirs), f"layer {ours.layer} {ours.part}")
    parts = _parts(source)
    for layer, needed in _parts(sink).items():
        held = parts.get(layer, needed)
        if not held >= needed:
            yield Difference("parts", " ".join(sorted(held)), " ".join(sorted(needed)), f"layer {layer}")


def _changes(source: Pool, sink: Pool) -> Iterator[Difference]:
    for name in ("tp_size", "pp_size", "cp_size", "cp_interleave"):
        yield Difference(name, getattr(source.shard, name), getattr(sink.shard, name))
    for ours, theirs in _common_planes(source, sink):
        place = f"layer {ours.layer} {ours.part}"
        mine, yours = source.groups[ours.group], sink.groups[theirs.group]
        yield Difference("block_tokens", mine.block_tokens, yours.block_tokens, place)
        yield Difference("codec", _form(ours), _form(theirs), place)
        if not is_same_scales(ours.codec.scales, theirs.codec.scales):
            yield Difference("scales", _scales(ours), _scales(theirs), place)
        yield Difference("layout", _layout(ours), _layout(theirs), place)


def _common_planes(source: Pool, sink: Pool) -> Iterator[tuple[Plane, Plane]]:
    mine = {(plane.layer, plane.part): plane for plane in source.planes}
    for theirs in sink.planes:
        ours = mine.get((theirs.layer, theirs.part))
        if ours is not None:
            yield ours, theirs


def _parts(pool: Pool) -> dict[int, set[str]]:
    parts: dict[int, set[str]] = {}
    for plane in pool.planes:
        parts.setdefault(plane.layer, set()).add(plane.part)
    return parts


def _form(plane: Plane) -> str:
    codec = plane.codec
    return codec.name if codec.name in PLAIN else f"{codec.name} of {codec.row_bytes} bytes"


def _scales(plane: Plane) -> str:
    scales = plane.codec.scales
    return "none" if not scales else f"{scales[0]:g}" if len(scales) == 1 else f"{len(scales)} from {scales[0]:g} on"


def _layout(plane: Plane) -> str:
    """Which axis is outside which: the order of their strides, in words for people."""
    axes = {"head": plane.head_stride if plane.heads > 1 else 0, "block": plane.block_stride}
    for name, axis in (("token", plane.token_axis), ("element", plane.element_axis)):
        for depth, step in enumerate(axis):
            axes[name + "'" * depth] = step.stride if step.count > 1 else 0
    return " > ".join(sorted((name for name in axes if axes[name]), key=lambda name: -axes[name]))


def _spelled(differences: Iterable[Difference]) -> list[str]:
    """A sentence for each pair of values that are not the same, however many layers have it."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for each in differences:
        key = (each.field, str(each.source), str(each.sink))
        if each.source != each.sink or each.field == "scales":
            places.setdefault(key, []).append(each.place)
    sentences = []
    for (field, ours, theirs), where in places.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        place = f" ({where[0]}{more})" if where[0] else ""
        sentences.append(f"{field}: source {ours}, sink {theirs}{place}")
    return sentences
