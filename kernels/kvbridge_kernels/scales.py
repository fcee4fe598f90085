"""The scales of a launch, and the cheapest arithmetic that converts exactly with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .codecs_ref import DTYPES, LARGEST, Cast
from .segment_layout import Offsets, SegmentLayout

Floats = npt.NDArray[np.float32]
# For scales in this range codecs.py can divide by multiplying.
FAST_FROM, FAST_TO = 2.0**-50, 2.0**50
# Exponents of a quotient, from those that become zero in 8 bits to those that are clamped.
EXPONENTS = range(-19, 18)


class Steps(NamedTuple):
    """`multiply` and `divide` of an end's constants: see `cast` in codecs.py."""

    multiply: bool = False
    divide: str = ""


class Scaled(NamedTuple):
    """fp32 [old | new | 1 / new, planes, heads] as int64 words (empty without scales), and how to apply them."""

    table: Offsets
    steps: Steps


def scaled(
    layout: SegmentLayout, casts: Sequence[Cast], planes: int, is_read: bool, known: dict[object, Steps]
) -> Scaled:
    """The scales of `planes` planes for reading or for writing memory. The casts' scales have equal shapes.

    `known` caches the steps that were found.
    """
    assert layout.codecs is not None
    old, new = layout.codecs if is_read else layout.codecs[::-1]
    ends = [(c.memory.table, c.wire.table) if is_read else (c.wire.table, c.memory.table) for c in casts]
    is_any = is_read and layout.row_scale is not None  # rows have scales that only the kernel reads
    if not ends or ends[0] == (None, None):
        return Scaled(np.empty(0, np.int64), Steps())
    room = np.ones((3 * planes * layout.heads + 1) // 2 * 2, np.float32)
    table = room[: 3 * planes * layout.heads].reshape(3, planes, layout.heads)
    for end in range(2):
        if ends[0][end] is not None:
            found = torch.cat([scale for scales in ends if (scale := scales[end]) is not None]).numpy()
            table[end] = found if len(found) == planes else found.repeat(planes // len(found), axis=0)
    key = (old, new, is_any, *(end is not None for end in ends[0]), table[:2].tobytes())
    steps = known.get(key)
    if steps is None and is_any:
        steps = known[key] = Steps(False, "exact")
    elif steps is None:
        steps = known[key] = _steps(old, new, ends[0][0] is not None, ends[0][1] is not None, table[0], table[1])
    if steps.divide in ("fast", "inverse"):
        np.divide(np.float32(1), table[1], out=table[2])
    return Scaled(room.view(np.int64), steps)


def _steps(old: str, new: str, has_old: bool, has_new: bool, old_scale: Floats, new_scale: Floats) -> Steps:
    lowest, highest = min(old_scale.min(), new_scale.min()), max(old_scale.max(), new_scale.max())
    divide = "exact" if has_new else ""
    if has_new and new in ("fp8_e4m3", "fp8_e5m2") and lowest >= FAST_FROM and highest <= FAST_TO:
        divide = "inverse" if _is_inverse_enough(old, new, old_scale, new_scale) else "fast"
    return Steps(has_old, divide)


def _is_inverse_enough(old: str, new: str, old_scale: Floats, new_scale: Floats) -> bool:
    """Whether values * (1 / new_scale) gives the same 8 bits as values / new_scale, for all numbers of the old codec.

    It mostly does: the two differ in the last bit of an fp32, which changes the 8 bits only next to a tie. Every number
    of an 8-bit codec is tried, and every bf16 whose quotient is neither zero nor clamped. Other codecs have too many
    numbers to try.
    """
    pairs = np.unique(np.stack([old_scale.reshape(-1), new_scale.reshape(-1)]), axis=1)[:, :, None]
    if DTYPES[old].itemsize == 1:
        stored = torch.arange(256, dtype=torch.uint8).view(DTYPES[old]).float().numpy()
        stored = stored[np.isfinite(stored) & (stored > 0)][None, :]
    elif old == "bf16":
        mantissas = 1 + np.arange(128, dtype=np.float32) / 128
        exponents = np.floor(np.log2(pairs[1] / pairs[0])) + np.array(EXPONENTS, np.float32)
        stored = (np.exp2(exponents)[:, :, None] * mantissas).reshape(len(exponents), -1).astype(np.float32)
    else:
        return False
    values = stored * pairs[0]
    quotient, product = values / pairs[1], values * (np.float32(1) / pairs[1])
    differ = quotient != product
    ends = [torch.from_numpy(end[differ]).clamp_(max=LARGEST[new]).to(DTYPES[new]) for end in (quotient, product)]
    return torch.equal(ends[0].view(torch.uint8), ends[1].view(torch.uint8))
