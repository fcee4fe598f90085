"""Assigns rows to senders: an exact cover of the receiver's layers x heads x tokens by their holdings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import msgspec
import numpy as np
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool

from ..errors import PeerError
from .layers import align, align_all, unfilled
from .token_shard import TokenShard
from .wire import is_scale


@dataclass(frozen=True, slots=True)
class Holding:
    """Layers [first_layer, end_layer) x heads [first_head, end_head), each layer with these parts."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    parts: frozenset[str]


def holdings(pool: Pool) -> list[Holding]:
    """What a pool holds, in layer order. Neighbouring layers that are held alike make one holding.

    Scales are left out: they are held where their rows are, or the rows have none.
    """
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for plane in pool.planes:
        rows.setdefault(plane.part, []).append((plane.layer, plane.first_head, plane.heads))
    held: list[Holding] = []
    for parts, held_alike in _alike({part: each for part, each in rows.items() if not is_scale(part)}):
        first = before = held_alike[0]
        for row in held_alike[1:]:
            if row != (before[0] + 1, *first[1:]):
                held.append(Holding(first[0], before[0] + 1, first[1], first[1] + first[2], parts))
                first = row
            before = row
        held.append(Holding(first[0], before[0] + 1, first[1], first[1] + first[2], parts))
    return held


def _alike(rows: dict[str, list[tuple[int, int, int]]]) -> Iterator[tuple[frozenset[str], list[tuple[int, int, int]]]]:
    """The rows (layer, first head, heads) that the same parts have: mostly all parts, so that is checked first."""
    lists = [sorted(each) for each in rows.values()]
    if lists and all(each == lists[0] for each in lists):
        yield frozenset(rows), lists[0]
        return
    parts: dict[tuple[int, int, int], set[str]] = {}
    for part, each in rows.items():
        for row in each:
            parts.setdefault(row, set()).add(part)
    alike: dict[frozenset[str], list[tuple[int, int, int]]] = {}
    for row, names in parts.items():
        alike.setdefault(frozenset(names), []).append(row)
    for key in sorted(alike, key=sorted):
        yield key, sorted(alike[key])


def assign(senders: Sequence[Pool], receiver: Pool) -> tuple[tuple[Take, ...], ...]:
    """For each sender the rows that the receiver takes from it. Together they are all its rows, none twice.

    Under context parallelism a row is taken from several senders, from each the tokens that both hold. If several
    senders hold a head of the same tokens, the receivers spread over them by their tensor-parallel rank. Draft layers
    that no sender has are left out: see unfilled.py. Raises PeerError naming the rows that no sender holds.
    """
    aligned = align_all(senders, receiver)
    held = [holdings(pool) for pool in aligned]
    shares = _shares(senders, receiver)
    takes: list[list[Take]] = [[] for _ in senders]
    missing = unfilled(aligned, receiver)
    needed = [plane for plane in receiver.planes if plane.layer not in missing] if missing else receiver.planes
    for need in holdings(msgspec.structs.replace(receiver, planes=tuple(needed))):
        borders = {need.first_layer, need.end_layer}
        for each in held:
            for have in each:
                borders |= {have.first_layer, have.end_layer}
        layers = sorted(layer for layer in borders if need.first_layer <= layer <= need.end_layer)
        for first_layer, end_layer in pairwise(layers):
            cell = Holding(first_layer, end_layer, need.first_head, need.end_head, need.parts)
            for index, take in _cut_heads(held, shares, cell, receiver.shard.tp_rank):
                _append(takes[index], take)
    return tuple(tuple(each) for each in takes)


def common(sender: Pool, receiver: Pool) -> tuple[Take, ...]:
    """All rows that both hold, whether they are assigned or not."""
    held = holdings(align(sender, receiver))
    holders: dict[int, list[int]] = {}
    for index, have in enumerate(held):
        for layer in range(have.first_layer, have.end_layer):
            holders.setdefault(layer, []).append(index)
    takes: list[Take] = []
    for need in holdings(receiver):
        able = {index for layer in range(need.first_layer, need.end_layer) for index in holders.get(layer, ())}
        for have in [held[index] for index in sorted(able)]:
            layers = max(have.first_layer, need.first_layer), min(have.end_layer, need.end_layer)
            heads = max(have.first_head, need.first_head), min(have.end_head, need.end_head)
            if layers[0] < layers[1] and heads[0] < heads[1] and have.parts >= need.parts:
                _append(takes, Take(*layers, *heads))
    return tuple(takes)


