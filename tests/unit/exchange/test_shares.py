"""Engines whose ranks hold every n-th run of tokens: each is asked for its own, and sends when it has it."""

from __future__ import annotations

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.pool import Pool

from kvbridge.errors import EngineError
from kvbridge.exchange.block_tables import tables_of
from kvbridge.geometry.tokens import TokenShard
from tests.unit.exchange.world import World, make_pool

INTERLEAVE = 4
TOKEN_BYTES = 2 * 2 * 4 * 16  # layers x parts x heads x row


def ranks(engine: str, cp_size: int, interleave: int, block_tokens: int) -> list[Pool]:
    split = {"cp_size": cp_size, "cp_interleave": interleave}
    return [make_pool(engine, 0, 1, block_tokens, cp_rank=rank, **split) for rank in range(cp_size)]


def test_each_rank_ships_its_tokens_while_the_prompt_is_computed() -> None:
    """After 6 tokens with runs of 4 the first rank has one run and the second half of one."""
    world = World(ranks("prefill", 2, INTERLEAVE, 4), 1, slots=16)
    world.want("r", 64)
    world.serve("r", 6, 1, last=False)
    assert not world.scatters
    world.serve("r", 32, 3, first=1, last=False)
    early = sum(world.scatters.values())
    assert early >= 2 and not world.answers()
    world.serve("r", 64, 4, first=4)
    assert isinstance(world.answers()["r"], Done) and sum(world.scatters.values()) > early
    world.check_rest()


def test_a_rank_offers_blocks_for_its_own_tokens_only() -> None:
    world = World(ranks("prefill", 2, INTERLEAVE, 4), 1)
    world.offer("r", 13, 2)
    world.fetch("r", 13)
    assert isinstance(world.answers()["r"], Done)
    world.offer("s", 17, 2)  # the first rank has 9 of 17, in three blocks
    world.fetch("s", 17)
    assert world.released(0)["s"].code == "blocks_too_few"
    assert "[0, 9)" in world.released(0)["s"].reason and "[0, 8)" in world.released(0)["s"].reason
    world.pass_time(200)
    world.run()
    assert isinstance(world.answers()["s"], Failed)
    world.check_rest()


def pieces_of(pool: Pool, first: int, end: int) -> tuple[Blocks, ...]:
    """The entries that hold this rank's own of tokens [first, end); no word of a group in which there are none."""
    own, size = TokenShard.of(pool.shard), pool.groups[0].block_tokens
    begin, stop = own.count(first), own.count(end)
    if begin == stop:
        return ()
    entries = range(begin // size, -(-stop // size))
    return (Blocks(0, entries.start, tuple(entries)),)


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_names_blocks_beyond_those_of_its_own_tokens(seed: int) -> None:
    """Neither side: a rank that has none of the tokens sends no table at all."""
    world = World(ranks("prefill", 3, INTERLEAVE, 4), ranks("decode", 4, 2, 16), seed=seed)
    first = (0, 3, 24)[seed % 3]
    end = first + 1 + seed % 4
    silent = 0
    for node in world.senders:
        blocks = pieces_of(node.engine.pool, 0, end)
        world.offer("r", end, blocks, at=node)
    for node in world.receivers:
        blocks = pieces_of(node.engine.pool, first, end)
        silent += not blocks
        world.want("r", end, blocks, first=first, at=node)
    assert silent, "every rank has some"
    world.run()
    answers = [world.answers(receiver)["r"] for receiver in range(4)]
    assert [type(answer) for answer in answers] == [Done] * 4
    assert sum(answer.moved_bytes for answer in answers) >= (end - first) * TOKEN_BYTES
    assert [world.released(sender)["r"].code for sender in range(3)] == [""] * 3
    world.check_rest()


@pytest.mark.parametrize(
    ("first", "end", "entries"), [(10, 39, (0, 1)), (32, 39, (1,)), (0, 39, (0, 1)), (32, 33, ()), (0, 2, (0,))]
)
def test_a_wants_table_counts_the_tokens_that_its_rank_keeps(first: int, end: int, entries: tuple[int, ...]) -> None:
    """The example that `Want` gives: rank 1 of 2 keeps tokens 1, 3, 5, ..., in blocks of 16."""
    pool = ranks("decode", 2, 1, 16)[1]
    assert pieces_of(pool, first, end) == ((Blocks(0, entries[0], entries),) if entries else ())
    world = World(1, ranks("decode", 2, 1, 16))
    engine = world.receivers[1].engine
    right = tuple(Blocks(0, entry, (40 + entry,)) for entry in entries)
    tables = tables_of(engine, right, first, end)
    for token in range(first | 1, end, 2):
        entry, offset = divmod(token // 2, 16)
        place = tables[0].at(TokenShard.of(pool.shard), token // 2, token // 2 + 1)
        assert place.tolist() == [(40 + entry) * 16 + offset]
    for lacking in (right[1:], right[:-1]) if entries else ():
        with pytest.raises(EngineError):
            tables_of(engine, lacking, first, end)
