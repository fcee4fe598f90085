"""Pairs of planes: the same heads of one (layer, part) in the sender's pool and in the receiver's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Codec, Plane, Pool

from ..errors import PeerError
from .latent_parts import LATENT_FP8, is_cuttable, latent_parts
from .wire import ROW_SCALED, SCALED_ROWS, base_part, is_rotated, is_same_row, is_scale, wire_codec


@dataclass(frozen=True, slots=True)
class PlanePair:
    """`heads` heads that move together: from `sender_head` on in one plane, from `receiver_head` on in the other.

    In a slot they are `[head][unit][row]` in the wire codec; a unit is `unit_tokens` tokens: those of a row, or of
    several if coalesced. If rows with a scale each are converted, `sender_scale` and `receiver_scale` are the planes of
    these scales. `rotates`: only one side's rows are multiplied by a Hadamard matrix, so the receiver multiplies them
    by it.
    """

    sender: Plane
    sender_head: int
    receiver: Plane
    receiver_head: int
    heads: int
    wire: Codec
    unit_tokens: int = 1
    sender_scale: Plane | None = None
    receiver_scale: Plane | None = None
    rotates: bool = False

    @property
    def is_converted(self) -> bool:
        """True if rows of the two sides differ, the scales of their planes aside."""
        return self.rotates or not is_same_row(self.sender.codec, self.receiver.codec)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of all heads in a slot."""
        return self.heads * self.wire.row_bytes


class _Side:
    """The planes of one pool by layer and part."""

    def __init__(self, name: str, pool: Pool) -> None:
        self._name, self._pool = name, pool
        self._planes = {(plane.layer, base_part(plane.part)): plane for plane in pool.planes}

    @cached_property
    def _parts(self) -> dict[int, list[str]]:
        """The parts of each layer but scales, in the planes' order."""
        parts: dict[int, list[str]] = {}
        for plane in self._pool.planes:
            if not is_scale(plane.part):
                parts.setdefault(plane.layer, []).append(plane.part)
        return parts

    def parts(self, take: Take, layer: int) -> Sequence[str]:
        """The parts of a layer that a take names. Raises PeerError if there are none."""
        held = self._parts.get(layer, [])
        found = [take.part] if take.part in held else [] if take.part else held
        if not found:
            of = f" {take.part}" if take.part else ""
            raise PeerError("bad_take", f"take: {_spell(take)}, the {self._name} holds no layer {layer}{of}")
        return found

    def held(self, layer: int, part: str, take: Take) -> Plane:
        """The plane of a part, in either form. Raises PeerError if it lacks heads of the take."""
        plane = self._planes.get((layer, base_part(part)))
        first, end = (plane.first_head, plane.first_head + plane.heads) if plane else (0, 0)
        if plane is None or take.first_head < first or take.end_head > end:
            raise PeerError(
                "bad_take",
                f"take: {_spell(take)}, the {self._name} holds heads [{first}, {end}) of layer {layer} {part}",
            )
        return plane

    def own_scale(self, plane: Plane, take: Take) -> Plane | None:
        """The plane of the scales, if the rows of `plane` have a scale each."""
        return self.held(plane.layer, f"{plane.part}_scale", take) if plane.codec.name in ROW_SCALED else None


def pair_planes(sender: Pool, receiver: Pool, takes: Sequence[Take]) -> list[PlanePair]:
    """Plane pairs for all of the receiver's rows that a take touches. Raises PeerError for rows a side lacks.

    One for each plane, two for a latent that is cut. If both sides keep a plane's rows alike, one for its scales too.
    """
    theirs, ours = _Side("sender", sender), _Side("receiver", receiver)
    pairs: list[PlanePair] = []
    taken: dict[tuple[int, str], list[Take]] = {}
    for take in takes:
        if take.first_layer >= take.end_layer or take.first_head >= take.end_head:
            raise PeerError("bad_take", f"take: {_spell(take)} is empty")
        for layer in range(take.first_layer, take.end_layer):
            for part in ours.parts(take, layer):
                if len(takes) > 1:
                    _take_once(taken.setdefault((layer, part), []), take)
                pairs += _pairs(theirs, ours, layer, part, take)
    return pairs


def _take_once(before: list[Take], take: Take) -> None:
    """Add a take to those of the same layer and part. Raises PeerError if it has heads in common with one."""
    for other in before:
        if take.first_head < other.end_head and other.first_head < take.end_head:
            raise PeerError("bad_take", f"take: {_spell(take)} overlaps {_spell(other)}")
    before.append(take)


def _pairs(sender: _Side, receiver: _Side, layer: int, part: str, take: Take) -> Iterator[PlanePair]:
    theirs, ours = sender.held(layer, part, take), receiver.held(layer, part, take)
    rotates = is_rotated(theirs.part) != is_rotated(ours.part)
    if is_same_row(theirs.codec, ours.codec) and not rotates:
        yield _plane_pair(theirs, ours, take)
        if ours.codec.name in SCALED_ROWS:
            scales = f"{part}_scale"
            yield _plane_pair(sender.held(layer, scales, take), receiver.held(layer, scales, take), take)
    elif LATENT_FP8 in (theirs.codec.name, ours.codec.name):
        if not (is_cuttable(theirs) and is_cuttable(ours)):
            raise PeerError("bad_take", f"take: {_spell(take)}, rows of layer {layer} {part} cannot be cut into tiles")
        for one, other in zip(latent_parts(theirs), latent_parts(ours), strict=True):
            heads = one.plane.heads
            wire = wire_codec(one.plane.codec, 0, other.plane.codec, 0, heads)
            yield PlanePair(one.plane, 0, other.plane, 0, heads, wire, ours.row_tokens, one.scale, other.scale)
    else:
        pair = _plane_pair(theirs, ours, take, rotates)
        yield replace(pair, sender_scale=sender.own_scale(theirs, take), receiver_scale=receiver.own_scale(ours, take))


def _plane_pair(sender: Plane, receiver: Plane, take: Take, rotates: bool = False) -> PlanePair:
    sender_head, receiver_head = take.first_head - sender.first_head, take.first_head - receiver.first_head
    heads = take.end_head - take.first_head
    wire = wire_codec(sender.codec, sender_head, receiver.codec, receiver_head, heads, rotates)
    return PlanePair(sender, sender_head, receiver, receiver_head, heads, wire, receiver.row_tokens, rotates=rotates)


def split_heads(pair: PlanePair, heads: int) -> list[PlanePair]:
    """The pair as several pairs of at most `heads` heads each."""
    if pair.heads <= heads:
        return [pair]
    pieces = []
    for first in range(0, pair.heads, heads):
        count = min(heads, pair.heads - first)
        sender_head, receiver_head = pair.sender_head + first, pair.receiver_head + first
        codecs = pair.sender.codec, sender_head, pair.receiver.codec, receiver_head
        wire = wire_codec(*codecs, count, pair.rotates)
        pieces.append(replace(pair, sender_head=sender_head, receiver_head=receiver_head, heads=count, wire=wire))
    return pieces


def _spell(take: Take) -> str:
    part = f" of {take.part}" if take.part else ""
    return f"layers [{take.first_layer}, {take.end_layer}) heads [{take.first_head}, {take.end_head}){part}"
