"""Block tables: places, growth, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Group

from kvbridge.errors import EngineError
from kvbridge.geometry.tokens import BlockTable

GROUP = Group(kind="full", block_tokens=16, blocks=100)


@given(
    block_tokens=st.sampled_from([1, 8, 16, 32, 48, 64, 128]),
    ids=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    first_block=st.integers(0, 5),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_token_is_in_its_block(block_tokens: int, ids: list[int], first_block: int, cut: tuple[float, float]) -> None:
    group = Group(kind="full", block_tokens=block_tokens, blocks=100)
    table = BlockTable.of(group, Blocks(0, first_block, tuple(ids)))
    held = len(ids) * block_tokens
    first, end = sorted(first_block * block_tokens + int(part * held) for part in cut)
    expected = [
        ids[token // block_tokens - first_block] * block_tokens + token % block_tokens for token in range(first, end)
    ]
    assert table.places(first, end).tolist() == expected


@pytest.mark.parametrize(("unit_tokens", "expected"), [(16, [7, 3]), (8, [14, 15, 6]), (4, [28, 29, 30, 31, 12, 13])])
def test_a_unit_counts_whole(unit_tokens: int, expected: list[int]) -> None:
    table = BlockTable.of(GROUP, Blocks(0, 0, (7, 3)))
    assert table.places(0, 22, unit_tokens).tolist() == expected


def test_growing_makes_a_new_table() -> None:
    small = BlockTable.of(GROUP, Blocks(0, 0, (5,)))
    large = small.extended(Blocks(0, 1, (6, 7)))
    assert (len(small.ids), len(large.ids)) == (1, 3)
    assert large.places(15, 18).tolist() == [5 * 16 + 15, 6 * 16, 6 * 16 + 1]


def test_an_empty_range_needs_no_blocks() -> None:
    assert BlockTable.of(GROUP).places(16, 16).tolist() == []


@pytest.mark.parametrize(
    ("piece", "code", "reason"),
    [
        (Blocks(0, 2, (1,)), "blocks_not_contiguous", "first: group 0 goes on at entry 2, expected 1"),
        (Blocks(0, 0, (1,)), "blocks_not_contiguous", "first: group 0 goes on at entry 0, expected 1"),
        (Blocks(0, 1, (1, 100)), "block_out_of_range", "block id: group 0 got 100, the pool has 100 blocks"),
    ],
)
def test_refuses_a_piece_that_cannot_be(piece: Blocks, code: str, reason: str) -> None:
    table = BlockTable.of(GROUP, Blocks(0, 0, (4,)))
    with pytest.raises(EngineError) as refused:
        table.extended(piece)
    assert (refused.value.code, refused.value.reasons) == (code, (reason,))


@pytest.mark.parametrize("tokens", [(0, 49), (0, 17), (15, 20), (47, 49)])
def test_refuses_tokens_without_a_block(tokens: tuple[int, int]) -> None:
    table = BlockTable.of(GROUP, Blocks(0, 1, (4, 5)))
    with pytest.raises(EngineError) as refused:
        table.places(*tokens)
    assert refused.value.code == "blocks_too_few"
    assert refused.value.reasons == (f"tokens: [{tokens[0]}, {tokens[1]}) asked for, the blocks hold [16, 48)",)


def test_a_million_tokens_are_quick_and_64_bit() -> None:
    group = Group(kind="full", block_tokens=16, blocks=1 << 30)
    table = BlockTable.of(group, Blocks(0, 0, tuple(range((1 << 30) - 65536, 1 << 30))))
    places = table.places(0, 1 << 20)
    assert places.dtype == np.int64 and places[-1] == (1 << 34) - 1
