"""Casts against the table: exhaustive where a codec has few patterns, dense where it has many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, Number, cast

from tests.kernels import slow_codecs as slow

SMALL = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"]
# A power of two, one that is not, one that overflows 8 bits, one that makes everything small.
SCALES = [None, 0.5, 0.0371, 1e-4, 37.0]


def patterns_of(name: str) -> np.ndarray:
    """Every pattern of a codec; for fp32 every 251st and the neighbourhood of each fp8 rounding border."""
    if name != "fp32":
        return np.arange(1 << (8 * DTYPES[name].itemsize))
    borders = []
    for codec in ("fp8_e4m3", "fp8_e5m2"):
        ladder = np.sort(slow.numbers(codec)[np.isfinite(slow.numbers(codec))])
        middle = ((ladder[1:] + ladder[:-1]) / 2).astype(np.float32)
        borders += [middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9))]
    dense = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([dense, *borders])


def stored_as_bytes(patterns: np.ndarray, name: str) -> np.ndarray:
    if name == "fp32":
        return patterns.astype(np.float32).view(np.uint8)
    return patterns.astype({1: np.uint8, 2: np.uint16}[DTYPES[name].itemsize]).view(np.uint8)


def bytes_as_stored(raw: np.ndarray, name: str) -> np.ndarray:
    if name == "fp32":
        return raw.view(np.float32)
    return raw.view({1: np.uint8, 2: np.uint16}[DTYPES[name].itemsize]).astype(np.int64)


def run(patterns: np.ndarray, old: Number, new: Number, planes: int = 1, heads: int = 1) -> np.ndarray:
    source = torch.from_numpy(stored_as_bytes(patterns, old.name)).view(planes, heads, -1)
    size = patterns.size // (planes * heads) * DTYPES[new.name].itemsize
    target = torch.full((planes, heads, size), 0xA5, dtype=torch.uint8)
    cast(source, target, old, new)
    return bytes_as_stored(target.view(-1).numpy(), new.name)


def number(name: str, scale: float | None) -> Number:
    return Number(name, None if scale is None else torch.tensor([[scale]], dtype=torch.float32))


# fp32 has a million patterns here: two pairs of scales are enough for it.
SCALED = [(old, first, second) for old in SMALL for first in SCALES for second in SCALES]
SCALED += [("fp32", None, None), ("fp32", None, 0.0371)]


@pytest.mark.parametrize(("old", "old_scale", "new_scale"), SCALED)
@pytest.mark.parametrize("new", [*SMALL, "fp32"])
def test_every_pattern_becomes_the_nearest_number(
    old: str, new: str, old_scale: float | None, new_scale: float | None
) -> None:
    patterns = patterns_of(old)
    found = run(patterns, number(old, old_scale), number(new, new_scale))
    wanted = slow.encode(slow.decode(patterns, old, old_scale), new, new_scale)
    agree = slow.same(found, wanted, new)
    wrong = np.flatnonzero(~agree)[:5]
    assert agree.all(), f"{patterns[wrong]} became {found[wrong]}, not {wanted[wrong]}"


@pytest.mark.parametrize("name", SMALL)
def test_there_and_back_over_a_wider_codec_changes_nothing(name: str) -> None:
    patterns = patterns_of(name)
    wide = run(patterns, number(name, 0.25), number("fp32", None))
    back = run(wide, number("fp32", None), number(name, 0.25))
    keeps = np.isfinite(slow.decode(patterns, name))
    assert (back[keeps] == patterns[keeps]).all()


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
