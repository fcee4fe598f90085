"""Assigns rows to senders: for each part an exact cover of the receiver's layers x heads x tokens. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
from math import lcm

import msgspec
import numpy as np
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Pool

from ..cache_kinds import is_one_row
from ..errors import PeerError
from ..values import Value
from .layers import align, align_all, unfilled
from .tokens import TokenShard
from .wire import base_part, is_scale


class Holding(Value):
    """Layers [first_layer, end_layer) x heads [first_head, end_head) of one part."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


Holdings = dict[str, list[Holding]]  # by part; each part's in layer order


def holdings(pool: Pool) -> Holdings:
    """What a pool holds of each part. Neighbouring layers that are held alike make one holding.

    Scales are left out: they are held where their rows are, or the rows have none.
    """
    runs: dict[str, list[list[int]]] = {}  # [first layer, end layer, first head, heads], as the planes come
    last: dict[str, list[int]] = {}
    for plane in pool.planes:  # one step each, as a receiver does this for all planes of all senders
        run = last.get(plane.part)
        if run is not None and run[1] == plane.layer and run[2] == plane.first_head and run[3] == plane.heads:
            run[1] += 1
        else:
            run = last[plane.part] = [plane.layer, plane.layer + 1, plane.first_head, plane.heads]
            runs.setdefault(plane.part, []).append(run)
    return {part: _joined(each) for part, each in runs.items() if not is_scale(part)}


def _joined(runs: list[list[int]]) -> list[Holding]:
    """The runs of one part in layer order, as few holdings."""
    joined: list[Holding] = []
    for first_layer, end_layer, first_head, heads in sorted(runs):
        new = Holding(first_layer, end_layer, first_head, first_head + heads)
        if joined and joined[-1].end_layer == first_layer:
            before = joined[-1]
            if (before.first_head, before.end_head) == (new.first_head, new.end_head):
                joined[-1] = Holding(before.first_layer, end_layer, new.first_head, new.end_head)
                continue
        joined.append(new)
    return joined


def _of_part(held: Holdings, part: str) -> list[Holding]:
    """What is held of a part, in any form, in layer order."""
    forms = [each for name, each in held.items() if base_part(name) == base_part(part)]
    return forms[0] if len(forms) == 1 else sorted(chain(*forms), key=lambda holding: holding.first_layer)


def assign(senders: Sequence[Pool], receiver: Pool) -> tuple[tuple[Take, ...], ...]:
    """For each sender the rows that the receiver takes from it. Together they are all its rows, none twice.

    Under context parallelism a row is taken from several senders, from each the tokens that both hold; a state is of
    all tokens, and every rank has its own. If several senders hold a head of the same tokens, the receiver takes it
    from one that it takes other rows from; else the receivers spread over the holders by their tensor-parallel rank.
    So parts that every rank has whole come last. Draft layers that no sender has are left out: see unfilled.py. Raises
    PeerError naming the rows that no sender holds.
    """
    aligned = align_all(senders, receiver)
    held = [holdings(pool) for pool in aligned]
    shares, all_senders = _shares(senders, receiver), [Share(frozenset(range(len(senders))), "")]
    takes: list[list[Take]] = [[] for _ in senders]
    missing = unfilled(aligned, receiver)
    needed = [plane for plane in receiver.planes if plane.layer not in missing] if missing else receiver.planes
    wanted = holdings(msgspec.structs.replace(receiver, planes=tuple(needed)))
    whole = {plane.part for plane in receiver.planes if plane.heads == plane.total_heads}
    states = {plane.part for plane in receiver.planes if is_one_row(receiver.groups[plane.group].kind)}
    for part in sorted(wanted, key=lambda part: (part in whole, part)):
        for cell, holders in _cells(wanted[part], [_of_part(each, part) for each in held]):
            for first_head, end_head, able in _holders_of_heads(cell, holders):
                heads = first_head, end_head
                for share in all_senders if part in states else shares:
                    chosen = [index for index in able if index in share.senders]
                    if not chosen:
                        raise _not_held(part, cell, heads, share, len(senders))
                    chosen = [index for index in chosen if takes[index]] or chosen
                    index = chosen[receiver.shard.tp_rank % len(chosen)]
                    _append(takes[index], Take(cell.first_layer, cell.end_layer, *heads, part))
    return tuple(_of_all_parts(each, wanted) for each in takes)


