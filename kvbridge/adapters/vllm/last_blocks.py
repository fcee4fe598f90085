"""Clears, in place of vLLM, the block in which a prompt that is fetched ends.

Where groups have numbers of other kinds (beside states), what lies behind the prompt may have been another group's, of
which a kernel for attention may make NaN. So vLLM clears all blocks that a request gets, before its connector hears of
them: 0.3 to 0.5 ms before the want leaves (two H200s, 2026-11). Of groups that come whole the other blocks are written
whole; and the last one can be cleared while the agents talk, as the want waits for the fence behind that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from kvbridge_proto.engine import Want

from ...values import Value
from ..engine.memory import Memory
from .layers import kind_of
from .pages import BlockPages
from .versions import clears_last_blocks, transfer_ids

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def loaded_ids(cache: KVCacheConfig) -> tuple[int, ...]:
    """The groups, in vLLM's own numbering, that need not be cleared: windows to be computed again, and ours."""
    is_ours = clears_last_blocks(cache)
    specs = [(number, cache.kv_cache_groups[number].kv_cache_spec) for number in transfer_ids(cache)]
    return tuple(
        number
        for number, spec in specs
        if getattr(spec, "prefix_replay_tokens", 0) or (is_ours and kind_of(spec) == "full")
    )


class LastBlocks(Value):
    """`pages`: of each group that comes whole. `block_tokens` counts those of each group's block, over all ranks."""

    pages: Mapping[int, Sequence[torch.Tensor]]
    block_tokens: Sequence[int]

    @classmethod
    def of(cls, memory: Memory, pages: BlockPages, block_tokens: Sequence[int]) -> LastBlocks:
        whole = [number for number, group in enumerate(memory.pool.groups) if group.kind == "full"]
        return cls({number: pages.of_group[number] for number in whole}, block_tokens)

    def clear(self, want: Want) -> None:
        """Not a block that begins with rows from the prefix cache: vLLM has copied it whole."""
        pages: list[torch.Tensor] = []
        for piece in want.blocks:
            begins = (piece.first + len(piece.ids) - 1) * self.block_tokens[piece.group]
            if piece.group in self.pages and piece.ids and begins >= want.first_token:
                pages += [each[piece.ids[-1]] for each in self.pages[piece.group]]
        if pages:
            torch._foreach_zero_(pages)  # in a launch or two for all layers
