"""Whether one pool's rows can become another's, and what changes on the way. Pure.

Both agents of a session ask `verdict` (exchange/session.py: `answer`, `accept`). `kvbridge plan` asks it beforehand.
The reasons of an Incompatible are those of the error `incompatible`. Each is a Difference written out: the field, both
values, the place, and what would help. `obstacles` finds them. Whether two codecs fit is decided in wire.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import lcm
from typing import ClassVar, Literal

from kvbridge_proto.pool import Group, Layer, Plane, Pool, Shard

from ..cache_kinds import CACHE_KINDS, border, comes_last, has_window, whole_block
from ..errors import PeerError
from ..values import Value
from .check import check_pool as check_pool
from .check import extent as extent
from .check import shortened
from .layers import align, unfilled
from .tokens import MOST_PERIOD, period_of
from .wire import (
    ATTENTION_PARTS,
    PLAIN,
    POWERS,
    ROW_SCALED,
    base_part,
    can_convert,
    can_rotate,
    has_scores,
    is_raw,
    is_rotated,
    is_same_row,
    is_same_scales,
    is_scale,
)

Conversion = Literal["none", "layout", "codec"]  # what happens to rows: nothing, other places, or other numbers as well


class Same(Value):
    """Nothing has to be converted."""

    conversion: ClassVar[Conversion] = "none"


@dataclass(frozen=True, slots=True)
class Convertible:
    """Everything can be moved. `changes` say what becomes different, with both values."""

    changes: tuple[str, ...]
    conversion: Conversion = field(default="layout", compare=False)


class Incompatible(Value):
    """Nothing can be moved. `reasons` name each field and both values."""

    reasons: tuple[str, ...]


Verdict = Same | Convertible | Incompatible


@dataclass(frozen=True, slots=True)
class Difference:
    """One field with its values on both sides, equal or not.

    `place` says where it is, unless it is a field of the whole pool. `needs` is what would help, if it is an obstacle.
    """

    field: str
    sender: object
    receiver: object
    place: str = ""
    needs: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        needs = f"; needs {self.needs}" if self.needs else ""
        return f"{self.field}: sender {self.sender}, receiver {self.receiver}{place}{needs}"


# Layers that are attention with keys and values of their own. Their group says how many tokens are kept.
ATTENTION_KINDS = [name for name, kind in CACHE_KINDS.items() if not kind.is_one_row]
CASTS = ("codec", "scale_codec", "rotation", "scores", "scales")  # differences that change numbers
SAME_MODEL = "the same model on both sides"
SAME_DRAFT = "the same draft model on both sides, or none on the prefill side"
SAME_CODEC = "the same kv_cache_dtype on both sides"
SAME_SCALES = "the same k_scale and v_scale on both sides, as one checkpoint has them for one kind of GPU"
SAME_SCORES = (
    "both engines of one kind, as scores in SGLang lack a weight that only the model has; or a receiver that finishes "
    "them: vLLM, or SGLang with these rows in fp32"
)
SAME_ROTATION = "rows that both sides rotate, or neither, or rows of plain numbers or fp8, as wide as a power of two"
MULTIPLE = "a block at the sender that is a multiple of the receiver's, where layers keep a window"
NO_REUSE = (
    f"{MULTIPLE}, or --no-enable-prefix-caching at the receiver: its prefix cache would give the block in which the "
    "window begins to other requests, whole"
)


def verdict(sender: Pool, receiver: Pool) -> Verdict:
    """Whether rows of `sender` can become rows of `receiver`. Both agents come to the same verdict."""
    reasons = [f"sender {reason}" for reason in check_pool(sender)]
    reasons += [f"receiver {reason}" for reason in check_pool(receiver)]
    reasons = reasons or [str(each) for each in obstacles(sender, receiver)]
    if reasons:
        return Incompatible(shortened(reasons))
    found = changes(sender, receiver)
    if not found:
        return Same()
    is_cast = any(each.field in CASTS for each in found)
    return Convertible(shortened([str(each) for each in found]), "codec" if is_cast else "layout")


def obstacles(sender: Pool, receiver: Pool) -> list[Difference]:
    """What stands in the way between two valid pools; each once, however many layers have it."""
    aligned = align(sender, receiver)
    return _merged(
        [*_other_model(sender, aligned, receiver), *_other_tokens(aligned, receiver), *_other_form(aligned, receiver)]
    )


def other_weights(sender: Pool, receiver: Pool) -> Difference | None:
    """How the two sides' weights differ, or None. Weights without a name equal no others, not even unnamed ones."""
    names = sender.model.weights, receiver.model.weights
    if names[0] and names[0] == names[1]:
        return None
    ours, theirs = (name or "without a name since the cache was reset" for name in names)
    return Difference("weights", ours, theirs, needs="the same weights on both sides, and then the same name for them")


