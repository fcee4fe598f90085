"""Pairs of planes: the same heads of one (layer, part) in the source's pool and in the sink's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Codec, Plane, Pool

from ..errors import PeerError
from .wire import wire_codec


@dataclass(frozen=True, slots=True)
class Strip:
    """`heads` heads that move together: from `source_head` on in one plane, from `sink_head` on in the other.

    In a slot it is `[head][unit][row]` in the wire codec; a unit is `unit_tokens` tokens (1 unless folded).
    """

    source: Plane
    source_head: int
    sink: Plane
    sink_head: int
    heads: int
    wire: Codec
    unit_tokens: int = 1
    source_scale: Plane | None = None
    sink_scale: Plane | None = None

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of all heads in a slot."""
        return self.heads * self.wire.row_bytes


def pair(source: Pool, sink: Pool, takes: Sequence[Take]) -> list[Strip]:
    """One strip for each of the sink's planes that a take touches. Raises PeerError for rows a side lacks."""
    theirs = {(plane.layer, plane.part): plane for plane in source.planes}
    ours: dict[int, list[Plane]] = {}
    for plane in sink.planes:
        ours.setdefault(plane.layer, []).append(plane)
    strips: list[Strip] = []
    taken: dict[int, list[Take]] = {}
    for take in takes:
        if take.first_layer >= take.end_layer or take.first_head >= take.end_head:
            raise PeerError("bad_take", f"take: {_spell(take)} is empty")
        for layer in range(take.first_layer, take.end_layer):
            if layer not in ours:
                raise PeerError("bad_take", f"take: {_spell(take)}, the sink holds no layer {layer}")
            before = taken.setdefault(layer, [])
            for other in before:
                if take.first_head < other.end_head and other.first_head < take.end_head:
                    raise PeerError("bad_take", f"take: {_spell(take)} overlaps {_spell(other)}")
            before.append(take)
            strips += [_strip(theirs.get((layer, plane.part)), plane, take) for plane in ours[layer]]
    return strips


def _strip(source: Plane | None, sink: Plane, take: Take) -> Strip:
    for side, plane in (("source", source), ("sink", sink)):
        held = (plane.first_head, plane.first_head + plane.heads) if plane else (0, 0)
        if take.first_head < held[0] or take.end_head > held[1]:
            raise PeerError(
                "bad_take",
                f"take: {_spell(take)}, the {side} holds heads [{held[0]}, {held[1]}) "
                f"of layer {sink.layer} {sink.part}",
            )
    assert source is not None
    source_head, sink_head = take.first_head - source.first_head, take.first_head - sink.first_head
    heads = take.end_head - take.first_head
    wire = wire_codec(source.codec, source_head, sink.codec, sink_head, heads)
    return Strip(source, source_head, sink, sink_head, heads, wire)


def split_heads(strip: Strip, heads: int) -> list[Strip]:
    """The strip as several of at most `heads` heads each."""
    if strip.heads <= heads:
        return [strip]
    pieces = []
    for first in range(0, strip.heads, heads):
        count = min(heads, strip.heads - first)
        source_head, sink_head = strip.source_head + first, strip.sink_head + first
        wire = wire_codec(strip.source.codec, source_head, strip.sink.codec, sink_head, count)
        pieces.append(replace(strip, source_head=source_head, sink_head=sink_head, heads=count, wire=wire))
    return pieces


def _spell(take: Take) -> str:
    return f"layers [{take.first_layer}, {take.end_layer}) heads [{take.first_head}, {take.end_head})"
