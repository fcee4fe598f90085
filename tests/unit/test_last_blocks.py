"""The block in which a fetched prompt ends is cleared whole, and nothing else; whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvbridge_proto.common import Blocks
from kvbridge_proto.pool import Codec, Engine, Group, Model, Plane, Pool, Region, Shard, Step

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.vllm.last_blocks import LastBlocks
from kvbridge.adapters.vllm.pages import BlockPages
from kvbridge.loopback.messages import want_of

BLOCKS, TOKENS, HEADS, WIDTH = 6, 4, 2, 8  # WIDTH in bytes
# Byte strides of block, token, head, and where K and V begin.
LAYOUTS = {
    "tokens before heads, K and V in one page": (
        2 * TOKENS * HEADS * WIDTH,
        HEADS * WIDTH,
        WIDTH,
        0,
        TOKENS * HEADS * WIDTH,
    ),
    "K and V of a head side by side": (2 * TOKENS * HEADS * WIDTH, 2 * HEADS * WIDTH, 2 * WIDTH, 0, WIDTH),
    "K and V apart": (TOKENS * HEADS * WIDTH, HEADS * WIDTH, WIDTH, 0, BLOCKS * TOKENS * HEADS * WIDTH),
    "heads before blocks": (TOKENS * WIDTH, WIDTH, BLOCKS * TOKENS * WIDTH, 0, HEADS * BLOCKS * TOKENS * WIDTH),
}


def memory_of(layout: str, device: str = "cpu") -> Memory:
    block, token, head, *begins = LAYOUTS[layout]
    codec = Codec(name="bf16", width=WIDTH // 2, element_bytes=2, row_bytes=WIDTH)
    planes = tuple(
        Plane(
            layer=0,
            part=part,
            group=0,
            region=0,
            offset=begin,
            block_stride=block,
            token_axis=(Step(TOKENS, token),),
            head_stride=head,
            element_axis=(Step(WIDTH // 2, 2),),
            first_head=0,
            heads=HEADS,
            total_heads=HEADS,
            codec=codec,
        )
        for part, begin in zip(("k", "v"), begins, strict=True)
    )
    size = 2 * BLOCKS * TOKENS * HEADS * WIDTH
    storage = torch.full((size,), 255, dtype=torch.uint8, device=device).untyped_storage()
    groups = (
        Group(kind="full", block_tokens=TOKENS, blocks=BLOCKS),
        Group(kind="state", block_tokens=TOKENS, blocks=BLOCKS),
    )
    model, shard = Model(name="m", layers=()), Shard()
    return Memory(
        Pool(
            engine=Engine(id="e", kind="vllm", version="0.33"),
            model=model,
            shard=shard,
            groups=groups,
            regions=(Region(size),),
            planes=planes,
        ),
        (storage,),
    )


def cleared(layout: str, first: int, end: int, *ids: int, device: str = "cpu") -> set[int]:
    """The blocks of which all bytes are zeros. AssertionError if a block has some, or a group without rows is asked."""
    memory = memory_of(layout, device)
    blocks = (Blocks(0, first // TOKENS, ids), Blocks(1, 0, (5,)))
    want = want_of("r", "", range(first, end), (), TOKENS, blocks=blocks)
    LastBlocks.of(memory, BlockPages.of(memory), [TOKENS, TOKENS]).clear(want)
    found = torch.empty(0, dtype=torch.uint8, device=device).set_(memory.storages[0]).cpu().numpy()
    block, token, head, *begins = LAYOUTS[layout]
    steps = np.add.outer(np.add.outer(np.arange(TOKENS) * token, np.arange(HEADS) * head), np.arange(WIDTH))
    rows = {number: [found[begin + number * block + steps] for begin in begins] for number in range(BLOCKS)}
    assert all(len(np.unique(each)) == 1 for each in rows.values())
    return {number for number, each in rows.items() if not np.any(each)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_last_block_is_cleared(layout: str) -> None:
    assert cleared(layout, 0, 10, 3, 1, 4) == {4}
    assert cleared(layout, 4, 7, 2) == {2}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_that_begins_with_rows_of_the_prefix_cache_is_left(layout: str) -> None:
    assert cleared(layout, 5, 7, 2) == set()
