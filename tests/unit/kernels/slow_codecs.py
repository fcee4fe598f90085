"""The codecs again, by definition: decoding looks in a table of all stored patterns, encoding takes the nearest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Format:
    bits: int
    mantissa: int
    bias: int
    has_infinity: bool


FORMATS = {
    "bf16": Format(16, 7, 127, True),
    "fp16": Format(16, 10, 15, True),
    "fp8_e4m3": Format(8, 3, 7, False),  # OCP "fn": no infinity, one NaN per sign
    "fp8_e5m2": Format(8, 2, 15, True),
}


@cache
def numbers(name: str) -> np.ndarray:
    """What each stored pattern means, float64."""
    if name == "int8":
        return np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64)
    form = FORMATS[name]
    pattern = np.arange(1 << form.bits)
    exponent_bits = form.bits - 1 - form.mantissa
    mantissa = pattern & ((1 << form.mantissa) - 1)
    exponent = (pattern >> form.mantissa) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << form.mantissa)
    found = np.where(exponent == 0, np.ldexp(fraction, 1 - form.bias), np.ldexp(1 + fraction, exponent - form.bias))
    top = exponent == (1 << exponent_bits) - 1
    if form.has_infinity:
        found[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    else:
        found[top & (fraction == fraction.max())] = np.nan
    return np.where(pattern >> (form.bits - 1), -found, found)


@cache
def _ladder(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The finite numbers not below zero in order, and their patterns."""
    found = numbers(name)
    (patterns,) = np.nonzero(np.isfinite(found) & ~np.signbit(found))
    order = np.argsort(found[patterns])
    return found[patterns][order], patterns[order]


def decode(stored: np.ndarray, name: str, scale: np.ndarray | float | None = None) -> np.ndarray:
    """fp32 values of patterns (fp32 itself is its own pattern)."""
    values = stored if name == "fp32" else numbers(name)[stored].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values if scale is None else values * np.asarray(scale, np.float32)


def encode(values: np.ndarray, name: str, scale: np.ndarray | float | None = None) -> np.ndarray:
    """Patterns of fp32 values; NaN becomes the codec's positive one.

    Beyond the largest number 16 bits go on to infinity, half a step from it already; 8 bits stay there.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = values if scale is None else values / np.asarray(scale, np.float32)
    if name == "fp32":
        return values
    if name == "int8":
        rounded = np.rint(np.clip(np.nan_to_num(values, nan=0.0, posinf=1e9, neginf=-1e9), -128, 127))
        return rounded.astype(np.int8).view(np.uint8).astype(np.int64)
    ladder, patterns = _ladder(name)
    size = np.minimum(np.nan_to_num(np.abs(values), nan=0.0, posinf=np.inf).astype(np.float64), ladder[-1])
    above = np.minimum(np.searchsorted(ladder, size), len(ladder) - 1)
    below = np.maximum(above - 1, 0)
    up, down = ladder[above] - size, size - ladder[below]
    even = np.where(patterns[above] % 2 == 0, above, below)
    nearest = np.where(up < down, above, np.where(down < up, below, even))
    found = patterns[np.where(ladder[above] == size, above, nearest)]
    bits = FORMATS[name].bits
    if bits == 16:
        beyond = np.abs(values) >= ladder[-1] + (ladder[-1] - ladder[-2]) / 2
        found = np.where(beyond, np.flatnonzero(np.isposinf(numbers(name)))[0], found)
    found = found | (np.signbit(values).astype(np.int64) << (bits - 1))
    return np.where(np.isnan(values), np.flatnonzero(np.isnan(numbers(name)))[0], found)


def same(found: np.ndarray, wanted: np.ndarray, name: str) -> np.ndarray:
    """Where two arrays of patterns agree; any NaN is as good as another."""
    if name == "fp32":
        return (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
    if name == "int8":
        return found == wanted
    nan = np.isnan(numbers(name))
    return (found == wanted) | (nan[found] & nan[wanted])