def _not_held(part: str, cell: Holding, heads: tuple[int, int], share: Share, senders: int) -> PeerError:
    return PeerError(
        "rows_not_held",
        f"layers: the receiver needs [{cell.first_layer}, {cell.end_layer}), heads [{heads[0]}, {heads[1]}), "
        f"part {part}{share.tokens}; none of {senders} senders holds them",
    )


def common(sender: Pool, receiver: Pool) -> tuple[Take, ...]:
    """All rows that both hold, whether they are assigned or not."""
    held, wanted = holdings(align(sender, receiver)), holdings(receiver)
    takes: list[Take] = []
    for part in sorted(wanted):
        for cell, holders in _cells(wanted[part], [_of_part(held, part)]):
            for _, first, end in holders:
                _append(takes, Take(cell.first_layer, cell.end_layer, first, end, part))
    return _of_all_parts(takes, wanted)


class Share(Value):
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


def _cells(
    needs: Sequence[Holding], held: Sequence[Sequence[Holding]]
) -> Iterator[tuple[Holding, list[tuple[int, int, int]]]]:
    """The needs cut into runs of layers in which every sender holds the same heads, with (sender, first, end) of them.

    All are of one part.
    """
    borders = sorted({layer for each in held for have in each for layer in (have.first_layer, have.end_layer)})
    for need in needs:
        inside = borders[bisect_right(borders, need.first_layer) : bisect_left(borders, need.end_layer)]
        for first_layer, end_layer in pairwise((need.first_layer, *inside, need.end_layer)):
            holders: list[tuple[int, int, int]] = []
            for index, each in enumerate(held):
                at = bisect_right(each, first_layer, key=lambda have: have.first_layer) - 1
                if at >= 0 and first_layer < each[at].end_layer:
                    first, end = max(each[at].first_head, need.first_head), min(each[at].end_head, need.end_head)
                    if first < end:
                        holders.append((index, first, end))
            yield Holding(first_layer, end_layer, need.first_head, need.end_head), holders


def _holders_of_heads(cell: Holding, holders: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, list[int]]]:
    """The heads of a cell, cut so that each sender holds all or none of a run: (first, end, who holds them)."""
    borders = {cell.first_head, cell.end_head}
    for _, first, end in holders:
        borders |= {first, end}
    for first_head, end_head in pairwise(sorted(borders)):
        yield first_head, end_head, [index for index, first, end in holders if first <= first_head and end_head <= end]


def _append(takes: list[Take], take: Take) -> None:
    """Add a take, joined with the last one if the two make a rectangle of one part."""
    last = takes[-1] if takes else take
    same_layers = (last.first_layer, last.end_layer) == (take.first_layer, take.end_layer)
    same_heads = (last.first_head, last.end_head) == (take.first_head, take.end_head)
    if takes and last.part == take.part and same_layers and last.end_head == take.first_head:
        takes[-1] = Take(last.first_layer, last.end_layer, last.first_head, take.end_head, take.part)
    elif takes and last.part == take.part and same_heads and last.end_layer == take.first_layer:
        takes[-1] = Take(last.first_layer, take.end_layer, last.first_head, last.end_head, take.part)
    else:
        takes.append(take)


def _of_all_parts(takes: Sequence[Take], parts: Collection[str]) -> tuple[Take, ...]:
    """The takes, without a part if all of these have the same: mostly, and older agents know no others."""
    by_part: dict[str, list[Take]] = {part: [] for part in parts}
    for take in takes:
        by_part[take.part].append(msgspec.structs.replace(take, part=""))
    distinct = {tuple(each) for each in by_part.values()}
    return distinct.pop() if len(distinct) == 1 else tuple(takes)
