"""The scales that a sender's ranks have for a receiver's planes, and whether the receiver has the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import Pool

from .compat import Difference, common_planes, spelled
from .layers import align
from .wire import PLAIN, is_same_scales


def sender_scales(senders: Sequence[Pool], receiver: Pool) -> tuple[Scales, ...]:
    """The scales of the ranks `senders` of one engine, for planes that have the same codec at the receiver.

    One for a plane if all heads have the same one, in each part of its layer; else one for each head.
    """
    found: dict[tuple[int, str], dict[int, float]] = {}  # plane -> head -> scale
    for sender in senders:
        for ours, theirs in common_planes(align(sender, receiver), receiver):
            codec = ours.codec
            if codec.name != theirs.codec.name or codec.name not in PLAIN:
                continue
            heads = found.setdefault((theirs.layer, theirs.part), {})
            first = max(ours.first_head, theirs.first_head)
            for head in range(first, min(ours.first_head + ours.heads, theirs.first_head + theirs.heads)):
                scale = codec.scales[head - ours.first_head] if len(codec.scales) > 1 else (*codec.scales, 1.0)[0]
                heads.setdefault(head, scale)
    whole = {
        (plane.layer, plane.part): tuple(scale for _, scale in sorted(heads.items()))
        for plane in receiver.planes
        if len(heads := found.get((plane.layer, plane.part), {})) == plane.heads
    }
    by_head = {layer for (layer, _), scales in whole.items() if len(set(scales)) > 1}
    return tuple(
        Scales(layer, part, scales if layer in by_head else scales[:1]) for (layer, part), scales in whole.items()
    )


def other_scales(scales: Sequence[Scales], receiver: Pool) -> Difference | None:
    """The first plane of the receiver whose scales are not these; None if there is none."""
    held = {(plane.layer, plane.part): plane.codec.scales for plane in receiver.planes}
    for each in scales:
        ours = held[each.layer, each.part]
        if not is_same_scales(each.scales, ours):
            place = f"layer {each.layer} {each.part}"
            return Difference("scales", spelled(each.scales), spelled(ours), place, "scales=requantize")
    return None
