"""How codecs relate: which share numbers, which share scales, and which can become which."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from kvbridge_kernels import segment
from kvbridge_proto.pool import CODECS, Codec, CodecName

from kvbridge.geometry.explain import BOUNDS
from kvbridge.geometry.wire import (
    MOST_NUMBERS,
    PLAIN,
    POWERS,
    ROW_SCALED,
    SCALED_ROWS,
    base_name,
    can_convert,
    is_scale,
)
from testing.pools import EIGHT_BITS

WIDTH = 576
# Bytes of a row of 576 numbers, scales that lie in another plane aside.
ROW_BYTES = {
    **{name: WIDTH * size for name, size in PLAIN.items()},
    "int8_row_scale": 576,
    "fp8_row_scale": 576,
    "int4_row_scale": 288,
    "mxfp8_e4m3": 576,
    "nvfp4": 288,
    "fp4_mx_block16": 288,
    "mxfp4": 288,
    "fp8_ds_mla": 656,
    "fp8_ds_v4": 576,
    "nvfp4_ds_mla": 352,
    **{name: WIDTH * size for name, size in POWERS.items()},
    "opaque": 656,
}
ROWS = [
    Codec(name=name, width=WIDTH, element_bytes={**PLAIN, **POWERS}.get(name, 1), row_bytes=ROW_BYTES[name])
    for name in get_args(CodecName)
]
NUMBERS = {*PLAIN, "int8_row_scale", "fp8_row_scale"}


def _row(name: str) -> Codec:
    return next(codec for codec in ROWS if codec.name == name)


@pytest.mark.parametrize(
    ("part", "expected"),
    [("k", False), ("latent", False), ("scale", False), ("k_scale", True), ("latent_scale", True), ("k_scales", False)],
)
def test_scales_are_known_by_their_part(part: str, expected: bool) -> None:
    assert is_scale(part) == expected


def test_every_name_on_the_wire_has_its_row() -> None:
    assert tuple(CODECS) == get_args(CodecName)
    assert {*ROW_SCALED.values()} <= PLAIN.keys()
    assert not SCALED_ROWS & {*PLAIN, "fp8_ds_mla", "nvfp4_ds_mla", "opaque"}


def test_every_codec_of_8_bits_has_a_bound_of_error() -> None:
    assert set(EIGHT_BITS) == BOUNDS.keys() == {"fp8_e4m3", "fp8_e5m2", "int8"}


def test_a_row_scaled_codec_holds_plain_numbers() -> None:
    assert base_name(_row("fp8_row_scale")) == "fp8_e4m3"
    assert base_name(_row("int8_row_scale")) == "int8"
    for name in {*get_args(CodecName)} - {"fp8_row_scale", "int8_row_scale"}:
        assert base_name(_row(name)) == name


def test_numbers_become_numbers_and_packed_rows_their_like() -> None:
    for sender, receiver in product(ROWS, ROWS):
        names = {sender.name, receiver.name}
        is_latent = names - {"fp8_ds_mla"} <= set(PLAIN)
        assert can_convert(sender, receiver) == (len(names) == 1 or names <= NUMBERS or is_latent), names


def test_rows_of_other_widths_are_other_rows() -> None:
    for name in ("bf16", "fp8_row_scale", "fp8_ds_mla"):
        narrow = Codec(name="fp32", width=128, element_bytes=4, row_bytes=512)
        assert not can_convert(_row(name), narrow)
    short = Codec(name="opaque", width=WIDTH, element_bytes=1, row_bytes=528)
    assert not can_convert(_row("opaque"), short)


def test_a_row_that_gets_a_scale_is_not_wider_than_the_kernels_take() -> None:
    plain, scaled = (
        [Codec(name=name, width=width, element_bytes=size, row_bytes=width * size) for width in (1024, 1025)]
        for name, size in (("bf16", 2), ("int8_row_scale", 1))
    )
    assert MOST_NUMBERS == segment.MOST_NUMBERS
    assert can_convert(plain[0], scaled[0]) and can_convert(scaled[0], plain[0])
    assert not can_convert(plain[1], scaled[1]) and not can_convert(scaled[1], plain[1])
    assert can_convert(scaled[1], scaled[1]) and can_convert(plain[1], plain[1])
