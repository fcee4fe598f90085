"""Whether a pool makes sense at all: every plane inside its region, no row on top of another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, prod

import msgspec
from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import Group, Plane, Pool, Step

from .comb import MOST_PERIOD, period_of
from .wire import PLAIN

MOST_REASONS = 32


def check_pool(pool: Pool) -> tuple[str, ...]:
    """Why this pool cannot be, each reason with its field and both values; nothing if it can."""
    reasons = [*_check_shard(pool), *_check_layers(pool)]
    for index, plane in enumerate(pool.planes):
        where = f"plane {index} (layer {plane.layer} {plane.part})"
        reasons += [f"{where}: {reason}" for reason in _check_plane(pool, plane)]
    return shortened(reasons)


def rescaled(pool: Pool, scales: Sequence[Scales]) -> Pool:
    """The pool with these scales; planes that are not named keep theirs."""
    new = {(each.layer, each.part): each.scales for each in scales}
    replace = msgspec.structs.replace
    planes = (
        replace(plane, codec=replace(plane.codec, scales=new.get((plane.layer, plane.part), plane.codec.scales)))
        for plane in pool.planes
    )
    return replace(pool, planes=tuple(planes))


def shortened(reasons: Sequence[str]) -> tuple[str, ...]:
    """No more reasons than a message may carry."""
    if len(reasons) <= MOST_REASONS:
        return tuple(reasons)
    return (*reasons[:MOST_REASONS], f"and {len(reasons) - MOST_REASONS} reasons more")


def extent(plane: Plane, group: Group) -> int:
    """One past the last byte of its region that a plane can touch."""
    return plane.offset + plane.codec.element_bytes + sum(_reach(step) for step in _steps(plane, group))


def places_of(axis: Sequence[Step]) -> int:
    """How many places an axis counts."""
    return prod(step.count for step in axis)


def _reach(step: Step) -> int:
    return (step.count - 1) * step.stride


def _steps(plane: Plane, group: Group) -> list[Step]:
    blocks, heads = Step(group.blocks, plane.block_stride), Step(plane.heads, plane.head_stride)
    return [blocks, heads, *plane.token_axis, *plane.element_axis]


def _check_shard(pool: Pool) -> Iterator[str]:
    shard = pool.shard
    for axis, rank, size in (
        ("tp", shard.tp_rank, shard.tp_size),
        ("pp", shard.pp_rank, shard.pp_size),
        ("cp", shard.cp_rank, shard.cp_size),
    ):
        if rank >= size:
            yield f"{axis}_rank: {rank}, {axis}_size {size}"
    if (period := period_of(shard)) > MOST_PERIOD:
        yield (
            f"cp_interleave: {shard.cp_interleave}, with cp_size {shard.cp_size} a period of {period} tokens, "
            f"at most {MOST_PERIOD}"
        )


def _check_layers(pool: Pool) -> Iterator[str]:
    """One plane for each (layer, part), and the parts of a layer for the same heads."""
    first: dict[int, Plane] = {}
    seen: set[tuple[int, str]] = set()
    for plane in pool.planes:
        if (plane.layer, plane.part) in seen:
            yield f"part: layer {plane.layer} has two planes for {plane.part}"
        seen.add((plane.layer, plane.part))
        other = first.setdefault(plane.layer, plane)
        if (plane.first_head, plane.heads) != (other.first_head, other.heads):
            yield (
                f"heads: layer {plane.layer} has {plane.heads} from {plane.first_head} on for {plane.part}, "
                f"{other.heads} from {other.first_head} on for {other.part}"
            )


def _check_plane(pool: Pool, plane: Plane) -> Iterator[str]:
    if plane.group >= len(pool.groups):
        yield f"group: {plane.group}, the pool has {len(pool.groups)}"
        return
    if plane.region >= len(pool.regions):
        yield f"region: {plane.region}, the pool has {len(pool.regions)}"
        return
    group, region = pool.groups[plane.group], pool.regions[plane.region]
    yield from _check_model(pool, plane)
    yield from _check_codec(plane)
    tokens, elements = places_of(plane.token_axis), places_of(plane.element_axis)
    if tokens != group.block_tokens:
        yield f"token_axis: counts {tokens}, block_tokens {group.block_tokens}"
    if elements * plane.codec.element_bytes != plane.codec.row_bytes:
        yield (
            f"element_axis: counts {elements} of {plane.codec.element_bytes} bytes, row_bytes {plane.codec.row_bytes}"
        )
    end = extent(plane, group)
    if end > region.size_bytes:
        yield f"end: byte {end}, region {plane.region} has {region.size_bytes} bytes"
    yield from _check_overlap(plane, group)


def _check_model(pool: Pool, plane: Plane) -> Iterator[str]:
    if plane.layer >= len(pool.model.layers):
        yield f"layer: {plane.layer}, the model has {len(pool.model.layers)}"
        return
    layer = pool.model.layers[plane.layer]
    if layer is None:
        yield f"layer: {plane.layer} has a plane, the model says nothing of it"
        return
    if plane.first_head + plane.heads > plane.total_heads:
        yield f"heads: {plane.heads} from {plane.first_head} on, total_heads {plane.total_heads}"
    if plane.part in ("k", "v"):
        if plane.total_heads != layer.kv_heads:
            yield f"total_heads: {plane.total_heads}, the model's kv_heads {layer.kv_heads}"
        name, width = ("key_width", layer.key_width) if plane.part == "k" else ("value_width", layer.value_width)
        if plane.codec.name != "opaque" and plane.codec.width != width:
            yield f"width: {plane.codec.width}, the model's {name} {width}"


def _check_codec(plane: Plane) -> Iterator[str]:
    codec = plane.codec
    element_bytes = PLAIN.get(codec.name)
    if element_bytes is not None:
        if codec.element_bytes != element_bytes:
            yield f"element_bytes: {codec.element_bytes}, {codec.name} has {element_bytes}"
        if codec.row_bytes != codec.width * element_bytes:
            yield f"row_bytes: {codec.row_bytes}, {codec.width} x {codec.name} are {codec.width * element_bytes}"
    if len(codec.scales) not in (0, 1, plane.heads):
        yield f"scales: {len(codec.scales)}, must be none, 1 or one for each of {plane.heads} heads"
    for scale in codec.scales:
        if not (isfinite(scale) and scale > 0):
            yield f"scales: {scale}, must be a finite number above 0"


def _check_overlap(plane: Plane, group: Group) -> Iterator[str]:
    """From the smallest stride up, each step must clear what the steps below it cover."""
    covered = plane.codec.element_bytes
    for step in sorted((step for step in _steps(plane, group) if step.count > 1), key=lambda step: step.stride):
        if step.stride < covered:
            yield f"stride: {step.stride} bytes between {step.count} places that cover {covered} bytes each"
            return
        covered += _reach(step)
