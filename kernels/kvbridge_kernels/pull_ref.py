"""Blocks -> blocks on a CPU, in plain torch: the reference for the pull kernel, and what runs without a GPU.

Gathers, sums and scatters a tile of rows at a time, while it is in a cache. There is no slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .digest_ref import as_int64, sum_of, word_bytes
from .gather_ref import gather_rows
from .places import Places
from .prepared_pull import Pair, PlacedPull, planes_of
from .scatter_ref import scatter_rows
from .segment import Segment
from .tables import Work

# Bytes of a tile on the wire. With half as much, the calls made 64 MiB take 1.4 times as long (2 cores, AMD EPYC,
# 2026-11).
TILE_BYTES = 1 << 20


class Cut(NamedTuple):
    """Consecutive places of a pair, from number `first` on."""

    first: int
    sender: Places
    receiver: Places


def pull(chunk: PlacedPull, sums: torch.Tensor | None, work: Work) -> None:
    """Write the receiver's rows from the sender's. Adds the sum64 of the chunk's slot to `sums`, int64 [1]."""
    chunk.check_digest(sums is not None)
    total = 0
    known: dict[object, list[Cut]] = {}
    for pair in chunk.pairs():
        planes, places = _tile_of(pair.sender)
        blocks = pair.sender.field.block_tokens, pair.receiver.field.block_tokens
        key = (id(pair.sender.places), id(pair.receiver.places), *blocks, places)
        if key not in known:
            known[key] = list(_cuts(pair, places))
        for first in range(0, pair.sender.field.planes.count, planes):
            count = min(planes, pair.sender.field.planes.count - first)
            some = Pair(planes_of(pair.sender, first, count), planes_of(pair.receiver, first, count))
            total += sum(_pull_tile(some, cut, sums is not None, work) for cut in known[key])
    if sums is not None:
        sums.add_(as_int64(total))


def _tile_of(segment: Segment) -> tuple[int, int]:
    """How many planes and how many places one tile has."""
    if segment.plane_bytes <= TILE_BYTES:
        return TILE_BYTES // segment.plane_bytes, segment.places.count
    return 1, max(1, TILE_BYTES * segment.places.count // segment.plane_bytes)


def _cuts(pair: Pair, most: int) -> Iterator[Cut]:
    """The places in parts of about `most`, each from the start of a block, on the side with longer blocks."""
    sender, receiver = pair.sender, pair.receiver
    longer = max(sender, receiver, key=lambda segment: segment.field.block_tokens)
    count, block = sender.places.count, longer.field.block_tokens
    if count <= most:
        yield Cut(0, sender.places, receiver.places)
        return
    first, step = 0, max(block, most // block * block)
    end = step - int(longer.places.index[0]) % block
    while first < count:
        end = min(end, count)
        yield Cut(first, Places(sender.places.index[first:end]), Places(receiver.places.index[first:end]))
        first, end = end, end + step


def _pull_tile(pair: Pair, cut: Cut, has_sums: bool, work: Work) -> int:
    """Move one tile. Returns the sum over its rows if `has_sums`, else 0."""
    sender, receiver = pair
    planes, heads, row = sender.field.planes.count, sender.field.heads.count, sender.wire_row_bytes
    head_bytes = cut.sender.count * row
    tile = work.scratch.take("tile", planes * heads * head_bytes, torch.device("cpu")).view(planes, -1)
    gather_rows(sender.field, cut.sender, tile, sender.cast, work.scratch)
    total = 0
    for line in range(planes * heads if has_sums else 0):
        plane, head = divmod(line, heads)
        start = sender.slot_offset + plane * sender.slot_pitch + (head * sender.places.count + cut.first) * row
        total += sum_of(tile[plane, head * head_bytes : (head + 1) * head_bytes], start, word_bytes(row))
    scatter_rows(receiver.field, cut.receiver, tile, receiver.cast, work.scratch)
    return total
