"""Token shards: the tokens that a rank holds under context parallelism, or that two ranks have in common. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import lcm

import numpy as np
import numpy.typing as npt
from kvbridge_proto.pool import Shard

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
