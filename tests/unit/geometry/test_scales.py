"""Scales to take over: those of the sender's ranks, put together for the receiver's heads."""

from __future__ import annotations

from dataclasses import replace

from kvbridge_proto.engine import Scales
from kvbridge_proto.pool import Pool

from kvbridge.geometry.check import check_pool, rescaled
from kvbridge.geometry.scales import other_scales, sender_scales
from testing.oracle import Shape, describe

SHAPE = Shape(key_width=32, value_width=16, codec="fp8_e4m3")
BY_HEAD = {"k": (1.0, 2.0, 3.0, 4.0), "v": (5.0, 6.0, 7.0, 8.0)}
HALVES = {"k": (0.5,), "v": (0.25,)}


def planes(k: tuple[float, ...], v: tuple[float, ...]) -> tuple[Scales, ...]:
    return tuple(Scales(layer, part, scales) for layer in range(2) for part, scales in (("k", k), ("v", v)))


def ranks(scales: dict[str, tuple[float, ...]], tp_size: int = 2) -> list[Pool]:
    return [describe(replace(SHAPE, tp_size=tp_size, scales=scales), rank) for rank in range(tp_size)]


def test_a_receiver_gets_the_scales_of_its_heads() -> None:
    receiver = ranks({"k": (1.0,), "v": (1.0,)})[1]
    assert sender_scales([describe(replace(SHAPE, scales=BY_HEAD))], receiver) == planes((3.0, 4.0), (7.0, 8.0))


def test_scales_of_several_ranks_are_put_together() -> None:
    own = describe(SHAPE)
    assert sender_scales(ranks(HALVES), own) == planes((0.5,), (0.25,))
    first, second = ranks(HALVES)
    second = rescaled(second, planes((2.0,), (0.25,)))
    # v has one for all its heads, but a layer has as many for v as for k
    found = sender_scales([second, first], own)
    assert found == planes((0.5, 0.5, 2.0, 2.0), (0.25,) * 4)
    assert check_pool(rescaled(own, found)) == ()


def test_there_is_nothing_to_take_where_numbers_are_of_another_kind_or_a_rank_is_missing() -> None:
    assert sender_scales([describe(replace(SHAPE, codec="bf16"))], describe(SHAPE)) == ()
    assert sender_scales(ranks(HALVES)[:1], describe(SHAPE)) == ()


def test_a_pool_under_others_is_told_the_first() -> None:
    there = planes((0.5,), (0.25,))
    own = describe(SHAPE)
    assert other_scales(there, rescaled(own, there)) is None
    assert other_scales(planes((1.0,), (1.0,)), own) is None  # no scale is a scale of 1
    found = other_scales(there, rescaled(own, there[:1]))
    assert str(found) == "scales: sender 0.25, receiver none (layer 0 v); needs scales=requantize"
