"""Clears, in place of vLLM, the block in which a prompt that is fetched ends.

Where groups have numbers of other kinds (beside states), what lies behind the prompt may have been another group's, of
which a kernel for attention may make NaN. So vLLM clears all blocks that a request gets, before its connector hears of
them: 0.3 to 0.5 ms before the want leaves (two H200s, 2026-11). Of groups that come whole the other blocks are written
whole; and the last one can be cleared while the agents talk, as the want waits for the fence behind that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from kvbridge_proto.engine import Want
from kvbridge_proto.pool import Plane

from ...values import Value
from ..engine.memory import Memory
from .layers import kind_of
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
    """`pages`: for each group that comes whole, tensors [blocks, bytes] that hold all its rows, and no other block's.

    `block_tokens` counts those of each group's block, over all ranks.
    """

    pages: Mapping[int, Sequence[torch.Tensor]]
    block_tokens: Sequence[int]

    @classmethod
    def of(cls, memory: Memory, block_tokens: Sequence[int]) -> LastBlocks:
        pool = memory.pool
        whole = [number for number, group in enumerate(pool.groups) if group.kind == "full"]
        flat = [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in memory.storages]
        pages: dict[int, list[torch.Tensor]] = {number: [] for number in whole}
        for number in whole:
            blocks = pool.groups[number].blocks
            for region, stride, begin, end in _merged([each for each in pool.planes if each.group == number]):
                pages[number].append(flat[region].as_strided((blocks, end - begin), (stride, 1), begin))
        return cls(pages, block_tokens)

    def clear(self, want: Want) -> None:
        """Not a block that begins with rows from the prefix cache: vLLM has copied it whole."""
        pages: list[torch.Tensor] = []
        for piece in want.blocks:
            begins = (piece.first + len(piece.ids) - 1) * self.block_tokens[piece.group]
            if piece.group in self.pages and piece.ids and begins >= want.first_token:
                pages += [each[piece.ids[-1]] for each in self.pages[piece.group]]
        if pages:
            torch._foreach_zero_(pages)  # in a launch or two for all layers


def _merged(planes: Sequence[Plane]) -> list[tuple[int, int, int, int]]:
    """Region, distance of blocks, begin and end in the first one: of the bytes that these planes have in a block."""
    found: list[tuple[int, int, int, int]] = []
    spans = {(each.region, each.block_stride, *span) for each in planes for span in _spans(each)}
    for region, stride, begin, end in sorted(spans):
        if found and found[-1][:2] == (region, stride) and begin <= found[-1][3]:
            begin, end = found[-1][2], max(end, found.pop()[3])
        found.append((region, stride, begin, end))
    return found


def _spans(plane: Plane) -> Iterator[tuple[int, int]]:
    """Begin and end of the plane's bytes in its first block. Each lies within the distance of two blocks."""
    axes = [(plane.heads, plane.head_stride), *((step.count, step.stride) for step in plane.token_axis)]
    axes += [(step.count, step.stride) for step in plane.element_axis]
    size, outer = plane.codec.element_bytes, []
    for count, stride in sorted(axes, key=lambda axis: axis[1]):
        if (reach := size + (count - 1) * stride) <= plane.block_stride:
            size = reach
        else:
            outer.append(range(0, count * stride, stride))
    for steps in product(*outer):
        yield plane.offset + sum(steps), plane.offset + sum(steps) + size