def changes(sender: Pool, receiver: Pool) -> list[Difference]:
    """What becomes different on the way; each once, however many layers have it."""
    aligned = align(sender, receiver)
    return _merged([*_other_layers(sender, aligned, receiver), *_changes(aligned, receiver)])


def _other_layers(sender: Pool, aligned: Pool, receiver: Pool) -> Iterator[Difference]:
    """Layers that only one side has. A pipeline rank does not tell what the other ranks hold."""
    ours, theirs = len(sender.model.layers), len(receiver.model.layers)
    missing = unfilled((aligned,), receiver) if sender.shard.pp_size == 1 else ()
    if missing:
        yield Difference("layers", ours, f"{theirs} and fills {len(missing)} with zeros")
    elif ours > theirs and receiver.shard.pp_size == 1:
        yield Difference("layers", ours, f"{theirs} and takes its own")


def _other_model(sender: Pool, aligned: Pool, receiver: Pool) -> Iterator[Difference]:
    yield from _if_other("model", sender.model.name, receiver.model.name, needs=SAME_MODEL)
    if (difference := other_weights(sender, receiver)) is not None:
        yield difference
    if sender.model.depth and receiver.model.depth:
        yield from _if_other("depth", sender.model.depth, receiver.model.depth, needs=SAME_MODEL)
    held = {plane.layer for plane in aligned.planes}
    if sender.model.draft and receiver.model.draft and held & set(receiver.model.drafts):
        yield from _if_other("draft", sender.model.draft, receiver.model.draft, needs=SAME_DRAFT)
    known, missing = len(sender.model.layers), unfilled((aligned,), receiver)
    for plane in {plane.layer: plane for plane in receiver.planes if plane.layer not in missing}.values():
        # A pipeline rank holds some layers only. Layers that no rank holds are found by `shard.assign`.
        if plane.layer not in held and (sender.shard.pp_size == 1 or (plane.layer >= known and not plane.name)):
            needs = "every layer of the decode side on the prefill side"
            name = f" {plane.name}" if plane.name else ""
            yield Difference("layers", known, len(receiver.model.layers), f"layer {plane.layer}{name}", needs)
    for index, (ours, theirs) in enumerate(zip(aligned.model.layers, receiver.model.layers, strict=False)):
        if ours is not None and theirs is not None:
            yield from _other_layer(ours, theirs, f"layer {index}")


def _other_layer(ours: Layer, theirs: Layer, place: str) -> Iterator[Difference]:
    for name in Layer.__struct_fields__:
        mine, yours = getattr(ours, name), getattr(theirs, name)
        if name == "kind" and mine in ATTENTION_KINDS and yours in ATTENTION_KINDS:
            continue  # an engine may keep all tokens of a layer with a window: see _other_tokens
        if name == "window" and not (mine and yours):
            continue
        yield from _if_other(name, mine, yours, place, SAME_MODEL)


def _other_tokens(sender: Pool, receiver: Pool) -> Iterator[Difference]:
    """Tokens that one side does not keep, or keeps where the other cannot find them."""
    token_shards = [(pool.shard.cp_size, pool.shard.cp_interleave) for pool in (sender, receiver)]
    if lcm(period_of(sender.shard), period_of(receiver.shard)) > MOST_PERIOD:
        needs = f"interleaves whose common period is below {MOST_PERIOD} tokens"
        mine, yours = (f"{interleave} x {size} ranks" for size, interleave in token_shards)
        yield Difference("cp_interleave", mine, yours, needs=needs)
    for ours, theirs in common_planes(sender, receiver):
        place = f"layer {ours.layer} {ours.part}"
        yield from _if_other("row_tokens", ours.row_tokens, theirs.row_tokens, place, SAME_MODEL)
        given, wanted = sender.groups[ours.group], receiver.groups[theirs.group]
        if comes_last(given.kind):
            needs = "the hybrid KV cache manager on the receiver, or off at the sender"
            yield from _if_other("kind", _keeps(given), _keeps(wanted), place, needs)
            # What the sender keeps begins on its own block border, which may be inside a block of the receiver.
            # A chunk that is whole blocks of the receiver begins on a border of that one too.
            block = border(wanted, receiver.shard)
            is_inside = whole_block(given, sender.shard) % block > 0
            is_inside &= not CACHE_KINDS[given.kind].begins_at_multiple or given.window % block > 0
            if has_window(given.kind) and (given.kind, given.window) == (wanted.kind, wanted.window) and is_inside:
                needs = NO_REUSE if receiver.engine.kind == "vllm" else MULTIPLE
                blocks = _block(given, sender.shard), _block(wanted, receiver.shard)
                yield Difference("block_tokens", *blocks, place, needs)


