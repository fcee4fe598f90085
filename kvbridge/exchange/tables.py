"""Block tables as requests bring them: checked when they come in, never changed after. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from kvbridge_proto.pool import Pool
from kvbridge_proto.words import Blocks

from ..errors import EngineError
from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable


def extended(
    tables: Mapping[int, BlockTable], pool: Pool, pieces: Sequence[Blocks], end_token: int
) -> dict[int, BlockTable]:
    """`tables` with `pieces` appended. Raises EngineError if they are not whole up to `end_token` in every group."""
    grown = _appended(tables, pool, pieces)
    _check(grown, pool, 0, end_token)
    return grown


def tables_of(pool: Pool, pieces: Sequence[Blocks], first_token: int, end_token: int) -> dict[int, BlockTable]:
    """The tables of a want. Raises EngineError if they do not cover tokens [first_token, end_token)."""
    tables = _appended({}, pool, pieces)
    _check(tables, pool, first_token, end_token)
    return tables


def _appended(tables: Mapping[int, BlockTable], pool: Pool, pieces: Sequence[Blocks]) -> dict[int, BlockTable]:
    grown = dict(tables)
    for piece in pieces:
        if piece.group >= len(pool.groups):
            raise EngineError("unknown_group", f"group: got {piece.group}, the pool has {len(pool.groups)}")
        table = grown.get(piece.group) or BlockTable.of(pool.groups[piece.group])
        grown[piece.group] = table.extended(piece)
    return grown


def _check(tables: Mapping[int, BlockTable], pool: Pool, first_token: int, end_token: int) -> None:
    if first_token == end_token:
        return
    for group in range(len(pool.groups)):
        if group not in tables:
            raise EngineError("missing_group", f"group: {group} has no block table")
        tables[group].check(first_token, end_token)


def ready_chunks(plan: Plan, tokens: int) -> int:
    """How many chunks of the plan, in order, need no more than the first `tokens` tokens."""
    return bisect.bisect_right(range(plan.chunks), tokens, key=lambda index: plan.chunk(index).end_token)
