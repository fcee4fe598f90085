"""TokenShards against their definition, token by token."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbridge_proto.pool import Shard

from kvbridge.geometry.tokens import ALL, MOST_PERIOD, TokenShard, period_of


@st.composite
def shards(draw: st.DrawFn, interleaves: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 16, 20)) -> Shard:
    size = draw(st.integers(1, 8))
    return Shard(cp_size=size, cp_rank=draw(st.integers(0, size - 1)), cp_interleave=draw(st.sampled_from(interleaves)))


def _holds(shard: Shard, token: int) -> bool:
    return (token // shard.cp_interleave) % shard.cp_size == shard.cp_rank


def _held(*some: Shard, end: int) -> list[int]:
    return [token for token in range(end) if all(_holds(shard, token) for shard in some)]


@given(shard=shards(), end=st.integers(0, 500))
def test_its_tokens_are_those_of_the_rank(shard: Shard, end: int) -> None:
    token_shard, expected = TokenShard.of(shard), _held(shard, end=end)
    assert token_shard.count(end) == len(expected)
    assert token_shard.tokens(0, len(expected)).tolist() == expected
    assert token_shard.period == period_of(shard)


@given(ours=shards(), theirs=shards(), end=st.integers(0, 2000))
def test_the_intersection(ours: Shard, theirs: Shard, end: int) -> None:
    both, expected = TokenShard.of(ours) & TokenShard.of(theirs), _held(ours, theirs, end=end)
    assert both.count(end) == len(expected)
    assert both.tokens(0, len(expected)).tolist() == expected


@given(shard=shards(), first=st.integers(0, 300), size=st.integers(0, 100))
def test_a_local_token_is_found_from_its_token(shard: Shard, first: int, size: int) -> None:
    token_shard = TokenShard.of(shard)
    tokens = token_shard.tokens(first, first + size)
    assert token_shard.index(tokens).tolist() == list(range(first, first + size))
    assert [token_shard.count(int(token)) for token in tokens] == list(range(first, first + size))
    assert tokens.dtype == token_shard.index(tokens).dtype == np.int64


@given(size=st.integers(1, 8), interleave=st.integers(1, 20), other=shards(), end=st.integers(0, 500))
def test_token_shards_of_all_ranks_are_an_exact_cover(size: int, interleave: int, other: Shard, end: int) -> None:
    ranks = [TokenShard.of(Shard(cp_size=size, cp_rank=rank, cp_interleave=interleave)) for rank in range(size)]
    for cover, whole in ((ranks, ALL), ([rank & TokenShard.of(other) for rank in ranks], TokenShard.of(other))):
        found = sorted(
            token for token_shard in cover for token in token_shard.tokens(0, token_shard.count(end)).tolist()
        )
        assert found == whole.tokens(0, whole.count(end)).tolist()
    assert all(not (ours & theirs).residues for ours, theirs in combinations(ranks, 2))


@given(some=st.lists(shards((1, 2, 4, 16)), min_size=1, max_size=3))
def test_equal_sets_are_equal_however_they_were_made(some: list[Shard]) -> None:
    token_shards = [TokenShard.of(shard) for shard in some]
    forward, back = ALL, token_shards[-1]
    for token_shard in token_shards:
        forward &= token_shard
    for token_shard in reversed(token_shards):
        back &= token_shard
    assert forward == back and hash(forward) == hash(back)
    residues = set(forward.residues)
    for period in (period for period in range(1, forward.period) if forward.period % period == 0):
        assert {each % period + at for each in residues for at in range(0, forward.period, period)} != residues


def test_one_rank_holds_all() -> None:
    assert TokenShard.of(Shard()) == TokenShard.of(Shard(cp_interleave=1 << 40)) == ALL
    assert ALL & ALL == ALL
    odd, even = (TokenShard.of(Shard(cp_size=2, cp_rank=rank)) for rank in (1, 0))
    assert ALL & odd == odd & ALL == odd == TokenShard(2, (1,))
    assert odd & even == TokenShard(1, ())


def test_a_token_shard_of_nothing_counts_nothing() -> None:
    nothing = TokenShard(1, ())
    assert nothing.count(1 << 40) == 0
    assert nothing.tokens(0, 0).tolist() == nothing.index(nothing.tokens(0, 0)).tolist() == []
    assert nothing & ALL == ALL & nothing == nothing


def test_far_tokens_are_counted_not_listed() -> None:
    token_shard = TokenShard.of(Shard(cp_size=8, cp_rank=3, cp_interleave=16)) & TokenShard.of(
        Shard(cp_size=3, cp_interleave=5)
    )
    local = token_shard.count(1 << 40)
    assert token_shard.count(int(token_shard.tokens(local - 1, local)[0]) + 1) == local
    assert token_shard.tokens(local, local + 1)[0] >= 1 << 40


def test_a_token_that_it_does_not_hold_has_no_index() -> None:
    token_shard = TokenShard.of(Shard(cp_size=2, cp_rank=0, cp_interleave=4))
    for token in (4, 7, 12):
        with pytest.raises(AssertionError):
            token_shard.index(np.array([0, token]))


def test_a_period_is_bounded_before_it_is_listed() -> None:
    wide = Shard(cp_size=2, cp_interleave=MOST_PERIOD)
    with pytest.raises(AssertionError):
        TokenShard.of(wide)
    with pytest.raises(AssertionError):
        TokenShard.of(Shard(cp_size=1021)) & TokenShard.of(Shard(cp_size=2, cp_interleave=1031))
    assert (
        TokenShard.of(Shard(cp_size=2, cp_rank=1, cp_interleave=MOST_PERIOD // 2)).count(MOST_PERIOD)
        == MOST_PERIOD // 2
    )
