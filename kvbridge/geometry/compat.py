"""Whether one pool's rows can become another's, and what changes on the way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal

from kvbridge_proto.pool import Group, Layer, Plane, Pool, Shard

from .check import check_pool as check_pool
from .check import extent as extent
from .check import shortened
from .comb import MOST_PERIOD, period_of
from .layers import align
from .leg import whole_block
from .wire import PLAIN, ROW_SCALED, can_convert, is_same_row, is_same_scales, is_scale


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing has to be converted."""


@dataclass(frozen=True, slots=True)
class Convertible:
    """Everything can be moved; `changes` say what becomes different, with both values.

    `has_casts` if numbers are among it, and not only where rows lie.
    """

    changes: tuple[str, ...]
    has_casts: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Incompatible:
    """Nothing can be moved; `reasons` name each field and both values."""

    reasons: tuple[str, ...]


Verdict = Same | Convertible | Incompatible
Conversion = Literal["none", "layout", "codec"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One field on both sides, the same or not.

    `place` says where, if it is not one of the whole pool; `needs` what would help, where it stands in the way.
    """

    field: str
    source: object
    sink: object
    place: str = ""
    needs: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        needs = f"; needs {self.needs}" if self.needs else ""
        return f"{self.field}: source {self.source}, sink {self.sink}{place}{needs}"


# The kinds of layer that are attention with keys and values of their own; how much of them is kept is a group's matter.
ATTENTION = ("full", "sliding", "chunked")
ATTENTION_PARTS = ("k", "v", "latent")  # their widths are the model's
CASTS = ("codec", "scales")  # the differences by which numbers are others
SAME_MODEL = "the same model on both sides"
SAME_CODEC = "the same kv_cache_dtype on both sides"


def verdict(source: Pool, sink: Pool) -> Verdict:
    """Whether rows of `source` can become rows of `sink`. Both agents judge the same two pools alike."""
    reasons = [f"source {reason}" for reason in check_pool(source)]
    reasons += [f"sink {reason}" for reason in check_pool(sink)]
    reasons = reasons or [str(each) for each in obstacles(source, sink)]
    if reasons:
        return Incompatible(shortened(reasons))
    found = changes(source, sink)
    has_casts = any(each.field in CASTS for each in found)
    return Convertible(shortened([str(each) for each in found]), has_casts) if found else Same()


def conversion(found: Verdict) -> Conversion:
    """What is done to rows on the way, in one word: nothing, laid out otherwise, or other numbers as well."""
    if isinstance(found, Convertible):
        return "codec" if found.has_casts else "layout"
    return "none"


def obstacles(source: Pool, sink: Pool) -> list[Difference]:
    """What stands in the way between two pools that make sense; each once, however many layers have it."""
    aligned = align(source, sink)
    return _merged([*_other_model(source, aligned, sink), *_other_tokens(aligned, sink), *_other_form(aligned, sink)])


def changes(source: Pool, sink: Pool) -> list[Difference]:
    """What becomes different on the way; each once, however many layers have it."""
    if len(source.model.layers) > len(sink.model.layers):
        fewer = f"{len(sink.model.layers)} and takes its own"
        layers = [Difference("layers", len(source.model.layers), fewer)]
    else:
        layers = []
    return _merged([*layers, *_changes(align(source, sink), sink)])


def _other_model(source: Pool, aligned: Pool, sink: Pool) -> Iterator[Difference]:
    yield from _if_other("model", source.model.name, sink.model.name, needs=SAME_MODEL)
    if source.model.depth and sink.model.depth:
        yield from _if_other("depth", source.model.depth, sink.model.depth, needs=SAME_MODEL)
    held = {plane.layer for plane in aligned.planes}
    known = len(source.model.layers)
    for plane in {plane.layer: plane for plane in sink.planes}.values():
        # A rank of a pipeline holds some layers only; what none of them holds is found when they are assigned.
        if plane.layer not in held and (source.shard.pp_size == 1 or (plane.layer >= known and not plane.name)):
            needs = "every layer of the decode side on the prefill side"
            name = f" {plane.name}" if plane.name else ""
            yield Difference("layers", known, len(sink.model.layers), f"layer {plane.layer}{name}", needs)
    for index, (ours, theirs) in enumerate(zip(aligned.model.layers, sink.model.layers, strict=False)):
        if ours is not None and theirs is not None:
            yield from _other_layer(ours, theirs, f"layer {index}")


def _other_layer(ours: Layer, theirs: Layer, place: str) -> Iterator[Difference]:
    for name in Layer.__struct_fields__:
        mine, yours = getattr(ours, name), getattr(theirs, name)
        if name == "kind" and mine in ATTENTION and yours in ATTENTION:
            continue  # an engine may keep all tokens of a layer that looks at a window: see _other_tokens
        if name == "window" and not (mine and yours):
            continue
        yield from _if_other(name, mine, yours, place, SAME_MODEL)


def _other_tokens(source: Pool, sink: Pool) -> Iterator[Difference]:
    """Tokens that one side does not keep, or not where the other could find them."""
    combs = [(pool.shard.cp_size, pool.shard.cp_interleave) for pool in (source, sink)]
    if lcm(period_of(source.shard), period_of(sink.shard)) > MOST_PERIOD:
        needs = f"interleaves whose common period is below {MOST_PERIOD} tokens"
        mine, yours = (f"{interleave} x {size} ranks" for size, interleave in combs)
        yield Difference("cp_interleave", mine, yours, needs=needs)
    for ours, theirs in common_planes(source, sink):
        place = f"layer {ours.layer} {ours.part}"
        kept, wanted = source.groups[ours.group], sink.groups[theirs.group]
        if kept.kind != "full":
            needs = "the hybrid KV cache manager on the sink, or off at the source"
            yield from _if_other("kind", _keeps(kept), _keeps(wanted), place, needs)
            # What the source keeps begins with a block of its own, and that maybe inside one of the sink.
            is_inside = whole_block(kept, source.shard) % whole_block(wanted, sink.shard) > 0
            if kept.kind == wanted.kind != "state" and kept.window == wanted.window and is_inside:
                needs = "a block at the source that is a multiple of the sink's, where layers keep a window"
                said = _block(kept, source.shard), _block(wanted, sink.shard)
                yield Difference("block_tokens", *said, place, needs)
        if kept.kind == wanted.kind == "state":
            needs = "equal tensor parallel sizes: a state is cut by rank"
            yield from _if_other("tp_size", ours.total_heads, theirs.total_heads, place, needs)
            if combs[0][0] > 1 or combs[1][0] > 1:
                needs = "no context parallel ranks where layers keep a state"
                yield Difference("cp_size", combs[0][0], combs[1][0], place, needs)


def _other_form(source: Pool, sink: Pool) -> Iterator[Difference]:
    """Rows that no conversion takes from one form to the other."""
    scales = {(plane.layer, plane.part): plane for plane in source.planes if is_scale(plane.part)}
    theirs_of = {(plane.layer, plane.part): plane for plane in sink.planes if is_scale(plane.part)}
    for ours, theirs in common_planes(source, sink):
        place = f"layer {ours.layer} {ours.part}"
        if ours.total_heads != theirs.total_heads:
            continue  # of another model, or a state cut in other pieces
        if ours.part not in ATTENTION_PARTS and ours.codec.width != theirs.codec.width:
            yield Difference("width", ours.codec.width, theirs.codec.width, place, SAME_MODEL)
            continue
        if not can_convert(ours.codec, theirs.codec):
            yield from _if_other("codec", form_of(ours), form_of(theirs), place, SAME_CODEC)
            continue
        if not is_same_row(ours.codec, theirs.codec):
            if "fp8_ds_mla" in (ours.codec.name, theirs.codec.name) and not (_is_dense(ours) and _is_dense(theirs)):
                needs = "rows whose numbers lie side by side"
                yield from _if_other("codec", _spread(ours), _spread(theirs), place, needs)
            continue
        mine, yours = (each.get((ours.layer, f"{ours.part}_scale")) for each in (scales, theirs_of))
        if mine is not None and yours is not None and not is_same_row(mine.codec, yours.codec):
            yield from _if_other("codec", form_of(mine), form_of(yours), f"{place}_scale", SAME_CODEC)
    parts = _parts(source)
    for layer, needed in _parts(sink).items():
        held = parts.get(layer, needed)
        if not held >= needed:
            yield from _if_other(
                "parts", " ".join(sorted(held)), " ".join(sorted(needed)), f"layer {layer}", SAME_MODEL
            )


def _changes(source: Pool, sink: Pool) -> Iterator[Difference]:
    for name in ("tp_size", "pp_size", "cp_size"):
        yield from _if_other(name, getattr(source.shard, name), getattr(sink.shard, name))
    if source.shard.cp_size > 1 and sink.shard.cp_size > 1:
        yield from _if_other("cp_interleave", source.shard.cp_interleave, sink.shard.cp_interleave)
    for ours, theirs in common_planes(source, sink):
        place = f"layer {ours.layer} {ours.part}"
        mine, yours = source.groups[ours.group], sink.groups[theirs.group]
        yield from _if_other("kind", _keeps(mine), _keeps(yours), place)
        yield from _if_other("block_tokens", mine.block_tokens, yours.block_tokens, place)
        yield from _if_other("codec", form_of(ours), form_of(theirs), place)
        if not is_same_scales(ours.codec.scales, theirs.codec.scales):
            yield Difference("scales", spelled(ours.codec.scales), spelled(theirs.codec.scales), place)
        yield from _if_other("layout", _layout(ours), _layout(theirs), place)


def _if_other(field: str, source: object, sink: object, place: str = "", needs: str = "") -> Iterator[Difference]:
    if source != sink:
        yield Difference(field, source, sink, place, needs)


def common_planes(source: Pool, sink: Pool) -> Iterator[tuple[Plane, Plane]]:
    """Planes of rows; those of their scales go where they go."""
    mine = {(plane.layer, plane.part): plane for plane in source.planes}
    for theirs in sink.planes:
        ours = mine.get((theirs.layer, theirs.part))
        if ours is not None and not is_scale(theirs.part):
            yield ours, theirs


def _parts(pool: Pool) -> dict[int, set[str]]:
    parts: dict[int, set[str]] = {}
    for plane in pool.planes:
        if not is_scale(plane.part):
            parts.setdefault(plane.layer, set()).add(plane.part)
    return parts


def _keeps(group: Group) -> str:
    return f"{group.kind} {group.window}" if group.window else group.kind


def _block(group: Group, shard: Shard) -> str:
    return f"{group.block_tokens} x {shard.cp_size} ranks" if shard.cp_size > 1 else str(group.block_tokens)


def form_of(plane: Plane) -> str:
    """What rows are made of, for people."""
    codec = plane.codec
    return codec.name if codec.name in (*PLAIN, *ROW_SCALED) else f"{codec.name} of {codec.row_bytes} bytes"


def _is_dense(plane: Plane) -> bool:
    """True if the bytes of a row lie side by side."""
    return len(plane.element_axis) == 1 and plane.element_axis[0].stride == plane.codec.element_bytes


def _spread(plane: Plane) -> str:
    return form_of(plane) if _is_dense(plane) else f"{form_of(plane)}, {plane.element_axis[-1].stride} bytes apart"


def spelled(scales: Sequence[float]) -> str:
    """The scales of a plane, for people."""
    return "none" if not scales else f"{scales[0]:g}" if len(scales) == 1 else f"{len(scales)} from {scales[0]:g} on"


def _layout(plane: Plane) -> str:
    """Which axis is outside which: the order of their strides, in words for people."""
    axes = {"head": plane.head_stride if plane.heads > 1 else 0, "block": plane.block_stride}
    for name, axis in (("token", plane.token_axis), ("element", plane.element_axis)):
        for depth, step in enumerate(axis):
            axes[name + "'" * depth] = step.stride if step.count > 1 else 0
    return " > ".join(sorted((name for name in axes if axes[name]), key=lambda name: -axes[name]))


def _merged(differences: Iterable[Difference]) -> list[Difference]:
    """One for each pair of values, with its first place and how many more there are."""
    found: dict[tuple[str, str, str, str], list[Difference]] = {}
    for each in differences:
        found.setdefault((each.field, str(each.source), str(each.sink), each.needs), []).append(each)
    merged = []
    for alike in found.values():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        merged.append(replace(alike[0], place=alike[0].place + more))
    return merged
