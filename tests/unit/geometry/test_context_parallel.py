"""Ranks that hold every n-th run of tokens: each sends what another lacks, and nothing else is written."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
from kvbridge_proto.pool import Pool, Shard

from kvbridge.errors import PeerError
from kvbridge.geometry.plan import Planner, plan
from kvbridge.geometry.shard import assign
from kvbridge.geometry.tokens import TokenShard
from testing.carried import carry
from testing.oracle import Shape, build, build_all, is_own
from testing.pools import Held
from testing.refusals import refused

SIZES = (1, 2, 3, 8)
REPLICATED = Shape(layers=1, kv_heads=1, blocks=14)
GROUPED = Shape(layers=1, kv_heads=2, tp_size=2, blocks=14)


def engine(shape: Shape, cp_size: int, interleave: int) -> list[Held]:
    return build_all(replace(shape, cp_size=cp_size, cp_interleave=interleave))


def tokens_of(pool: Pool, tokens: range) -> list[int]:
    """The tokens that a rank holds."""
    return [token for token in tokens if is_own(pool.shard, np.asarray(token))]


def test_equal_splits_take_from_their_like_in_whole_blocks() -> None:
    shape = replace(REPLICATED, layout="hnd", cp_size=4, cp_interleave=16)
    senders, receivers = build_all(shape), build_all(shape)
    carry(shape, shape, range(130))
    for index, receiver in enumerate(receivers):
        takes = assign([sender.pool for sender in senders], receiver.pool)
        assert [bool(taken) for taken in takes] == [number == index for number in range(4)]
        planned = plan(senders[index].pool, receiver.pool, takes[index], 0, 130, 1 << 12)
        assert {pair.unit_tokens for pair in planned.pairs} == {16}


def test_other_splits_are_never_joined_over_a_block() -> None:
    """Also where the blocks are alike: their tokens are not."""
    for other in ((4, 1), (2, 16), (1, 1)):
        senders, (receiver, *_) = engine(REPLICATED, 4, 16), engine(REPLICATED, *other)
        takes = assign([sender.pool for sender in senders], receiver.pool)
        planned = plan(senders[0].pool, receiver.pool, takes[0], 0, 130, 1 << 12)
        assert planned.chunks and {pair.unit_tokens for pair in planned.pairs} == {1}


def test_ranks_without_common_tokens_give_each_other_nothing() -> None:
    senders, receivers = engine(REPLICATED, 4, 16), engine(REPLICATED, 2, 32)
    takes = assign([sender.pool for sender in senders], receivers[0].pool)
    assert [bool(taken) for taken in takes] == [True, True, False, False]
    forced = plan(senders[3].pool, receivers[0].pool, takes[0], 0, 200, 1 << 12)
    assert (forced.chunks, forced.total_bytes) == (0, 0)


def test_a_short_prompt_has_no_tokens_for_the_last_ranks() -> None:
    senders, (receiver,) = engine(REPLICATED, 4, 16), engine(REPLICATED, 1, 1)
    carry(replace(REPLICATED, cp_size=4, cp_interleave=16), REPLICATED, range(17))
    takes = assign([sender.pool for sender in senders], receiver.pool)
    plans = [plan(each.pool, receiver.pool, taken, 0, 17, 1 << 12) for each, taken in zip(senders, takes, strict=True)]
    assert [planned.chunks for planned in plans] == [1, 1, 0, 0]


def test_a_chunk_needs_the_tokens_up_to_its_own_last() -> None:
    senders, (receiver,) = engine(replace(REPLICATED, blocks=64), 4, 16), engine(replace(REPLICATED, blocks=64), 1, 1)
    for rank, sender in enumerate(senders):
        takes = assign([each.pool for each in senders], receiver.pool)
        planned = plan(sender.pool, receiver.pool, takes[rank], 0, 1000, 1 << 9)
        own = tokens_of(sender.pool, range(1000))
        for index in range(planned.chunks):
            chunk = planned.chunk(index)
            assert chunk.needs_tokens == own[chunk.end_local - 1] + 1 and not chunk.comes_last


def test_each_row_of_each_token_is_taken_once() -> None:
    for (ours, theirs), (mine, yours) in itertools.product(itertools.product(SIZES, SIZES), ((1, 3), (16, 3), (1, 16))):
        senders, receivers = engine(replace(GROUPED, tp_size=1), ours, mine), engine(GROUPED, theirs, yours)
        for receiver in receivers:
            found: Counter[tuple[int, int]] = Counter()
            for sender, taken in zip(senders, assign([each.pool for each in senders], receiver.pool), strict=True):
                both = set(tokens_of(sender.pool, range(100))) & set(tokens_of(receiver.pool, range(100)))
                found += Counter(
                    (head, token) for take in taken for head in range(take.first_head, take.end_head) for token in both
                )
            (plane, *_) = receiver.pool.planes
            needed = itertools.product(
                range(plane.first_head, plane.first_head + plane.heads), tokens_of(receiver.pool, range(100))
            )
            assert found == Counter(needed)


def test_a_state_is_taken_once_also_from_a_rank_without_common_tokens() -> None:
    """A state's heads are cut by all ranks, so a rank may need them of one that has none of its tokens."""
    shape = Shape(layers=2, kv_heads=1, kinds=("full", "state"), blocks=14, cp_interleave=16)
    for ours, theirs in itertools.product((1, 2, 4), repeat=2):
        senders, receivers = (build_all(replace(shape, cp_size=size)) for size in (ours, theirs))
        for receiver in receivers:
            takes = assign([sender.pool for sender in senders], receiver.pool)
            found = Counter(
                (take.part, head)
                for taken in takes
                for take in taken
                if take.first_layer == 1
                for head in range(take.first_head, take.end_head)
            )
            needed = {
                (plane.part, plane.first_head + head)
                for plane in receiver.pool.planes
                if plane.layer == 1
                for head in range(plane.heads)
            }
            assert found == Counter(needed)


