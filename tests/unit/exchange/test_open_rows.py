"""DeepSeek V4's rows of 4 and 128 tokens: what travels is all that is read, and is there, whatever the lengths. Pure.

The oracle says what compressors read: a row of 4 is made at its last token, of its 4 tokens and the 4 before; one
128 of its own tokens. vLLM keeps the blocks of its own windows of 8 and 128 tokens.
"""

from __future__ import annotations

import pytest

from kvbridge.adapters.vllm.block_tables import GroupTables, TableGroup
from kvbridge.cache_kinds import OPEN_4

OPEN = {4: TableGroup(4, "sliding", OPEN_4, span=8), 128: TableGroup(8, "chunked", 128, span=128)}


def read(ratio: int, end: int) -> int:
    """The first token that is read of the compressor's rows by tokens from `end` on."""
    last = end // ratio * ratio + ratio - 1  # of the next row that is made
    return max(0, last + 1 - (2 * ratio if ratio == 4 else ratio))


def held(ratio: int, end: int) -> int:
    """`get_num_skipped_tokens` of vLLM's SlidingWindowManager, in whole blocks."""
    return max(0, end - (8 if ratio == 4 else ratio) + 1) // OPEN[ratio].block_tokens * OPEN[ratio].block_tokens


@pytest.mark.parametrize("ratio", OPEN)
def test_what_is_read_again_travels_and_is_still_there_after_the_whole_prompt(ratio: int) -> None:
    tables = GroupTables((TableGroup(256, "full", 0), OPEN[ratio]))
    for tokens in range(1, 3 * 512):
        assert OPEN[ratio].first(tokens) <= read(ratio, tokens), "nothing that is read is left out"
        assert held(ratio, tokens) <= OPEN[ratio].first(tokens - 1), "vLLM has given up what is offered"
        assert tables.outlives(tokens)


@pytest.mark.parametrize("ratio", OPEN)
def test_a_block_that_did_not_travel_is_read_by_no_request_that_finds_it_in_the_prefix_cache(ratio: int) -> None:
    """vLLM takes what it allocated for a fetched prompt for computed, and hands out prefixes of whole blocks of 256."""
    for end in range(1, 2048):
        unwritten = range(held(ratio, end), OPEN[ratio].first(end))
        for hit in range(256, end + 1, 256):
            if held(ratio, hit) >= held(ratio, end):  # all that vLLM asks for is there
                assert read(ratio, hit) not in unwritten and read(ratio, hit) >= unwritten.stop