@dataclass(frozen=True, slots=True)
class Share:
    """The senders that hold the same tokens. `tokens` names these tokens, unless every sender holds all."""

    senders: frozenset[int]
    tokens: str


def _shares(senders: Sequence[Pool], receiver: Pool) -> list[Share]:
    """The shares that hold tokens of the receiver. A share may have no sender."""
    shards = [pool.shard for pool in senders]
    splits = sorted({(shard.cp_size, shard.cp_interleave if shard.cp_size > 1 else 1) for shard in shards})
    if len(splits) > 1:
        some = (f"cp_size: {size}, cp_interleave {interleave} at some ranks" for size, interleave in splits)
        raise PeerError("sender_ranks_mismatch", *some)
    if not splits or splits[0][0] == 1:
        return [Share(frozenset(range(len(senders))), "")]
    size, interleave = splits[0]
    return [
        Share(
            frozenset(index for index, shard in enumerate(shards) if shard.cp_rank == rank),
            f", tokens: cp rank {rank} of {size} (interleave {interleave})",
        )
        for rank in _ranks_of(size, interleave, receiver)
    ]


def _ranks_of(size: int, interleave: int, receiver: Pool) -> list[int]:
    """Which of `size` context-parallel ranks hold tokens that this receiver also holds."""
    token_shard = TokenShard.of(receiver.shard)
    periods = lcm(size * interleave, token_shard.period) // token_shard.period
    tokens = token_shard.tokens(0, periods * len(token_shard.residues))
    return [int(rank) for rank in np.unique(tokens // interleave % size)]


def _cut_heads(
    held: Sequence[Sequence[Holding]], shares: Sequence[Share], cell: Holding, receiver_rank: int
) -> list[tuple[int, Take]]:
    """The takes for one run of layers, in all of which every sender holds the same heads."""
    holders: list[tuple[int, int, int]] = []
    for index, each in enumerate(held):
        for have in each:
            if have.first_layer <= cell.first_layer < have.end_layer and have.parts >= cell.parts:
                first, end = max(have.first_head, cell.first_head), min(have.end_head, cell.end_head)
                if first < end:
                    holders.append((index, first, end))
    borders = {cell.first_head, cell.end_head}
    for _, first, end in holders:
        borders |= {first, end}
    heads = sorted(borders)
    cut: list[tuple[int, Take]] = []
    for first_head, end_head in pairwise(heads):
        holding = {index for index, first, end in holders if first <= first_head and end_head <= end}
        for share in shares:
            able = sorted(holding & share.senders)
            if not able:
                raise PeerError(
                    "rows_not_held",
                    f"layers: the receiver needs [{cell.first_layer}, {cell.end_layer}), "
                    f"heads [{first_head}, {end_head}), "
                    f"parts {' '.join(sorted(cell.parts))}{share.tokens}; none of {len(held)} senders holds them",
                )
            cut.append((able[receiver_rank % len(able)], Take(cell.first_layer, cell.end_layer, first_head, end_head)))
    return cut


def _append(takes: list[Take], take: Take) -> None:
    """Add a take, joined with the last one if the two make a rectangle."""
    last = takes[-1] if takes else take
    same_layers = (last.first_layer, last.end_layer) == (take.first_layer, take.end_layer)
    same_heads = (last.first_head, last.end_head) == (take.first_head, take.end_head)
    if takes and same_layers and last.end_head == take.first_head:
        takes[-1] = Take(last.first_layer, last.end_layer, last.first_head, take.end_head)
    elif takes and same_heads and last.end_layer == take.first_layer:
        takes[-1] = Take(last.first_layer, take.end_layer, last.first_head, last.end_head)
    else:
        takes.append(take)
