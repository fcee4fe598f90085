"""Rows arrive where they belong, and nothing else is written: each kind of difference, against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from testing.carried import carry
from testing.pools import LAYOUTS, Shape

TOKENS = (1, 15, 16, 17, 1000)


def shape_for(tokens: int, **changes: object) -> Shape:
    """A shape with room for so many tokens and two blocks more."""
    shape = replace(Shape(), **changes)
    return replace(shape, blocks=-(-tokens // shape.block_tokens) + 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_to_any_layout(layout: str) -> None:
    """Whole prompts in one direction of each pair, some of their tokens in several chunks in the other."""
    layouts, blocks = [*LAYOUTS], itertools.cycle([(16, 16), (16, 32), (48, 16)])
    for other, (ours, theirs) in zip(LAYOUTS, blocks, strict=False):
        widths = {"key_width": 32, "value_width": 16, "pad_bytes": 64}
        sender = shape_for(70, layout=layout, block_tokens=ours, **widths)
        receiver = shape_for(70, layout=other, block_tokens=theirs, **widths)
        if layouts.index(layout) <= layouts.index(other):
            carry(sender, receiver, range(70))
        if layouts.index(layout) >= layouts.index(other):
            carry(sender, receiver, range(16, 61), 1 << 10)


@pytest.mark.parametrize("tokens", TOKENS)
def test_token_counts(tokens: int) -> None:
    for ours, theirs in itertools.product((1, 16, 48, 128), repeat=2):
        sender = shape_for(tokens, layout="hnd", kv_heads=2, block_tokens=ours)
        carry(sender, shape_for(tokens, layout="packed", kv_heads=2, block_tokens=theirs), range(tokens))


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8", "fp16", "fp32", "opaque"])
def test_other_element_sizes(codec: str) -> None:
    for one, other in itertools.product(["nhd", "packed", "cpu_vec"], repeat=2):
        scales = {"k": (0.5, 4.0, 1.0, 2.0), "v": (1.0, 2.0, 3.0, 4.0)}
        sender = shape_for(35, layout=one, codec=codec, scales=scales, key_width=7, value_width=9)
        carry(sender, replace(sender, layout=other, tp_size=2), range(35))
        carry(sender, replace(sender, layout=other, tp_size=2), range(3, 35))


@pytest.mark.parametrize("slot_bytes", [64, 70, 128, 512, 4096, 1 << 20])
def test_any_slot_that_holds_a_row(slot_bytes: int) -> None:
    layouts = ["nhd", "cpu_vec", "cross_layer", "packed_hnd"]
    for one, other in zip(layouts, [*layouts[1:], "packed_hnd"], strict=True):
        sender = shape_for(20, layout=one, kv_heads=3, key_width=32, value_width=16)
        carry(sender, replace(sender, layout=other), range(20), slot_bytes)
        carry(sender, replace(sender, layout=other, block_tokens=32, tp_size=3), range(7, 20), slot_bytes)
