"""Whether a pool is valid: every plane is inside its region, and no two of its rows overlap. Pure.

Whether two planes overlap is checked in overlap.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, prod

import msgspec
from kvbridge_proto.common import MAX_RANKS
from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import CODECS, SCALE_BLOCK, Codec, Group, Plane, Pool, Step

from ..cache_kinds import has_window, is_one_row
from .tokens import MOST_PERIOD, period_of
from .wire import (
    ATTENTION_PARTS,
    PLANE_SCALED,
    ROW_SCALED,
    SCALED_ROWS,
    base_part,
    has_scores,
    is_raw,
    is_scale,
)

MOST_REASONS = 32
MOST_LETTERS = 1024  # in one reason


def check_pool(pool: Pool) -> tuple[str, ...]:
    """Why this pool is not valid, each reason with its field and both values. Empty if it is valid."""
    reasons = [
        *_check_shard(pool),
        *_check_drafts(pool),
        *_check_groups(pool),
        *_check_layers(pool),
        *_check_scale_planes(pool),
    ]
    for index, plane in enumerate(pool.planes):
        where = f"plane {index} (layer {plane.layer} {plane.part})"
        reasons += [f"{where}: {reason}" for reason in _check_plane(pool, plane)]
    return shortened(reasons)


def rescaled(pool: Pool, scales: Sequence[Scales]) -> Pool:
    """The pool with these scales. Planes that are not named keep theirs."""
    new = {(each.layer, each.part): each.scales for each in scales}
    replace = msgspec.structs.replace
    planes = (
        replace(plane, codec=replace(plane.codec, scales=new.get((plane.layer, plane.part), plane.codec.scales)))
        for plane in pool.planes
    )
    return replace(pool, planes=tuple(planes))


def with_weights(pool: Pool, version: str) -> Pool:
    """The pool for rows computed with the weights of this name."""
    replace = msgspec.structs.replace
    return replace(pool, model=replace(pool.model, weights=version))


def shortened(reasons: Sequence[str]) -> tuple[str, ...]:
    """The reasons, cut to the number and length that a message may carry."""
    kept = tuple(
        reason if len(reason) <= MOST_LETTERS else f"{reason[: MOST_LETTERS - 3]}..."
        for reason in reasons[:MOST_REASONS]
    )
    return (*kept, f"and {len(reasons) - MOST_REASONS} reasons more") if len(reasons) > MOST_REASONS else kept


def extent(plane: Plane, group: Group) -> int:
    """One past the last byte of its region that a plane can touch."""
    return plane.offset + plane.codec.element_bytes + sum(_reach(step) for step in _steps(plane, group))


def places_of(axis: Sequence[Step]) -> int:
    """How many places an axis has."""
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
    if (ranks := shard.tp_size * shard.pp_size) > MAX_RANKS:
        yield f"tp_size: {shard.tp_size}, with pp_size {shard.pp_size} {ranks} ranks, at most {MAX_RANKS}"
    if (period := period_of(shard)) > MOST_PERIOD:
        yield (
            f"cp_interleave: {shard.cp_interleave}, with cp_size {shard.cp_size} a period of {period} tokens, "
            f"at most {MOST_PERIOD}"
        )


def _check_drafts(pool: Pool) -> Iterator[str]:
    for layer in pool.model.drafts:
        if layer >= len(pool.model.layers):
            yield f"drafts: layer {layer}, the model has {len(pool.model.layers)}"
        elif layer < pool.model.depth:
            yield f"drafts: layer {layer}, depth {pool.model.depth}: it is one of the model's own"


def _check_groups(pool: Pool) -> Iterator[str]:
    for index, group in enumerate(pool.groups):
        if has_window(group.kind) and not group.window:
            yield f"window: 0, group {index} is {group.kind}"


def _check_layers(pool: Pool) -> Iterator[str]:
    """Each (layer, part) has one plane, rotated or not. K and V of a layer have as many scales.

    All scores lack their weight, or none: an engine that finishes them changes all.
    """
    seen: dict[tuple[int, str], Plane] = {}
    for plane in pool.planes:
        part = base_part(plane.part)
        if (other := seen.get((plane.layer, part))) is not None:
            forms = "two planes for " + part if other.part == plane.part else part + " in two forms"
            yield f"part: layer {plane.layer} has {forms}"
        seen[plane.layer, part] = plane
    if len({is_raw(plane.part) for plane in pool.planes if has_scores(plane.part)}) > 1:
        yield "scores: raw in some parts, with a weight added in others"
    for plane in pool.planes:
        other = seen.get((plane.layer, "k")) if plane.part == "v" else None
        if other is not None and len(other.codec.scales) != len(plane.codec.scales):
            yield f"scales: k has {len(other.codec.scales)}, v has {len(plane.codec.scales)} (layer {plane.layer})"


def _check_scale_planes(pool: Pool) -> Iterator[str]:
    """Scaled rows and the plane of their scales: each needs the other, and they must match."""
    planes = {(plane.layer, plane.part): plane for plane in pool.planes}
    for plane in pool.planes:
        where = f"layer {plane.layer} {plane.part}"
        if is_scale(plane.part):
            data = planes.get((plane.layer, plane.part.removesuffix("_scale")))
            if data is None or data.codec.name not in SCALED_ROWS:
                yield f"{where}: part: scales of {data.codec.name if data else 'nothing'}, must be of scaled rows"
        elif plane.codec.name in SCALED_ROWS:
            scales = planes.get((plane.layer, f"{plane.part}_scale"))
            if scales is None:
                yield f"{where}: part: {plane.codec.name} needs a plane {plane.part}_scale, there is none"
            else:
                yield from (f"{where}: {reason}" for reason in _check_scales_of(plane, scales))


def _check_scales_of(plane: Plane, scales: Plane) -> Iterator[str]:
    codec = scales.codec
    for field in ("group", "first_head", "heads", "total_heads", "row_tokens"):
        if (ours := getattr(plane, field)) != (theirs := getattr(scales, field)):
            yield f"{field}: {theirs} of the scales, {ours} of the rows"
    if plane.codec.name in SCALE_BLOCK:
        expected = plane.codec.width // SCALE_BLOCK[plane.codec.name]
        if (codec.name, codec.row_bytes) != ("opaque", expected):
            yield f"scales: {codec.name} of {codec.row_bytes} bytes, must be opaque of {expected}"
    if plane.codec.name not in ROW_SCALED:
        return
    if (codec.name, codec.width) != (plane.codec.scale_codec, 1):
        yield f"scales: {codec.width} x {codec.name}, must be 1 x {plane.codec.scale_codec}"
    yield from _check_words(scales)


def is_beside(rows: Plane, scales: Plane) -> bool:
    """True if the scale of each row lies equally far from it: then one list of places says where both are."""
    fields = ("group", "region", "block_stride", "token_axis")
    return all(getattr(rows, field) == getattr(scales, field) for field in fields)


def _check_words(plane: Plane) -> Iterator[str]:
    """Scales are read as words of four bytes, so they must be aligned."""
    strides = [plane.offset, plane.block_stride, *(step.stride for step in plane.token_axis)]
    if plane.heads > 1:
        strides.append(plane.head_stride)
    if odd := [stride for stride in strides if stride % 4]:
        yield f"stride: {odd[0]} bytes to a scale, must be a multiple of 4"


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
    if is_one_row(group.kind):
        if tokens != 1:
            yield f"token_axis: counts {tokens}, a state has 1 row in a block"
    elif tokens * plane.row_tokens != group.block_tokens:
        each = f", {plane.row_tokens} tokens each" if plane.row_tokens > 1 else ""
        yield f"token_axis: counts {tokens}{each}, block_tokens {group.block_tokens}"
    if plane.row_tokens > 1 and (is_one_row(group.kind) or pool.shard.cp_size > 1):
        yield f"row_tokens: {plane.row_tokens} in a {group.kind} group, cp_size {pool.shard.cp_size}, must be 1 there"
    if elements * plane.codec.element_bytes != plane.codec.row_bytes:
        yield (
            f"element_axis: counts {elements} of {plane.codec.element_bytes} bytes, row_bytes {plane.codec.row_bytes}"
        )
    end = extent(plane, group)
    if end > region.size_bytes:
        yield f"end: byte {end}, region {plane.region} has {region.size_bytes} bytes"
    yield from _check_overlap(plane, group)
    if plane.codec.name == "fp8_ds_mla":  # its rows have fp32 scales inside
        yield from _check_words(plane)


def _check_model(pool: Pool, plane: Plane) -> Iterator[str]:
    if plane.layer >= len(pool.model.layers):
        yield f"layer: {plane.layer}, the model has {len(pool.model.layers)}"
        return
    layer = pool.model.layers[plane.layer]
    if layer is None:
        yield f"layer: {plane.layer} has a plane, the model says nothing of it"
        return
    group = pool.groups[plane.group]
    if is_one_row(layer.kind) != is_one_row(group.kind):
        yield f"group: {plane.group} is {group.kind}, the model's kind {layer.kind}"
    if plane.first_head + plane.heads > plane.total_heads:
        yield f"heads: {plane.heads} from {plane.first_head} on, total_heads {plane.total_heads}"
    if (part := base_part(plane.part)) in ATTENTION_PARTS:
        if plane.total_heads != layer.kv_heads:
            yield f"total_heads: {plane.total_heads}, the model's kv_heads {layer.kv_heads}"
        is_value = part == "v"
        name, width = ("value_width", layer.value_width) if is_value else ("key_width", layer.key_width)
        if plane.codec.name != "opaque" and plane.codec.width != width:
            yield f"width: {plane.codec.width}, the model's {name} {width}"


def _check_codec(plane: Plane) -> Iterator[str]:
    codec = plane.codec
    yield from _check_row(codec)
    if len(codec.scales) not in (0, 1, plane.heads):
        yield f"scales: {len(codec.scales)}, must be none, 1 or one for each of {plane.heads} heads"
    if not all(map(isfinite, codec.scales)) or min(codec.scales, default=1.0) <= 0:
        first = next(scale for scale in codec.scales if not (isfinite(scale) and scale > 0))  # there may be millions
        yield f"scales: {first}, must be a finite number above 0"
    if codec.name not in PLANE_SCALED and set(codec.scales) - {1.0}:
        yield f"scales: {len(codec.scales)} for {codec.name}, only 8-bit codecs and nvfp4 have them"


def _check_row(codec: Codec) -> Iterator[str]:
    """Sizes that follow from the codec's name."""
    name, width = codec.name, codec.width
    form = CODECS[name]
    size = form.element_bytes
    if name != "opaque" and codec.element_bytes != size:
        yield f"element_bytes: {codec.element_bytes}, {name} has {size}"
    if (block := form.scale_block) and width % block:
        yield f"width: {width}, {name} has scales of {block} numbers each"
    if form.row_bytes:
        if form.width and width != form.width:
            yield f"width: {width}, {name} has {form.width}"
        if codec.row_bytes != form.row_bytes:
            yield f"row_bytes: {codec.row_bytes}, {name} has {form.row_bytes}"
    elif name != "opaque":
        row_bytes = width // 2 if form.is_halved else width * size
        if codec.row_bytes != row_bytes:
            yield f"row_bytes: {codec.row_bytes}, {width} x {name} are {row_bytes}"


def _check_overlap(plane: Plane, group: Group) -> Iterator[str]:
    """From the smallest stride up, each step must clear what the steps below it cover."""
    covered = plane.codec.element_bytes
    for step in sorted((step for step in _steps(plane, group) if step.count > 1), key=lambda step: step.stride):
        if step.stride < covered:
            yield f"stride: {step.stride} bytes between {step.count} places that cover {covered} bytes each"
            return
        covered += _reach(step)
