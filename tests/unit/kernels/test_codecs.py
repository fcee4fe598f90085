"""Casts against the table: all patterns of small codecs, many of large ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, LARGEST, Number, cast

from kvbridge.geometry.wire import PLAIN
from tests.unit.kernels import slow_codecs as slow

SMALL = [name for name in DTYPES if name != "fp32"]
# A power of two, one that is not, one that overflows 8 bits, one that makes everything small.
SCALES = [None, 0.5, 0.0371, 1e-4, 37.0]

# From here on an fp32 is an infinity: the middle between the largest number and the next that there would be.
ENDS = {"fp16": 65520.0, "bf16": float.fromhex("0x1.ffp127")}


def patterns_of(name: str) -> np.ndarray:
    """Every pattern of a codec; for fp32 every 4099th, and the neighbourhood of each border of fp8 and of infinity."""
    if name != "fp32":
        return np.arange(1 << (8 * DTYPES[name].itemsize))
    borders = []
    for codec in ("fp8_e4m3", "fp8_e5m2"):
        ladder = np.sort(slow.numbers(codec)[np.isfinite(slow.numbers(codec))])
        middle = ((ladder[1:] + ladder[:-1]) / 2).astype(np.float32)
        borders += [middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9))]
    for infinite in ENDS.values():
        end = np.array([infinite, -infinite], np.float32)
        borders += [end, np.nextafter(end, np.float32(0)), end * np.float32(1.0001)]
    dense = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([*borders, dense])


def stored_as_bytes(patterns: np.ndarray, name: str) -> np.ndarray:
    if name == "fp32":
        return patterns.astype(np.float32).view(np.uint8)
    return patterns.astype({1: np.uint8, 2: np.uint16}[DTYPES[name].itemsize]).view(np.uint8)


def bytes_as_stored(raw: np.ndarray, name: str) -> np.ndarray:
    if name == "fp32":
        return raw.view(np.float32)
    return raw.view({1: np.uint8, 2: np.uint16}[DTYPES[name].itemsize]).astype(np.int64)


def run(patterns: np.ndarray, old: Number, new: Number, planes: int = 1, heads: int = 1) -> np.ndarray:
    sender = torch.from_numpy(stored_as_bytes(patterns, old.name)).view(planes, heads, -1)
    size = patterns.size // (planes * heads) * DTYPES[new.name].itemsize
    target = torch.full((planes, heads, size), 0xA5, dtype=torch.uint8)
    cast(sender, target, old, new)
    return bytes_as_stored(target.view(-1).numpy(), new.name)


def number(name: str, scale: float | None) -> Number:
    return Number(name, None if scale is None else torch.tensor([[scale]], dtype=torch.float32))


def test_every_plain_codec_is_compared() -> None:
    assert DTYPES.keys() == LARGEST.keys() == {*slow.FORMATS, "fp32", "int8"}
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == PLAIN
    assert {old for old, _, _ in CORNERS} == BOUNDS.keys() == {name for name in PLAIN if PLAIN[name] == 1}


@pytest.mark.parametrize("old", [*SMALL, "fp32"])
@pytest.mark.parametrize("new", [*SMALL, "fp32"])
def test_every_pattern_becomes_the_nearest_number(old: str, new: str) -> None:
    patterns = patterns_of(old)
    # fp32 has a million patterns here: two pairs of scales are enough for it.
    for scales in product(SCALES, SCALES) if old in SMALL else [(None, None), (None, 0.0371)]:
        found = run(patterns, number(old, scales[0]), number(new, scales[1]))
        wanted = slow.encode(slow.decode(patterns, old, scales[0]), new, scales[1])
        agree = slow.same(found, wanted, new)
        wrong = np.flatnonzero(~agree)[:5]
        assert agree.all(), f"under {scales} {patterns[wrong]} became {found[wrong]}, not {wanted[wrong]}"


@pytest.mark.parametrize("old_each", ["none", "plane", "head", "both"])
@pytest.mark.parametrize("new_each", ["none", "plane", "head", "both"])
def test_each_head_has_its_own_scale(old_each: str, new_each: str) -> None:
    planes, heads, width = 3, 5, 65536  # a head fills a tile, so planes, heads and columns are all cut
    shapes = {"none": (1, 1), "plane": (planes, 1), "head": (1, heads), "both": (planes, heads)}
    rng = np.random.default_rng(0)
    old, new = (
        torch.from_numpy(rng.uniform(0.01, 9, shapes[each]).astype(np.float32)) for each in (old_each, new_each)
    )
    patterns = rng.integers(0, 0x7F00, (planes, heads, width))
    found = run(patterns, Number("bf16", old), Number("fp8_e4m3", new), planes, heads).reshape(patterns.shape)
    values = slow.decode(patterns, "bf16", old.numpy()[:, :, None])
    assert slow.same(found, slow.encode(values, "fp8_e4m3", new.numpy()[:, :, None]), "fp8_e4m3").all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 15, 17, 33, 65537])
def test_length_does_not_change_a_result(count: int) -> None:
    """Vector and tail loops of torch must agree."""
    patterns = np.random.default_rng(count).integers(0, 65536, count)
    found = run(patterns, number("bf16", None), number("fp8_e4m3", 0.3))
    wanted = slow.encode(slow.decode(patterns, "bf16"), "fp8_e4m3", 0.3)
    assert slow.same(found, wanted, "fp8_e4m3").all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_table_is_what_torch_means_by_the_codec(name: str) -> None:
    meant = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).float().numpy()
    assert np.array_equal(meant, slow.numbers(name).astype(np.float32), equal_nan=True)


# What each codec has at its ends and around zero, and what becomes of it, worked out by hand: (old, new, patterns).
CORNERS: list[tuple[str, str, dict[int, int]]] = [
    # +-448, the largest; +-0; 2^-9, the smallest; 7 * 2^-9, the largest without an exponent; 2^-6, the first with one
    ("fp8_e4m3", "fp8_e5m2", {0x7E: 0x5F, 0xFE: 0xDF, 0x00: 0x00, 0x80: 0x80, 0x01: 0x18, 0x07: 0x23, 0x08: 0x24}),
    ("fp8_e4m3", "int8", {0x7E: 127, 0xFE: 0x80, 0x7F: 0, 0xFF: 0, 0x00: 0, 0x80: 0, 0x01: 0, 0x38: 1, 0xB8: 0xFF}),
    ("fp8_e4m3", "bf16", {0x7E: 0x43E0, 0xFE: 0xC3E0, 0x00: 0, 0x80: 0x8000, 0x01: 0x3B00, 0x07: 0x3C60, 0x38: 0x3F80}),
    ("fp8_e4m3", "fp16", {0x7E: 0x5F00, 0xFE: 0xDF00, 0x00: 0, 0x80: 0x8000, 0x01: 0x1800, 0x07: 0x2300, 0x38: 0x3C00}),
    # +-57344 and the infinities are clamped; 2^-16 is lost, 2^-10 lies between 0 and 2^-9, 1.25 * 2^-10 above that
    (
        "fp8_e5m2",
        "fp8_e4m3",
        {0x7B: 0x7E, 0xFB: 0xFE, 0x7C: 0x7E, 0xFC: 0xFE, 0x01: 0x00, 0x81: 0x80, 0x14: 0x00, 0x15: 0x01},
    ),
    ("fp8_e5m2", "int8", {0x7C: 127, 0xFC: 0x80, 0x7D: 0, 0x3C: 1, 0x38: 0, 0x3E: 2, 0xB8: 0, 0x80: 0}),
    ("fp8_e5m2", "bf16", {0x7C: 0x7F80, 0xFC: 0xFF80, 0x01: 0x3780, 0x81: 0xB780, 0x7B: 0x4760, 0x80: 0x8000}),
    ("fp8_e5m2", "fp16", {0x7C: 0x7C00, 0xFC: 0xFC00, 0x01: 0x0100, 0x81: 0x8100, 0x7B: 0x7B00, 0x80: 0x8000}),
    # -128; 127 up to 128; 17 and 19 are ties of e4m3, 9 and 11 of e5m2
    ("int8", "fp8_e4m3", {0x80: 0xF0, 127: 0x70, 0x81: 0xF0, 17: 0x58, 19: 0x5A, 0: 0, 1: 0x38, 0xFF: 0xB8}),
    ("int8", "fp8_e5m2", {0x80: 0xD8, 127: 0x58, 9: 0x48, 11: 0x4A, 0: 0, 1: 0x3C, 0xFF: 0xBC}),
    ("int8", "bf16", {0x80: 0xC300, 127: 0x42FE, 0: 0, 1: 0x3F80, 0xFF: 0xBF80}),
    ("int8", "fp16", {0x80: 0xD800, 127: 0x57F0, 0: 0, 1: 0x3C00, 0xFF: 0xBC00}),
]


@pytest.mark.parametrize(("name", "end"), ENDS.items())
@pytest.mark.parametrize("sign", [1, -1])
def test_what_16_bits_cannot_hold_is_an_infinity_as_in_torch(name: str, end: float, sign: int) -> None:
    below = np.nextafter(np.float32(end), np.float32(0))
    values = sign * np.array([LARGEST[name], below, end, 3.4e38, np.inf], np.float32)
    found = slow.decode(run(values, Number("fp32"), Number(name)), name)
    assert np.array_equal(found[:2], sign * np.array([LARGEST[name]] * 2, np.float32))
    assert np.isinf(found[2]) and np.isinf(found[4])
    assert np.array_equal(found, torch.from_numpy(values).to(DTYPES[name]).float().numpy())
    doubled = slow.decode(run(values[2:], number("fp32", 0.5), number(name, 0.25)), name)
    assert np.isinf(doubled).all() and (np.sign(doubled) == sign).all()


# Patterns that are NaN in the old codec are NaN in the new one, whichever.
NANS = {"fp8_e4m3": (0x7F, 0xFF), "fp8_e5m2": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)}


@pytest.mark.parametrize(("old", "new", "corners"), CORNERS)
def test_the_corners_of_8_bits(old: str, new: str, corners: dict[int, int]) -> None:
    found = run(np.array([*corners, *NANS.get(old, ())]), Number(old), Number(new))
    assert [hex(each) for each in found[: len(corners)]] == [hex(each) for each in corners.values()]
    assert new == "int8" or np.isnan(slow.numbers(new)[found[len(corners) :]]).all()


# The sender's scale and the receiver's: alike, far apart either way, and anything.
PAIRS = [(1.0, 1.0), (0.5, 0.5), (1.0, 0.5), (0.5, 1.0), (1.0, 64.0), (64.0, 1.0), (1e-3, 1e3), (1e3, 1e-3)]
PAIRS += [tuple(pair) for pair in np.exp2(np.random.default_rng(4).uniform(-8, 8, (12, 2))).tolist()]
BOUNDS = {"fp8_e4m3": (2.0**-4, 2.0**-10), "fp8_e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}


@pytest.mark.parametrize(("old_scale", "new_scale"), PAIRS)
def test_requantizing_keeps_the_bound(old_scale: float, new_scale: float) -> None:
    """|x' - x| <= a |x| + b s, and what is too large becomes the largest."""
    for old, new in product(BOUNDS, BOUNDS):
        requantized(old, new, old_scale, new_scale)


def requantized(old: str, new: str, old_scale: float, new_scale: float) -> None:
    patterns = patterns_of(old)
    values = slow.decode(patterns, old, old_scale).astype(np.float64)
    values[np.isinf(values)] = np.copysign(1e30, values[np.isinf(values)])
    found = slow.decode(run(patterns, number(old, old_scale), number(new, new_scale)), new, new_scale).astype(
        np.float64
    )
    relative, absolute = BOUNDS[new]
    known, rounding = ~np.isnan(values), 1 + 1e-6  # of the two scales to fp32
    low, high = (-128.0 if new == "int8" else -LARGEST[new]) * new_scale, LARGEST[new] * new_scale
    wanted = np.clip(values, low, high)[known]
    bound = (relative * np.abs(wanted) + absolute * new_scale) * rounding + np.abs(wanted) * 1e-6
    assert (np.abs(found[known] - wanted) <= bound).all()
    assert (np.isnan(found[~known]) | (found[~known] == 0)).all()
