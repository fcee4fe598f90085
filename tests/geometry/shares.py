"""Engines with context parallelism, written and compared token by token: what a rank holds is said here once more."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from kvbridge_proto.pool import Plane, Pool, Shard
from kvbridge_proto.words import Blocks

from kvbridge.geometry.comb import Comb
from kvbridge.geometry.plan import Plan
from kvbridge.geometry.tokens import BlockTable
from tests.oracle import POISON, Held, Shape, build, gather, places_of, put_rows, rows, scatter, table_of


def engine(shape: Shape, cp_size: int, interleave: int) -> list[Held]:
    """All ranks: each tensor-parallel rank of the shape is `cp_size` ranks with the same heads and other tokens."""
    size = shape.tp_size * cp_size
    ranks = []
    for rank in range(size):
        held = build(shape, rank // cp_size)
        shard = Shard(tp_rank=rank, tp_size=size, cp_rank=rank % cp_size, cp_size=cp_size, cp_interleave=interleave)
        ranks.append(Held(msgspec.structs.replace(held.pool, shard=shard), held.memory))
    return ranks


def tokens_of(pool: Pool, tokens: range) -> list[int]:
    """The tokens that a rank holds, by the definition."""
    shard = pool.shard
    return [token for token in tokens if (token // shard.cp_interleave) % shard.cp_size == shard.cp_rank]


def table_for(pool: Pool, end: int, seed: int) -> tuple[int, ...]:
    return table_of(pool, len(tokens_of(pool, range(end))), seed)


def write(held: Held, table: Sequence[int], tokens: range) -> None:
    """The rows of a request whose blocks are `table`: the rank's own tokens lie one after another."""
    own = tokens_of(held.pool, range(tokens.stop))
    at = [index for index, token in enumerate(own) if token in tokens]
    for plane in held.pool.planes:
        put_rows(held, plane, _places(held, plane, table, at), rows(plane, range(tokens.stop))[[own[i] for i in at]])


def run(planned: Plan, source: Held, source_table: Sequence[int], sink: Held, sink_table: Sequence[int]) -> None:
    """Carry out a plan through one poisoned slot."""
    ours, theirs = _tables(source, source_table), _tables(sink, sink_table)
    for index in range(planned.chunks):
        chunk = planned.chunk(index)
        slot = np.full(chunk.size_bytes, POISON, np.uint8)
        gather(source, planned.source_moves(chunk, ours), slot)
        scatter(sink, planned.sink_moves(chunk, theirs), slot)


def wrong(held: Held, before: Held, table: Sequence[int], tokens: range) -> str:
    """Empty if `held` is `before` with just the rows of `tokens` written; rows after them may hold anything."""
    found, expected = held.copy(), before.copy()
    write(expected, table, tokens)
    block_tokens = held.pool.groups[0].block_tokens
    tail = list(range(len(tokens_of(held.pool, range(tokens.stop))), len(table) * block_tokens))
    for each in (found, expected):
        for plane in each.pool.planes:
            shape = (len(tail), plane.heads, plane.codec.row_bytes)
            put_rows(each, plane, _places(each, plane, table, tail), np.zeros(shape, np.uint8))
    for region, (ours, theirs) in enumerate(zip(found.memory, expected.memory, strict=True)):
        if not np.array_equal(ours, theirs):
            return f"region {region} byte {int(np.flatnonzero(ours != theirs)[0])} of {held.pool.shard}"
    return ""


def _places(held: Held, plane: Plane, table: Sequence[int], at: Sequence[int]) -> np.ndarray:
    block_tokens = held.pool.groups[plane.group].block_tokens
    return places_of(table, range(len(table) * block_tokens), block_tokens)[list(at)]


def _tables(held: Held, table: Sequence[int]) -> dict[int, BlockTable]:
    pool = held.pool
    return {0: BlockTable.of(pool.groups[0], Blocks(0, 0, tuple(table)), share=Comb.of(pool.shard))}
