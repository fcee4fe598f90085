"""Engines whose ranks hold every n-th run of tokens: each is asked for its own, and ships when it has it."""

from __future__ import annotations

import itertools

import pytest
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.pool import Pool, Shard
from msgspec.structs import replace

from .world import World, make_pool

INTERLEAVE = 4
TOKEN_BYTES = 2 * 2 * 4 * 16  # layers x parts x heads x row


def ranks(engine: str, cp_size: int, interleave: int, block_tokens: int) -> list[Pool]:
    whole = make_pool(engine, 0, 1, block_tokens)
    return [
        replace(
            whole,
            shard=Shard(tp_rank=rank, tp_size=cp_size, cp_rank=rank, cp_size=cp_size, cp_interleave=interleave),
        )
        for rank in range(cp_size)
    ]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product((1, 2, 3), (1, 2))))
def test_carries_requests_whatever_the_order(ours: int, theirs: int, seed: int) -> None:
    world = World(ranks("prefill", ours, INTERLEAVE, 4), ranks("decode", theirs, 1, 16), seed=seed)
    for i in range(4):
        if (seed + i) % 2:
            world.want(f"r{i}", 40 + i)
        world.offer(f"r{i}", 40 + i, 12)
        if not (seed + i) % 2:
            world.want(f"r{i}", 40 + i)
    world.run()
    for sink in range(theirs):
        assert [type(answer) for answer in world.answers(sink).values()] == [Done] * 4
    for source in range(ours):
        assert len(world.released(source)) == 4
    moved = [sum(answer.moved_bytes for answer in world.answers(sink).values()) for sink in range(theirs)]
    assert sum((40 + i) * TOKEN_BYTES for i in range(4)) <= sum(moved)
    world.check_rest()


def test_each_rank_ships_its_tokens_while_the_prompt_is_computed() -> None:
    """After 6 tokens with runs of 4 the first rank has one run and the second half of one."""
    world = World(ranks("prefill", 2, INTERLEAVE, 4), 1, slots=16)
    world.want("r", 64)
    world.offer("r", 6, 1, last=False)
    world.run()
    assert not world.scatters
    world.offer("r", 32, 3, first=1, last=False)
    world.run()
    early = sum(world.scatters.values())
    assert early >= 2 and not world.answers()
    world.offer("r", 64, 4, first=4)
    world.run()
    assert isinstance(world.answers()["r"], Done) and sum(world.scatters.values()) > early
    world.check_rest()


def test_a_rank_without_a_token_of_the_prompt_is_told_and_released() -> None:
    world = World(ranks("prefill", 3, INTERLEAVE, 4), 1)
    world.offer("r", 7, 1)
    world.want("r", 7)
    world.run()
    assert isinstance(world.answers()["r"], Done)
    assert [world.released(source)["r"].code for source in range(3)] == ["", "", ""]
    world.check_rest()


def test_a_rank_offers_blocks_for_its_own_tokens_only() -> None:
    world = World(ranks("prefill", 2, INTERLEAVE, 4), 1)
    world.offer("r", 13, 2)
    world.want("r", 13)
    world.run()
    assert isinstance(world.answers()["r"], Done)
    world.offer("s", 17, 2)  # the first rank has 9 of 17, in three blocks
    world.want("s", 17)
    world.run()
    assert world.released(0)["s"].code == "blocks_too_few"
    assert "[0, 9)" in world.released(0)["s"].reason and "[0, 8)" in world.released(0)["s"].reason
    world.pass_time(200)
    world.run()
    assert isinstance(world.answers()["s"], Failed)
    world.check_rest()
