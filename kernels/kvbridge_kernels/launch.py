"""Launches a kernel over the groups of a chunk: constants from shape and alignment, arguments from the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from . import clear
from .codecs import TYPES
from .codecs_ref import DTYPES, LARGEST
from .digest_ref import word_bytes
from .form import Form, Offsets, low_bit, tile_of
from .segment import Segment, Span
from .tables import Group, Tables, Work, groups_of

UINTS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
# Scales between which a division may be done by multiplying, see codecs.py.
FAST_FROM, FAST_TO = 2.0**-50, 2.0**50


class Steps(NamedTuple):
    """What a conversion takes, see codecs.py."""

    multiply: bool = False
    divide: str = ""
    overflow: bool = False


@dataclass(slots=True)
class Kernel:
    """One way to run a kernel: its constants in the order of its signature, and once it has run, what was compiled."""

    constants: dict[str, Any]
    warps: int
    programs: int
    row: int
    tile: tuple[int, int, int]
    columns: Offsets | None
    compiled: Any = None


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Kernel
    tiles: int
    records: int
    columns: int
    scales: int
    sizes: tuple[int, int, int, int]  # planes, places, heads, row


def run(
    function: Any, segments: Sequence[Segment], slot: Span, sums: torch.Tensor | None, work: Work, is_gather: bool
) -> None:
    """Check, pack, upload, launch."""
    _check(sums, work)
    tables = Tables(work)
    groups, is_covered = groups_of(segments, slot, tables, work)
    launches = [_launch(function, group, slot, sums is not None, tables, work, is_gather) for group in groups]
    gaps = clear.pack(segments, slot, tables) if is_gather and not is_covered else None
    if sums is not None:
        sums.zero_()
    if not launches and gaps is None:
        return
    tables.upload()
    for launch in launches:
        _start(function, launch, slot.address, 0 if sums is None else sums.data_ptr(), work)
    if gaps is not None:
        clear.start(gaps, slot)


def warm(function: Any, segments: Sequence[Segment], slot: Span, has_sums: bool, work: Work, is_gather: bool) -> None:
    """Launch for no planes at all: all is compiled and loaded, nothing is touched."""
    tables = Tables(work)
    groups, _ = groups_of(segments, slot, tables, work)
    for group in groups:
        launch = _launch(function, group, slot, has_sums, tables, work, is_gather)
        empty = Launch(launch.kernel, 1, work.address, work.address, work.address, (0, *launch.sizes[1:]))
        _start(function, empty, slot.address, work.address, work)


def _check(sums: torch.Tensor | None, work: Work) -> None:
    if work.device.type == "cuda" and work.device.index != torch.cuda.current_device():
        raise ValueError(f"work is of {work.device}, the current device is cuda:{torch.cuda.current_device()}")
    if sums is not None and (sums.dtype != torch.int64 or sums.numel() != 1 or sums.device != work.device):
        raise ValueError(f"sums must be int64 [1] on {work.device}, got {sums.dtype} {list(sums.shape)} {sums.device}")


def _launch(
    function: Any, group: Group, slot: Span, has_sums: bool, tables: Tables, work: Work, is_gather: bool
) -> Launch:
    form = group.form
    near = low_bit(group.near_bits | form.stride_bits | 16)
    far = low_bit(group.far_bits | slot.address | form.wire_row_bytes | 16)
    scales, steps = _scales(group, tables, work, is_gather) if form.codecs else (work.address, Steps())
    key = (function, form, near, far, steps, has_sums)
    kernel = work.kernels.get(key)
    if kernel is None:
        kernel = work.kernels[key] = _kernel(form, near, far, steps, has_sums, is_gather, work)
    columns = work.address if kernel.columns is None else tables.put(kernel.columns)
    records = tables.put(group.records)
    places, heads, width = kernel.tile
    tiles = group.planes * -(-group.places // places) * (form.heads // heads) * -(-kernel.row // width)
    if tiles >= 1 << 31:
        raise ValueError(f"chunk: {tiles} tiles, one launch takes {(1 << 31) - 1}")
    return Launch(kernel, tiles, records, columns, scales, (group.planes, group.places, form.heads, kernel.row))


def _start(function: Any, launch: Launch, slot: int, sums: int, work: Work) -> None:
    kernel = launch.kernel
    grid = (min(launch.tiles, work.processors * kernel.programs), 1, 1)
    arguments = (launch.records, launch.columns, launch.scales, slot, sums, *launch.sizes)
    if kernel.compiled is None:
        kernel.compiled = function[grid](*arguments, **kernel.constants, num_warps=kernel.warps)
    else:
        kernel.compiled[grid](*arguments, *kernel.constants.values())


def _kernel(form: Form, near: int, far: int, steps: Steps, has_sums: bool, is_gather: bool, work: Work) -> Kernel:
    if form.codecs is None:
        size = wire_size = min(8, near, far, low_bit(form.run_bytes))
        tiling, old, new = work.move, None, None
    else:
        size, wire_size = (DTYPES[name].itemsize for name in form.codecs)
        memory, wire = (TYPES[name] for name in form.codecs)
        tiling, old, new = work.cast, *((memory, wire) if is_gather else (wire, memory))
        near, far = min(near, _access(size, wire_size, is_gather)), min(far, _access(wire_size, size, not is_gather))
    row = form.row_bytes // size
    tile = tile_of(row, form.heads, max(size, wire_size), 16 // min(size, wire_size), tiling)
    run = tile[2] if form.is_dense else min(tile[2], low_bit(form.run_bytes // size))
    constants = {
        "PLACES": tile[0],
        "HEADS": tile[1],
        "COLUMNS": tile[2],
        "MEMORY": UINTS[size],
        "WIRE": UINTS[wire_size],
        "OLD": old,
        "NEW": new,
        "MULTIPLY": steps.multiply,
        "DIVIDE": steps.divide,
        "OVERFLOW": steps.overflow,
        "NEAR": near,
        "FAR": far,
        "RUN": run,
        "STEP": low_bit(row | 16),
        "WORD": word_bytes(form.wire_row_bytes) if has_sums else 0,
        "DENSE": form.is_dense,
        "MANY_HEADS": form.heads > tile[1],
        "MANY_COLUMNS": row > tile[2],
        "HINT": tiling.hint,
    }
    columns = None if form.is_dense else form.columns(size, size if near >= size else 1)
    return Kernel(constants, tiling.warps, tiling.programs, row, tile, columns)


def _access(size: int, other: int, is_read: bool) -> int:
    """Bytes to access at once on this end: a thread stores 16 at most, so reads less where what it reads gets wider."""
    return 16 * size // other if is_read and other > size else 16


def _scales(group: Group, tables: Tables, work: Work, is_gather: bool) -> tuple[int, Steps]:
    """Address of fp32 [old | new | 1 / new, planes, heads], and what the kernel is to do with it."""
    old, new = group.form.codecs if is_gather else reversed(group.form.codecs)
    ends = [(c.memory.scale, c.wire.scale) if is_gather else (c.wire.scale, c.memory.scale) for c, _ in group.casts]
    if ends[0] == (None, None):
        return work.address, Steps(overflow=_may_overflow(old, new, 1.0, 1.0))
    planes, heads = group.planes, group.form.heads
    start = tables.take((3 * planes * heads + 1) // 2)
    table = work.floats[2 * start : 2 * start + 3 * planes * heads].reshape(3, planes, heads)
    for end in range(2):
        if ends[0][end] is None:
            table[end] = 1.0
        else:
            found = torch.cat([scales[end] for scales in ends]).numpy()
            table[end] = found if len(found) == planes else found.repeat(planes // len(found), axis=0)
    lowest, highest = table[:2].min(axis=(1, 2)), table[:2].max(axis=(1, 2))
    divide = "" if ends[0][1] is None else "exact"
    if divide and new.startswith("fp8") and lowest.min() >= FAST_FROM and highest.max() <= FAST_TO:
        np.divide(np.float32(1), table[1], out=table[2])
        divide = "fast"
    overflow = _may_overflow(old, new, float(highest[0]), float(lowest[1]))
    return work.address + 8 * start, Steps(ends[0][0] is not None, divide, overflow)


def _may_overflow(old: str, new: str, largest_scale: float, smallest_scale: float) -> bool:
    """Whether a finite number can be too large for a codec that has infinities of more than 8 bits."""
    return new in ("bf16", "fp16") and LARGEST[old] * largest_scale > LARGEST[new] * smallest_scale
