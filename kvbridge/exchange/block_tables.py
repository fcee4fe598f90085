"""Block tables from offers and wants: checked on arrival, never changed afterwards. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from kvbridge_proto.common import Blocks

from ..cache_kinds import comes_last, is_one_row, needed
from ..errors import EngineError
from ..geometry.plan import Plan
from ..geometry.tokens import BlockTable, counted_by
from .session import AttachedEngine


def extended(
    tables: Mapping[int, BlockTable],
    engine: AttachedEngine,
    pieces: Sequence[Blocks],
    first_token: int,
    end_token: int,
    is_last: bool,
) -> dict[int, BlockTable]:
    """`tables` with `pieces` appended. Raises EngineError if any group lacks part of [first_token, end_token).

    Windows and states are checked only when `is_last`: their blocks change until then and may be left out.
    """
    grown = _appended(tables, engine, pieces)
    _check(grown, engine, first_token, end_token, is_last)
    return grown


def tables_of(
    engine: AttachedEngine, pieces: Sequence[Blocks], first_token: int, end_token: int
) -> dict[int, BlockTable]:
    """The tables of a want. Raises EngineError if they do not cover the needed part of [first_token, end_token)."""
    tables = _appended({}, engine, pieces)
    _check(tables, engine, first_token, end_token, True)
    for index, table in tables.items():
        if not comes_last(engine.pool.groups[index].kind):  # else one block may stand for all that is not kept
            table.check_distinct(index)
    return tables


def _appended(
    tables: Mapping[int, BlockTable], engine: AttachedEngine, pieces: Sequence[Blocks]
) -> dict[int, BlockTable]:
    grown, groups = dict(tables), engine.pool.groups
    for piece in pieces:
        if piece.group >= len(groups):
            raise EngineError("unknown_group", f"group: got {piece.group}, the pool has {len(groups)}")
        table = grown.get(piece.group) or BlockTable.of(groups[piece.group], token_shard=engine.token_shard)
        grown[piece.group] = table.extended(piece)
    return grown


def _check(
    tables: Mapping[int, BlockTable], engine: AttachedEngine, first_token: int, end_token: int, is_last: bool
) -> None:
    if first_token == end_token:
        return
    for index, group in enumerate(engine.pool.groups):
        if not is_last and comes_last(group.kind):
            continue
        counted = counted_by(group, engine.token_shard)
        first = counted.count(needed(group, first_token, end_token, engine.pool.shard))
        end = counted.count(end_token)
        if first < end:
            _table(tables, index).check(first, end)


def check_begin(plan: Plan, first_token: int) -> None:
    """Raises EngineError if a plan takes tokens before `first_token`, where its offer begins.

    Such tokens may lie in the offer's first block, but their content is undefined. A state depends on all tokens, so
    its first token is not checked.
    """
    for group_plan in plan.group_plans:
        if not is_one_row(group_plan.kind) and group_plan.first < group_plan.token_shard.count(first_token):
            reason = f"first_token: wanted {plan.first_token}, offered from {first_token}"
            raise EngineError("tokens_missing", reason)


def check_last(plan: Plan, tables: Mapping[int, BlockTable], tokens: int) -> None:
    """Raises EngineError if the sender's complete tables do not hold the plan's windows and states.

    The offer may hold more tokens (`tokens`) than are wanted. Then its windows begin later, and its states include
    tokens that are not wanted.
    """
    for group_plan in plan.group_plans:
        if not group_plan.comes_last:
            continue
        if is_one_row(group_plan.kind) and plan.end_token != tokens:
            reason = f"end_token: wanted {plan.end_token}, offered {tokens}, and a state is of exactly these"
            raise EngineError("state_moved_on", reason)
        for group in sorted(group_plan.sender_groups):
            table = _table(tables, group)
            if is_one_row(group_plan.kind):
                table.last(plan.end_token)
            else:
                for local in (group_plan.first, group_plan.end - 1):
                    table.at(group_plan.token_shard, local, local + 1)


def _table(tables: Mapping[int, BlockTable], group: int) -> BlockTable:
    if group not in tables:
        raise EngineError("missing_group", f"group: {group} has no block table")
    return tables[group]


def ready_chunks(plan: Plan, tokens: int, is_last: bool) -> int:
    """How many chunks of the plan, in order, can be read once the first `tokens` tokens are computed."""
    if is_last and tokens >= plan.end_token:  # as mostly: no chunk has to be looked at
        return plan.chunks
    chunks = range(plan.chunks if is_last else plan.early_chunks)
    return bisect.bisect_right(chunks, tokens, key=lambda index: plan.chunk(index).needs_tokens)
