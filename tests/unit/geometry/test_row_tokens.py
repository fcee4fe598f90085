"""Rows that stand for several tokens: only whole ones travel, and every one of those, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest
from kvbridge_proto.pool import Pool, Shard, Step

from kvbridge.geometry.check import check_pool
from kvbridge.geometry.compat import Convertible, Incompatible, Same, verdict
from kvbridge.geometry.plan import Part, Planner
from kvbridge.geometry.shard import common
from testing.carried import carry
from testing.oracle import More, block_table, describe, mla

OF_4 = More("of_4", width=16, codec="fp8_row_scale", row_tokens=4)
OF_128 = More("of_128", width=24, row_tokens=128)
SHAPE = mla(key_width=16, rope_width=4, layers=3, block_tokens=256, blocks=4, more=(OF_4, replace(OF_128, layers=(1,))))
# Where a row ends, and one token before and after it.
ENDS = sorted({end + off for end in (0, 4, 8, 128, 256, 384, 512, 640) for off in (-1, 0, 1, 3)} & set(range(1, 700)))


@pytest.mark.parametrize(("ours", "theirs"), [(256, 256), (128, 256), (256, 128), (512, 128)])
def test_every_whole_row_arrives_and_no_other(ours: int, theirs: int) -> None:
    for number, end in enumerate(ENDS):
        sender = replace(SHAPE, block_tokens=ours, blocks=-(-end // ours) + 1, tp_size=(1, 2)[number % 2])
        receiver = replace(SHAPE, block_tokens=theirs, blocks=-(-end // theirs) + 1, pad_bytes=32 * (number % 3))
        first = (0, theirs, 2 * theirs)[number % 3]
        carry(sender, receiver, range(first if first < end else 0, end), (1 << 12, 1 << 15, 1 << 18)[number % 3])


@cache
def planner() -> Planner:
    return Planner(describe(SHAPE), describe(replace(SHAPE, block_tokens=128, blocks=8)))


@pytest.mark.parametrize("first", [0, 3, 4, 128, 129, 256])
def test_a_row_is_needed_once_and_when_its_last_token_is_computed(first: int) -> None:
    """Told without a slot: which rows of which planes each chunk holds, for every number of tokens."""
    ours, theirs = describe(SHAPE), describe(replace(SHAPE, block_tokens=128, blocks=8))
    takes, tables = common(ours, theirs), block_table(ours, range(4))
    for end in range(first, 700):
        planned = planner().plan(takes, first, end, 1 << 14)
        found: dict[str, set[int]] = {"latent": set(), "of_4": set(), "of_128": set()}
        for index in range(planned.chunks):
            part = Part(planned, planned.chunk(index), tables, True)
            group_plan = planned.group_plans[part.chunk.group_plan]
            for pair in group_plan.pairs[: part.chunk.end_pair - group_plan.first_pair]:
                if pair.receiver.layer == 1:
                    found[pair.receiver.part.removesuffix("_scale")] |= set(
                        range(part.chunk.first_local, part.chunk.end_local, pair.receiver.row_tokens)
                    )
            assert part.chunk.needs_tokens <= end
        for part_name, tokens in (("latent", 1), ("of_4", 4), ("of_128", 128)):
            whole = {row * tokens for row in range(700 // tokens + 1) if first < (row + 1) * tokens <= end}
            assert found[part_name] == whole, (first, end, part_name)


def test_a_chunk_of_such_rows_may_leave_while_the_prompt_is_computed() -> None:
    planned = planner().plan(common(describe(SHAPE), describe(SHAPE)), 0, 1000, 1 << 12)
    assert planned.early_chunks == planned.chunks > 3
    needed = [planned.chunk(index).needs_tokens for index in range(planned.chunks)]
    assert needed == sorted(needed)


def changed(pool: Pool, part: str, **changes: object) -> Pool:
    planes = (msgspec.structs.replace(each, **changes) if each.part == part else each for each in pool.planes)
    return msgspec.structs.replace(pool, planes=tuple(planes))


def test_rows_of_other_lengths_are_another_model() -> None:
    pool = describe(SHAPE)
    assert isinstance(verdict(pool, pool), Same)
    assert isinstance(verdict(pool, describe(replace(SHAPE, block_tokens=128))), Convertible)
    other = verdict(pool, changed(pool, "of_128", row_tokens=256, token_axis=(Step(1, 0),)))
    assert isinstance(other, Incompatible)
    assert other.reasons[0].startswith("row_tokens: sender 128, receiver 256 (layer 1 of_128)")


def test_a_pool_whose_rows_do_not_fill_a_block_is_invalid() -> None:
    pool = describe(SHAPE)
    (reason,) = check_pool(changed(pool, "of_128", row_tokens=64))
    assert reason.endswith("token_axis: counts 2, 64 tokens each, block_tokens 256")
    beside = check_pool(changed(pool, "of_4_scale", row_tokens=2))
    assert "layer 0 of_4: row_tokens: 2 of the scales, 4 of the rows" in beside
    split = msgspec.structs.replace(pool, shard=Shard(tp_size=2, cp_size=2))
    assert "row_tokens: 4 in a full group, cp_size 2, must be 1 there" in " ".join(check_pool(split))
