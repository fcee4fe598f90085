"""Every pair of block sizes with every pair of tensor-parallel sizes; the other axes change from case to case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.support.oracle import LAYOUTS
from tests.unit.geometry.test_transfer import BLOCKS, RANKS, check, fits, shape_for


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(RANKS, RANKS)))
def test_all_block_pairs(ours: int, theirs: int) -> None:
    case = RANKS.index(ours) * 5 + RANKS.index(theirs)
    layouts = itertools.cycle(itertools.product(LAYOUTS, LAYOUTS))
    heads, tokens, firsts = (
        itertools.cycle([1, 4, 7, 8]),
        itertools.cycle([1, 17, 130]),
        itertools.cycle([0, 5, 16, 48]),
    )
    for _ in range(case):  # begin somewhere else for each pair of ranks
        next(heads), next(tokens), next(firsts), next(layouts), next(layouts)
    for block, other_block in itertools.product(BLOCKS, BLOCKS):
        (one, other), kv_heads, first = next(layouts), next(heads), next(firsts)
        end = first + next(tokens)
        widths = {"key_width": 16, "value_width": 16, "kv_heads": kv_heads, "layers": 1 + case % 2}
        source = shape_for(end, layout=one, block_tokens=block, tp_size=ours, **widths)
        sink = shape_for(end, layout=other, block_tokens=other_block, tp_size=theirs, **widths)
        source, sink = (each if fits(each) else replace(each, layout="cpu_vec") for each in (source, sink))
        check(source, sink, range(first, end), slot_bytes=1 << (10 + case % 8))
