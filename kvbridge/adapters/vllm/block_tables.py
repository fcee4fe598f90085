"""Which entries of a request's block tables an offer or a want names. Pure.

Full groups are offered as they grow. vLLM gives a window's blocks to others while a prompt is computed. So they come
with the last offer only, and only those that vLLM keeps for the token that the decode side computes next. Entries
before them hold vLLM's null block or another request's rows: nobody may read or write those. vLLM keeps whole blocks,
and its prefix cache hands out whole blocks, so a window's first block travels from its first row on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import GroupKind

from ...cache_kinds import comes_last, is_one_row, window_start
from .layers import is_never_cached, is_ring, kind_of, one_of, span_of, window_of
from .states import drafted_blocks
from .versions import block_tokens, takes_first_token_for_decode, transfer_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK = 0  # vLLM's placeholder for a block that a request does not have


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Which tokens vLLM keeps of one group. A table entry spans `block_tokens` tokens; `window` is the pool's.

    `drafted`: of states, blocks for those after tokens that are drafted. `is_ring`: its one block is all entries.
    `is_never_cached`: nothing of it is there because a prefix is. `is_uncleared`: see `takes_first_token_for_decode`.
    `span`: how many tokens vLLM itself keeps, the next one counted, if these are more than the window says.
    """

    block_tokens: int
    kind: GroupKind
    window: int
    drafted: int = 0
    is_ring: bool = False
    is_never_cached: bool = False
    is_uncleared: bool = False
    span: int = 0

    def first(self, end_token: int) -> int:
        """The first token of the first block that vLLM keeps once `end_token` tokens are computed.

        vLLM gives up every block that `get_num_skipped_tokens` covers whole.
        """
        return window_start(self.kind, self.window, end_token, self.block_tokens)

    def given_up(self, end_token: int) -> int:
        """How many tokens of the first blocks vLLM has given up once `end_token` tokens are computed."""
        if not self.span:
            return self.first(end_token)
        return window_start("sliding", self.span, end_token, self.block_tokens)


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The groups that travel, in the order of a request's tables."""

    groups: tuple[TableGroup, ...]

    @classmethod
    def of(cls, cache: KVCacheConfig, parallel: Any) -> GroupTables:
        specs = [group.kv_cache_spec for group in transfer_groups(cache)]
        return cls(
            tuple(
                TableGroup(
                    *(block_tokens(spec, parallel), kind_of(spec), window_of(spec), drafted_blocks(spec)),
                    *(is_ring(spec), is_never_cached(spec), takes_first_token_for_decode(one_of(spec)), span_of(spec)),
                )
                for spec in specs
            )
        )

    @property
    def has_windows(self) -> bool:
        return any(comes_last(group.kind) for group in self.groups)

    @property
    def has_states(self) -> bool:
        return any(is_one_row(group.kind) for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """Whether all layers keep the rows of all tokens, and nothing else."""
        return not (self.has_windows or self.has_states)

    @property
    def is_uncleared(self) -> bool:
        return any(group.is_uncleared for group in self.groups)

    def outlives(self, tokens: int) -> bool:
        """Whether all that the other side needs of a prompt is still there when its request has ended.

        Before vLLM asks us to keep the blocks, it gives up those that the token after the prompt does not need. But
        the other side computes the prompt's last token again, and that token's window may begin one block earlier. A
        state already includes that token. A ring has room for it beside those that its row is made of.
        """
        given_up = [group for group in self.groups if not group.is_ring]
        return not self.has_states and all(group.given_up(tokens) <= group.first(tokens - 1) for group in given_up)

    def count(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take, over all groups.

        Of states vLLM keeps the one at the last boundary of blocks, the last one, and those of drafts.
        """
        entries = ((group, 1 if group.is_ring else -(-tokens // group.block_tokens)) for group in self.groups)
        return sum(min(count, 2) + group.drafted if is_one_row(group.kind) else count for group, count in entries)

    def wanted(self, tables: Sequence[Sequence[int]], first: int, end: int) -> tuple[Blocks, ...]:
        """For each group, the entries that hold tokens [first, end), as far as vLLM keeps them."""
        return tuple(
            _piece(index, ids, group, max(0 if group.is_never_cached else first, group.first(end)), end)
            for index, (ids, group) in enumerate(zip(tables, self.groups, strict=True))
        )

    def offered(
        self, tables: Sequence[Sequence[int]], offered: Sequence[int], tokens: int, end: int | None
    ) -> tuple[Blocks, ...]:
        """The entries up to `tokens` that were not offered yet; `offered` counts those that were, by group.

        `end` is None except in the last offer, which includes the windows: then it is the end of what is wanted.
        """
        pieces = []
        for index, (ids, group) in enumerate(zip(tables, self.groups, strict=True)):
            if not comes_last(group.kind):
                piece = _piece(index, ids, group, offered[index] * group.block_tokens, tokens)
                pieces += [piece] if piece.ids else []
            elif end is not None:
                pieces.append(_piece(index, ids, group, group.first(end), tokens))
        return tuple(pieces)

    def has_windows_of(self, tables: Sequence[Sequence[int]], end: int) -> bool:
        """Whether the window blocks are there that the last offer needs, if tokens up to `end` are wanted.

        The prefix cache gives a request its window, but none of the tokens that drafts need before it.
        """
        return not any(
            NULL_BLOCK in _piece(0, ids, group, group.first(end), end).ids
            for ids, group in zip(tables, self.groups, strict=True)
            if comes_last(group.kind)
        )


def _piece(index: int, ids: Sequence[int], group: TableGroup, first: int, end: int) -> Blocks:
    entry, last = first // group.block_tokens, -(-end // group.block_tokens)
    return Blocks(index, entry, tuple(ids[:1]) * (last - entry) if group.is_ring else tuple(ids[entry:last]))