def _other_form(sender: Pool, receiver: Pool) -> Iterator[Difference]:
    """Rows whose form cannot be converted to the other side's."""
    scales = {(plane.layer, plane.part): plane for plane in sender.planes if is_scale(plane.part)}
    theirs_of = {(plane.layer, plane.part): plane for plane in receiver.planes if is_scale(plane.part)}
    for ours, theirs in common_planes(sender, receiver):
        place = f"layer {ours.layer} {ours.part}"
        mine = RowPlanes(ours, scales.get((ours.layer, f"{ours.part}_scale")))
        yours = RowPlanes(theirs, theirs_of.get((theirs.layer, f"{theirs.part}_scale")))
        part = base_part(ours.part)
        if ours.total_heads != theirs.total_heads:
            if part not in ATTENTION_PARTS:
                yield Difference("total_heads", ours.total_heads, theirs.total_heads, place, SAME_MODEL)
            continue  # else another model: reported elsewhere
        if not receiver.finishes_scores:
            yield from _if_other("scores", scores_of(ours), scores_of(theirs), place, SAME_SCORES)
        if part not in ATTENTION_PARTS and ours.codec.width != theirs.codec.width:
            yield Difference("width", ours.codec.width, theirs.codec.width, place, SAME_MODEL)
        else:
            yield from _other_row(mine, yours, place)
    parts = _parts(sender)
    for layer, needed in _parts(receiver).items():
        held = parts.get(layer, needed)
        if not held >= needed:
            parted = " ".join(sorted(held)), " ".join(sorted(needed))
            yield from _if_other("parts", *parted, f"layer {layer}", SAME_MODEL)


class RowPlanes(Value):
    """A plane of rows, and the plane of their scales if there is one."""

    plane: Plane
    scale: Plane | None


def _other_row(ours: RowPlanes, theirs: RowPlanes, place: str) -> Iterator[Difference]:
    """A row of one part that cannot become the other side's."""
    codecs, forms = (ours.plane.codec, theirs.plane.codec), (form_of(ours.plane), form_of(theirs.plane))
    rotations = rotation_of(ours.plane), rotation_of(theirs.plane)
    mine, yours = ours.scale, theirs.scale
    if rotations[0] != rotations[1] and not can_rotate(*codecs):
        yield Difference("rotation", *rotations, place, SAME_ROTATION)
    if not can_convert(*codecs):
        yield from _if_other("codec", *forms, place, SAME_CODEC)
        yield from _if_other("scale_codec", codecs[0].scale_codec, codecs[1].scale_codec, place, SAME_CODEC)
    elif is_same_row(*codecs) and rotations[0] == rotations[1]:
        if mine is not None and yours is not None and not is_same_row(mine.codec, yours.codec):
            yield from _if_other("codec", form_of(mine), form_of(yours), f"{place}_scale", SAME_CODEC)
        scales = codecs[0].scales, codecs[1].scales
        if codecs[0].name not in PLAIN and not is_same_scales(*scales):
            yield Difference("scales", spelled(scales[0]), spelled(scales[1]), place, SAME_SCALES)
    else:
        is_latent = "fp8_ds_mla" in [codec.name for codec in codecs]
        if is_latent and not (_is_dense(ours.plane) and _is_dense(theirs.plane)):
            needs = "rows whose numbers lie side by side"
            yield from _if_other("codec", _spread(ours.plane), _spread(theirs.plane), place, needs)
        if not all(row.plane.region == row.scale.region for row in (ours, theirs) if row.scale is not None):
            yield Difference("codec", *forms, place, "scales in the memory region of their rows")


def _changes(sender: Pool, receiver: Pool) -> Iterator[Difference]:
    for name in ("tp_size", "pp_size", "cp_size"):
        yield from _if_other(name, getattr(sender.shard, name), getattr(receiver.shard, name))
    if sender.shard.cp_size > 1 and receiver.shard.cp_size > 1:
        yield from _if_other("cp_interleave", sender.shard.cp_interleave, receiver.shard.cp_interleave)
    for ours, theirs in common_planes(sender, receiver):
        place = f"layer {ours.layer} {ours.part}"
        mine, yours = sender.groups[ours.group], receiver.groups[theirs.group]
        yield from _if_other("kind", _keeps(mine), _keeps(yours), place)
        yield from _if_other("block_tokens", mine.block_tokens, yours.block_tokens, place)
        yield from _if_other("codec", form_of(ours), form_of(theirs), place)
        if ours.codec.name in ROW_SCALED and theirs.codec.name in ROW_SCALED:
            yield from _if_other("scale_codec", ours.codec.scale_codec, theirs.codec.scale_codec, place)
        yield from _if_other("rotation", rotation_of(ours), rotation_of(theirs), place)
        yield from _if_other("scores", scores_of(ours), scores_of(theirs), place)
        if not is_same_scales(ours.codec.scales, theirs.codec.scales):
            yield Difference("scales", spelled(ours.codec.scales), spelled(theirs.codec.scales), place)
        yield from _if_other("layout", _layout(ours), _layout(theirs), place)


