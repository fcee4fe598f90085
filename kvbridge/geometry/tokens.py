"""Where the tokens of one request are: turns block ids into places in a plane. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Group

from ..errors import EngineError
from .token_shard import ALL, TokenShard
from .token_shard import Places as Places

NOTHING: Places = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks of one request in one group: `ids[i]` holds tokens from `(first_block + i) * block_tokens` on.

    Tokens are local tokens: under context parallelism only those of the rank's `token_shard`, without gaps.
    A table is immutable: growing makes a new one, so one that the data plane thread reads never changes.
    """

    group: Group
    first_block: int
    ids: Places
    token_shard: TokenShard

    @classmethod
    def of(cls, group: Group, *pieces: Blocks, token_shard: TokenShard = ALL) -> BlockTable:
        """The table made of these pieces. It begins at the first piece's first entry. Raises EngineError."""
        table = cls(group, 0, NOTHING, token_shard)
        for piece in pieces:
            table = table.extended(piece)
        return table

    def extended(self, piece: Blocks) -> BlockTable:
        """This table with a piece appended. Raises EngineError for a gap or a block outside the pool."""
        first = self.first_block if len(self.ids) else piece.first
        expected = first + len(self.ids)
        if piece.first != expected:
            raise EngineError(
                "blocks_not_contiguous",
                f"first: group {piece.group} goes on at entry {piece.first}, expected {expected}",
            )
        ids = np.array(piece.ids, np.int64)
        if int(np.maximum.reduce(ids.view(np.uint64), initial=0)) >= self.group.blocks:  # a negative id is huge then
            outside = next(each for each in piece.ids if not 0 <= each < self.group.blocks)
            raise EngineError(
                "block_out_of_range",
                f"block id: group {piece.group} got {outside}, the pool has {self.group.blocks} blocks",
            )
        grown = np.concatenate((self.ids, ids)) if len(self.ids) else ids
        return BlockTable(self.group, first, grown, self.token_shard)

    def check(self, first_token: int, end_token: int) -> None:
        """Raises EngineError unless every token of [first_token, end_token) has a block."""
        first = self.first_block * self.group.block_tokens
        end = first + len(self.ids) * self.group.block_tokens
        if end_token > first_token and (first_token < first or end_token > end):
            raise EngineError(
                "blocks_too_few", f"tokens: [{first_token}, {end_token}) asked for, the blocks hold [{first}, {end})"
            )

    def check_distinct(self, group: int) -> None:
        """Raises EngineError if a block is there twice: two pieces of the request would be written into it."""
        if len(self.ids) < 2:
            return
        ordered = np.sort(self.ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise EngineError("block_repeated", f"block id: group {group} got {twice[0]} more than once")

    def places(self, first_token: int, end_token: int, unit_tokens: int = 1) -> Places:
        """The place of every unit of `unit_tokens` tokens in [first_token, end_token), in token order.

        Units must divide the block, and `first_token` must begin one; the last unit counts whole. Place p is
        unit `p % units` of block `p // units`, where a block has `units = block_tokens / unit_tokens`.
        Raises EngineError if a token has no block.
        """
        assert self.group.block_tokens % unit_tokens == 0 and first_token % unit_tokens == 0
        self.check(first_token, end_token)
        units = self.group.block_tokens // unit_tokens
        first, end = first_token // unit_tokens, -(-end_token // unit_tokens)
        if units == 1:
            return self.ids[first - self.first_block : end - self.first_block]
        entry, end_entry = first // units, -(-end // units)
        ids = self.ids[entry - self.first_block : end_entry - self.first_block]
        whole: Places = (ids[:, np.newaxis] * units + np.arange(units)).reshape(-1)
        return whole[first - entry * units : end - entry * units]

    def at(self, common: TokenShard, first: int, end: int, unit_tokens: int = 1) -> Places:
        """The places of local tokens [first, end) of `common`, a token shard within ours.

        Units of more than one token need `common` to be all of ours. Raises EngineError if a token has no block.
        """
        if first == end or common == self.token_shard:
            return self.places(first, end, unit_tokens)
        assert unit_tokens == 1
        token = self.token_shard.index(common.tokens(first, end))
        self.check(int(token[0]), int(token[-1]) + 1)
        block_tokens = self.group.block_tokens
        block = token // block_tokens
        return self.ids[block - self.first_block] * block_tokens + (token - block * block_tokens)

    def last(self, end_token: int) -> Places:
        """The place of the state after `end_token` tokens: its block. Raises EngineError if there is none."""
        self.check(end_token - 1, end_token)
        entry = (end_token - 1) // self.group.block_tokens - self.first_block
        return self.ids[entry : entry + 1]
