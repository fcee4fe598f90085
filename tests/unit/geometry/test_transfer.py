"""Rows arrive where they belong, and nothing else is written: each kind of difference, against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvbridge.geometry.compat import Incompatible, verdict
from tests.support.oracle import LAYOUTS, Shape, build_all, transfer

TOKENS = (1, 15, 16, 17, 1000)


def shape_for(tokens: int, **changes: object) -> Shape:
    """A shape with room for so many tokens and two blocks more."""
    shape = replace(Shape(), **changes)
    return replace(shape, blocks=-(-tokens // shape.block_tokens) + 2)


def fits(shape: Shape) -> bool:
    return shape.layout != "cpu_amx" or (shape.block_tokens % 16 == 0 and shape.value_width % 16 == 0)


def check(sender: Shape, receiver: Shape, tokens: range, slot_bytes: int = 1 << 14, prompt: int = 0) -> None:
    senders, receivers = build_all(sender), build_all(receiver)
    found = verdict(senders[0].pool, receivers[-1].pool)
    assert not isinstance(found, Incompatible), found
    wrong = transfer(senders, receivers, tokens, slot_bytes, prompt)
    assert not wrong, f"{wrong}\n{sender}\n{receiver}\n{tokens} slot_bytes={slot_bytes}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_to_any_layout(layout: str) -> None:
    for other, (ours, theirs) in itertools.product(LAYOUTS, [(16, 16), (16, 32), (48, 16)]):
        widths = {"key_width": 32, "value_width": 16, "pad_bytes": 64}
        sender = shape_for(70, layout=layout, block_tokens=ours, **widths)
        check(sender, shape_for(70, layout=other, block_tokens=theirs, **widths), range(70))
        check(sender, shape_for(70, layout=other, block_tokens=theirs, **widths), range(16, 61), 1 << 10)


@pytest.mark.parametrize("tokens", TOKENS)
def test_token_counts(tokens: int) -> None:
    for ours, theirs in itertools.product((1, 16, 48, 128), repeat=2):
        sender = shape_for(tokens, layout="hnd", kv_heads=2, block_tokens=ours)
        check(sender, shape_for(tokens, layout="packed", kv_heads=2, block_tokens=theirs), range(tokens))


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8", "fp16", "fp32", "opaque"])
def test_other_element_sizes(codec: str) -> None:
    for one, other in itertools.product(["nhd", "packed", "cpu_vec"], repeat=2):
        scales = {"k": (0.5, 4.0, 1.0, 2.0), "v": (1.0, 2.0, 3.0, 4.0)}
        sender = shape_for(35, layout=one, codec=codec, scales=scales, key_width=7, value_width=9)
        check(sender, replace(sender, layout=other, tp_size=2), range(35))
        check(sender, replace(sender, layout=other, tp_size=2), range(3, 35))


@pytest.mark.parametrize("slot_bytes", [64, 70, 128, 512, 4096, 1 << 20])
def test_any_slot_that_holds_a_row(slot_bytes: int) -> None:
    for one, other in itertools.product(["nhd", "cpu_vec", "cross_layer", "packed_hnd"], repeat=2):
        sender = shape_for(45, layout=one, kv_heads=3, key_width=32, value_width=16)
        check(sender, replace(sender, layout=other), range(45), slot_bytes)
        check(sender, replace(sender, layout=other, block_tokens=32, tp_size=3), range(7, 45), slot_bytes)