def test_receivers_spread_over_the_holders_of_their_tokens() -> None:
    """Eight ranks with all heads, four of them with each half of the tokens."""
    senders, receivers = engine(replace(REPLICATED, tp_size=4), 2, 16), engine(replace(REPLICATED, tp_size=8), 1, 1)
    asked: Counter[int] = Counter()
    for receiver in receivers:
        asked.update(
            index for index, taken in enumerate(assign([each.pool for each in senders], receiver.pool)) if taken
        )
    assert asked == dict.fromkeys(range(8), 2)


def test_names_the_tokens_that_nobody_holds() -> None:
    senders, (receiver,) = engine(REPLICATED, 8, 16), engine(REPLICATED, 1, 1)
    with refused(PeerError, "rows_not_held") as caught:
        assign([sender.pool for sender in senders if sender.pool.shard.cp_rank != 3], receiver.pool)
    assert caught.value.reasons == (
        "layers: the receiver needs [0, 1), heads [0, 1), part k, tokens: cp rank 3 of 8 (interleave 16); "
        "none of 7 senders holds them",
    )


def test_refuses_ranks_that_split_tokens_differently() -> None:
    senders = [engine(REPLICATED, 2, 16)[0].pool, engine(REPLICATED, 2, 8)[1].pool]
    with refused(PeerError, "sender_ranks_mismatch") as caught:
        assign(senders, engine(REPLICATED, 1, 1)[0].pool)
    assert caught.value.reasons == (
        "cp_size: 2, cp_interleave 8 at some ranks",
        "cp_size: 2, cp_interleave 16 at some ranks",
    )


def test_the_split_of_tokens_is_in_the_digest() -> None:
    (receiver,) = engine(REPLICATED, 1, 1)
    found = set()
    for size, interleave, rank in ((1, 1, 0), (2, 1, 0), (2, 1, 1), (2, 3, 0), (4, 1, 0)):
        sender = engine(REPLICATED, size, interleave)[rank]
        taken = assign([each.pool for each in engine(REPLICATED, size, interleave)], receiver.pool)[rank]
        found.add(plan(sender.pool, receiver.pool, taken, 0, 120, 1 << 12).digest)
    assert len(found) == 5


def test_an_interleave_says_nothing_where_there_is_one_rank() -> None:
    pool = engine(REPLICATED, 1, 1)[0].pool
    other = msgspec.structs.replace(pool, shard=Shard(cp_interleave=16))
    assert TokenShard.of(other.shard) == TokenShard.of(pool.shard)
    assert len(assign([other], pool)) == 1 and len(assign([pool, other], pool)) == 2


def test_samples_are_of_tokens_that_both_hold() -> None:
    senders, receivers = engine(REPLICATED, 4, 16), engine(REPLICATED, 2, 16)
    for sender, receiver in itertools.product(senders, receivers):
        for is_sender in (True, False):
            parts = Planner(sender.pool, receiver.pool).samples(1 << 12, is_sender)
            assert bool(parts) == (sender.pool.shard.cp_rank % 2 == receiver.pool.shard.cp_rank)
            assert all(len(move.places) for part in parts for move in part.moves())


def test_samples_of_ranks_without_common_tokens_are_of_states() -> None:
    shape = Shape(kv_heads=1, kinds=("full", "state"), blocks=14, cp_size=2, cp_interleave=16)
    sender, receiver = build(replace(shape, cp_size=4), cp_rank=1), build(shape, cp_rank=0)
    parts = Planner(sender.pool, receiver.pool).samples(1 << 12, False)
    assert parts and {move.plane.layer for part in parts for move in part.moves()} == {1}
