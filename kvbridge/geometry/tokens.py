"""Where the tokens of one request are: token shards, and block tables that turn tokens into places in a plane. Pure.

A token shard has the tokens that a rank holds under context parallelism, or that two ranks have in common.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from math import lcm

import numpy as np
import numpy.typing as npt
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Group, Shard

from ..cache_kinds import is_one_row
from ..errors import EngineError

Places = npt.NDArray[np.int64]
# In tokens. The residues of a token shard are listed one by one, at the request of any peer: this takes a few
# milliseconds at most.
MOST_PERIOD = 1 << 16


def period_of(shard: Shard) -> int:
    """After how many tokens a rank's token shard repeats. The lcm of two ranks' periods may be MOST_PERIOD at most."""
    return shard.cp_size * shard.cp_interleave if shard.cp_size > 1 else 1


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens t with `t % period` in `residues`, which ascend in [0, period). Without residues there are no tokens.

    Local tokens number them from 0: before local token i come i others of the shard. `of` and `&` give the least
    period, so equal sets compare equal.
    """

    period: int
    residues: tuple[int, ...]
    _places: Places = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = np.array(self.residues, np.int64)
        places.setflags(write=False)
        object.__setattr__(self, "_places", places)

    @classmethod
    def of(cls, shard: Shard) -> TokenShard:
        """The tokens of one rank. `check_pool` bounds the period."""
        if shard.cp_size == 1:
            return ALL
        assert period_of(shard) <= MOST_PERIOD
        first = shard.cp_rank * shard.cp_interleave
        return cls(period_of(shard), tuple(range(first, first + shard.cp_interleave)))

    def __and__(self, other: TokenShard) -> TokenShard:
        """The tokens of both. The verdict bounds the common period."""
        if self == other:
            return self
        period = lcm(self.period, other.period)
        assert period <= MOST_PERIOD
        return _least(np.tile(self._mask(), period // self.period) & np.tile(other._mask(), period // other.period))

    def count(self, tokens: int) -> int:
        """How many tokens of the shard are below `tokens`: the first local token from there on."""
        periods, rest = divmod(tokens, self.period)
        return periods * len(self.residues) + bisect_left(self.residues, rest)

    def token(self, local: int) -> int:
        """The token that this local token is."""
        periods, at = divmod(local, len(self.residues))
        return periods * self.period + self.residues[at]

    def tokens(self, first: int, end: int) -> Places:
        """The tokens that local tokens [first, end) are."""
        assert self.residues or first >= end
        period, at = np.divmod(np.arange(first, end, dtype=np.int64), max(len(self.residues), 1))
        return period * self.period + self._places[at]

    def index(self, tokens: Places) -> Places:
        """The local token that each of these tokens is. All must be of the shard."""
        period, rest = np.divmod(tokens, self.period)
        at = np.searchsorted(self._places, rest)
        assert np.array_equal(np.append(self._places, -1)[at], rest)
        return period * len(self.residues) + at

    def _mask(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self.period, np.bool_)
        mask[self._places] = True
        return mask


ALL = TokenShard(1, (0,))


def counted_by(group: Group, token_shard: TokenShard) -> TokenShard:
    """The tokens that a rank's table of this group counts: its own, or all, as every rank has its heads of a state."""
    return ALL if is_one_row(group.kind) else token_shard


def _least(mask: npt.NDArray[np.bool_]) -> TokenShard:
    """The token shard of a mask, with its least period: each prime factor of the length is removed if possible."""
    rest, prime = len(mask), 2
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        if rest % prime:
            prime += 1
            continue
        rest //= prime
        part = mask[: len(mask) // prime]
        if (mask.reshape(prime, -1) == part).all():
            mask = part
    return TokenShard(len(mask), tuple(np.flatnonzero(mask).tolist()))


NO_BLOCKS: Places = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks of one request in one group: `ids[i]` holds tokens from `(first_block + i) * block_tokens` on.

    Tokens are local tokens: under context parallelism only those of the `token_shard`, without gaps.
    A table is immutable: growing makes a new one, so one that the data plane thread reads never changes.
    """

    group: Group
    first_block: int
    ids: Places
    token_shard: TokenShard

    @classmethod
    def of(cls, group: Group, *pieces: Blocks, token_shard: TokenShard = ALL) -> BlockTable:
        """The table made of these pieces. It begins at the first piece's first entry. Raises EngineError.

        `token_shard` is the rank's: see `counted_by`.
        """
        table = cls(group, 0, NO_BLOCKS, counted_by(group, token_shard))
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
        # Not with numpy: few ids are the rule, and for these its first calls after a pause cost ten times as much.
        if piece.ids and not 0 <= min(piece.ids) <= max(piece.ids) < self.group.blocks:
            outside = next(each for each in piece.ids if not 0 <= each < self.group.blocks)
            raise EngineError(
                "block_out_of_range",
                f"block id: group {piece.group} got {outside}, the pool has {self.group.blocks} blocks",
            )
        ids = np.array(piece.ids, np.int64)
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
        ids = self.ids.tolist()
        if len(set(ids)) < len(ids):
            twice = next(each for each, count in Counter(ids).items() if count > 1)
            raise EngineError("block_repeated", f"block id: group {group} got {twice} more than once")

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
        if units > end - first:  # more than are asked for, and a peer says how many
            unit = np.arange(first, end)
            entry_of = unit // units
            return self.ids[entry_of - self.first_block] * units + (unit - entry_of * units)
        entry, end_entry = first // units, -(-end // units)
        ids = self.ids[entry - self.first_block : end_entry - self.first_block]
        whole: Places = (ids[:, np.newaxis] * units + np.arange(units)).reshape(-1)
        return whole[first - entry * units : end - entry * units]

    def at(self, common: TokenShard, first: int, end: int, unit_tokens: int = 1) -> Places:
        """The places of local tokens [first, end) of `common`, a token shard within ours.

        Units of more than one token need `common` to be all of ours. Raises EngineError if a token has no block.
        """
        if first == end or common is self.token_shard or common == self.token_shard:
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