def _if_other(field: str, sender: object, receiver: object, place: str = "", needs: str = "") -> Iterator[Difference]:
    if sender != receiver:
        yield Difference(field, sender, receiver, place, needs)


def common_planes(sender: Pool, receiver: Pool) -> Iterator[tuple[Plane, Plane]]:
    """The planes of rows that both pools have, in either form. Planes of scales follow their rows."""
    mine = {(plane.layer, base_part(plane.part)): plane for plane in sender.planes}
    for theirs in receiver.planes:
        ours = mine.get((theirs.layer, base_part(theirs.part)))
        if ours is not None and not is_scale(theirs.part):
            yield ours, theirs


def _parts(pool: Pool) -> dict[int, set[str]]:
    """The parts of each layer, in whatever form."""
    parts: dict[int, set[str]] = {}
    for plane in pool.planes:
        if not is_scale(plane.part):
            parts.setdefault(plane.layer, set()).add(base_part(plane.part))
    return parts


def has_other_scores(senders: Iterable[Pool], receiver: Pool) -> bool:
    """Whether these ranks of an engine keep scores with a weight and the receiver without, or the reverse.

    Raises PeerError unless all ranks keep them alike.
    """
    forms = [
        {scores_of(plane) for plane in planes if has_scores(plane.part)}
        for planes in (chain.from_iterable(pool.planes for pool in senders), receiver.planes)
    ]
    if len(forms[0]) > 1:
        reason = f"scores: {' and '.join(sorted(forms[0]))}, must be alike on all ranks"
        raise PeerError("sender_ranks_mismatch", reason)
    return all(forms) and forms[0] != forms[1]


def _keeps(group: Group) -> str:
    return f"{group.kind} {group.window}" if group.window else group.kind


def _block(group: Group, shard: Shard) -> str:
    return f"{group.block_tokens} x {shard.cp_size} ranks" if shard.cp_size > 1 else str(group.block_tokens)


def form_of(plane: Plane) -> str:
    """The form of a plane's rows, for people to read."""
    codec = plane.codec
    return codec.name if codec.name in (*PLAIN, *POWERS, *ROW_SCALED) else f"{codec.name} of {codec.row_bytes} bytes"


def rotation_of(plane: Plane) -> str:
    """Whether its rows are multiplied by a Hadamard matrix, for people to read."""
    return "Hadamard" if is_rotated(plane.part) else "none"


def scores_of(plane: Plane) -> str:
    """Whether a weight was added to the scores in its rows, for people to read."""
    return "none" if not has_scores(plane.part) else "raw" if is_raw(plane.part) else "with a weight added"


def _is_dense(plane: Plane) -> bool:
    """True if the bytes of a row lie side by side."""
    return len(plane.element_axis) == 1 and plane.element_axis[0].stride == plane.codec.element_bytes


def _spread(plane: Plane) -> str:
    return form_of(plane) if _is_dense(plane) else f"{form_of(plane)}, {plane.element_axis[-1].stride} bytes apart"


def spelled(scales: Sequence[float]) -> str:
    """The scales of a plane, for people to read."""
    return "none" if not scales else f"{scales[0]:g}" if len(scales) == 1 else f"{len(scales)} from {scales[0]:g} on"


def _layout(plane: Plane) -> str:
    """The axes in the order of their strides, the largest first, for people to read."""
    axes = {"head": plane.head_stride if plane.heads > 1 else 0, "block": plane.block_stride}
    for name, axis in (("token", plane.token_axis), ("element", plane.element_axis)):
        for depth, step in enumerate(axis):
            axes[name + "'" * depth] = step.stride if step.count > 1 else 0
    return " > ".join(sorted((name for name in axes if axes[name]), key=lambda name: -axes[name]))


def _merged(differences: Iterable[Difference]) -> list[Difference]:
    """One for each pair of values, with its first place and how many more there are."""
    found: dict[tuple[str, str, str, str], list[Difference]] = {}
    for each in differences:
        found.setdefault((each.field, str(each.sender), str(each.receiver), each.needs), []).append(each)
    merged = []
    for alike in found.values():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        merged.append(replace(alike[0], place=alike[0].place + more))
    return merged
