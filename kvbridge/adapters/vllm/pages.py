"""All bytes that an engine's blocks hold, whatever the layout: views for what its own process clears or copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd

import torch
from kvbridge_proto.engine import Want
from kvbridge_proto.pool import Plane, Pool

from ...values import Value
from ..engine.memory import Memory
from .block_tables import NULL_BLOCK

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
COPIED_AT_ONCE = 32 << 20  # bytes: what a copy needs of the memory that the engine leaves free


class BlockPages(Value):
    """By group: tensors [blocks, words] that hold all its rows, and no other block's."""

    of_group: Mapping[int, Sequence[torch.Tensor]]

    @classmethod
    def of(cls, memory: Memory) -> BlockPages:
        return cls({number: list(_views(memory, number)) for number in range(len(memory.pool.groups))})

    def copy(self, source: Want, target: Want) -> None:
        """Fill target's blocks with what source's hold. It wants no token that source does not, up to the same end."""
        for ours in target.blocks:
            theirs = source.blocks[ours.group]
            if (before := ours.first - theirs.first) < 0:
                raise ValueError(f"group {ours.group}: from block {ours.first} on, got only those from {theirs.first}")
            pairs = dict(zip(ours.ids, theirs.ids[before:], strict=True))
            pairs.pop(NULL_BLOCK, None)
            for page in self.of_group[ours.group] if pairs else ():
                _copy(page, list(pairs.values()), list(pairs))


def _copy(page: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    count = max(1, COPIED_AT_ONCE // (page.shape[1] * page.element_size()))
    for first in range(0, len(sources), count):
        some, others = (
            torch.tensor(each[first : first + count]).to(page.device, non_blocking=True) for each in (sources, targets)
        )
        page.index_copy_(0, others, page.index_select(0, some))


def _views(memory: Memory, group: int) -> Iterator[torch.Tensor]:
    for region, stride, begin, end in _merged(memory.pool, group):
        storage = memory.storages[region]
        size = gcd(8, stride, begin, end - begin, storage.nbytes())
        words = torch.empty(0, dtype=WORDS[size], device=storage.device).set_(storage)
        shape = memory.pool.groups[group].blocks, (end - begin) // size
        yield words.as_strided(shape, (stride // size, 1), begin // size)


def _merged(pool: Pool, group: int) -> list[tuple[int, int, int, int]]:
    """Region, distance of blocks, begin and end in the first one: of the bytes that this group has in a block."""
    found: list[tuple[int, int, int, int]] = []
    planes = [each for each in pool.planes if each.group == group]
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
