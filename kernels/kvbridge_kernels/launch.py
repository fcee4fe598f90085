"""Launches a kernel over the groups of a chunk: constants from shape and alignment, arguments from the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from . import clear
from .codecs import TYPES
from .codecs_ref import DTYPES
from .digest_ref import word_bytes
from .form import Form, Offsets, low_bit, tile_of, tiles_at_once
from .recipe import Chunk, Group, Recipe
from .scales import Scaled, Steps
from .segment import Segment, Span
from .tables import Tables, Work

# Tiles are counted in 32 bits, a step of the whole grid beyond the last one too.
MOST_TILES = 1 << 30
# Programs of a processor that run at once, about.
RESIDENT = 16
UNSCALED = Scaled(np.empty(0, np.int64), Steps())
UINTS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@dataclass(slots=True)
class Kernel:
    """One way to run a kernel: its constants in the order of its signature, and once it has run, what was compiled."""

    constants: dict[str, Any]
    warps: int
    tiles: int  # a program
    tiles_at_once: int  # a launch
    row: int
    tile: tuple[int, int, int]
    columns: Offsets | None
    compiled: Any = None


@dataclass(frozen=True, slots=True)
class Launch:
    """All planes of one form: as few launches as may be, each of a part of the tiles."""

    kernel: Kernel
    tiles: int
    records: int
    columns: int
    scales: int
    sizes: tuple[int, int, int, int]  # planes, places, heads, row

    def parts(self) -> Iterator[tuple[int, int]]:
        """First and end tile of each, alike in size."""
        count = -(-self.tiles // self.kernel.tiles_at_once)
        for part in range(count):
            yield part * self.tiles // count, (part + 1) * self.tiles // count


def run(
    function: Any,
    moved: Sequence[Segment] | Chunk,
    slot: Span,
    sums: torch.Tensor | None,
    work: Work,
    is_gather: bool,
    stream: torch.cuda.Stream | None,
) -> None:
    """Check, pack, upload, launch."""
    recipe, places = _checked(moved, slot, sums, work)
    tables = Tables(work, slot.size_bytes)
    lists = [tables.offsets(places[which], stride, tokens) for which, stride, tokens in recipe.lists]
    launches = [
        _launch(function, packed, lists, slot, sums is not None, tables, work, is_gather) for packed in recipe.groups
    ]
    gaps = tables.put(recipe.gaps) if is_gather and len(recipe.gaps) else None
    total = 0 if sums is None else sums.data_ptr()
    is_known = all(launch.kernel.compiled is not None for launch in launches)
    if stream is not None and is_known and gaps is None and not tables.must_upload:
        for launch in launches:  # without making the stream current, which costs as much as a launch
            _start_all(function, launch, slot.address, total, work, stream.cuda_stream)
        return
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        tables.upload()
        for launch in launches:
            _start_all(function, launch, slot.address, total, work)
        if gaps is not None:
            clear.start(gaps, len(recipe.gaps) // 2, slot)


def warm(
    function: Any, moved: Sequence[Segment] | Chunk, slot: Span, has_sums: bool, work: Work, is_gather: bool
) -> None:
    """Launch for no planes at all: all is compiled and loaded, nothing is touched."""
    recipe, _ = _checked(moved, slot, None, work)
    tables = Tables(work, slot.size_bytes)
    lists = [0] * len(recipe.lists)
    address = work.table.data_ptr()
    for packed in recipe.groups:
        launch = _launch(function, packed, lists, slot, has_sums, tables, work, is_gather)
        empty = Launch(launch.kernel, 0, address, address, address, (0, *launch.sizes[1:]))
        _start(function, empty, slot.address, address, work, 0, 0)


def _checked(moved: Sequence[Segment] | Chunk, slot: Span, sums: torch.Tensor | None, work: Work) -> Chunk:
    if work.index >= 0 and work.index != torch.cuda.current_device():
        raise ValueError(f"work is of {work.device}, the current device is cuda:{torch.cuda.current_device()}")
    if sums is not None and (sums.dtype != torch.int64 or sums.numel() != 1 or sums.device != work.device):
        raise ValueError(f"sums must be int64 [1] on {work.device}, got {sums.dtype} {list(sums.shape)} {sums.device}")
    if not isinstance(moved, Chunk):
        recipe = Recipe(moved, slot.size_bytes)
        moved = Chunk(recipe, recipe.places)
    if moved.recipe.slot_bytes != slot.size_bytes:
        raise ValueError(f"the recipe is for a slot of {moved.recipe.slot_bytes} bytes, this one has {slot.size_bytes}")
    if moved.recipe.device not in (None, work.index):
        raise ValueError(f"fields are on device {moved.recipe.device}, work on {work.device}")
    return moved


def _launch(
    function: Any,
    packed: tuple[Group, Offsets, Offsets],
    lists: Sequence[int],
    slot: Span,
    has_sums: bool,
    tables: Tables,
    work: Work,
    is_gather: bool,
) -> Launch:
    group, records, numbers = packed
    form = group.form
    near = low_bit(group.near_bits | form.stride_bits | 16)
    far = low_bit(group.far_bits | slot.address | form.wire_row_bytes | 16)
    scales = group.scales(is_gather, work.steps) if form.codecs else UNSCALED
    key = (function, near, far, scales.steps, has_sums, *form.key)
    kernel = work.kernels.get(key)
    if kernel is None:
        kernel = work.kernels[key] = _kernel(form, near, far, scales.steps, has_sums, is_gather, work)
    room, address = tables.take(records.size)
    room = room.reshape(records.shape)
    room[:] = records
    room[:, 2] = lists[0] if len(lists) == 1 else np.array(lists)[numbers]
    columns = address if kernel.columns is None else tables.put(kernel.columns)
    table = tables.put(scales.table) if len(scales.table) else address
    places, heads, width = kernel.tile
    tiles = group.planes * -(-group.places // places) * (form.heads // heads) * -(-kernel.row // width)
    if tiles > MOST_TILES:
        raise ValueError(f"chunk: {tiles} tiles in planes of one form, limit {MOST_TILES}")
    return Launch(kernel, tiles, address, columns, table, (group.planes, group.places, form.heads, kernel.row))


def _start_all(function: Any, launch: Launch, slot: int, sums: int, work: Work, stream: int | None = None) -> None:
    for first, end in launch.parts():
        _start(function, launch, slot, sums, work, first, end, stream)


def _start(
    function: Any, launch: Launch, slot: int, sums: int, work: Work, first: int, end: int, stream: int | None = None
) -> None:
    kernel, tiles = launch.kernel, end - first
    programs = -(-tiles // kernel.tiles)
    grid = (max(1, min(tiles, max(programs, work.processors * RESIDENT))), 1, 1)
    arguments = (launch.records, launch.columns, launch.scales, slot, sums, *launch.sizes, first, end)
    if kernel.compiled is None:
        kernel.compiled = function[grid](*arguments, **kernel.constants, num_warps=kernel.warps)
    else:
        kernel.compiled[grid](*arguments, *kernel.constants.values(), stream=stream)


def _kernel(form: Form, near: int, far: int, steps: Steps, has_sums: bool, is_gather: bool, work: Work) -> Kernel:
    align = min(near, far, low_bit(form.run_bytes))
    if form.codecs is None:
        size = wire_size = min(8, align)
        kind, old, new = "sum" if has_sums else "move", None, None
    else:
        size, wire_size = (DTYPES[name].itemsize for name in form.codecs)
        memory, wire = (TYPES[name] for name in form.codecs)
        old, new = (memory, wire) if is_gather else (wire, memory)
        kind = _kind(old, new)
        near = min(near, _access(size, wire_size, is_gather))
        far = min(far, _access(wire_size, size, not is_gather or has_sums))
    tiling = work.tilings[kind]
    row = form.row_bytes // size
    own = form.row_scale
    is_whole = own is not None and not is_gather
    tile = tile_of(form, row, max(size, wire_size), 16 // min(size, wire_size), tiling, is_whole)
    run = tile[2] if form.is_dense else min(tile[2], low_bit(form.run_bytes // size))
    constants = {
        "PLACES": tile[0],
        "HEADS": tile[1],
        "COLUMNS": tile[2],
        "MEMORY": UINTS[size],
        "WIRE": UINTS[wire_size],
        "OLD": old,
        "NEW": new,
        "MULTIPLY": "own" if own is not None and is_gather else steps.multiply,
        # The interpreter's fma rounds twice.
        "DIVIDE": "own" if is_whole else steps.divide if work.is_native or not steps.divide else "exact",
        "NATIVE": work.is_native and row % 4 == 0,
        "NEAR": near,
        "FAR": far,
        "RUN": run,
        "STEP": low_bit(row | 64),
        "WORD": word_bytes(form.wire_row_bytes) if has_sums else 0,
        "DENSE": form.is_dense,
        "MANY_HEADS": form.heads > tile[1],
        "MANY_COLUMNS": row > tile[2],
        "SCALE_AT": 0 if own is None else own.at,
        "SCALE_SKEW": 0 if own is None else own.head_stride - form.head_stride,
    }
    columns = None if form.is_dense else form.columns(size, size if near >= size else 1)
    tile_bytes = tile[0] * tile[1] * tile[2] * max(size, wire_size)
    at_once = tiles_at_once("own" if own is not None else kind, tile_bytes, align, work.launch_us)
    return Kernel(constants, tiling.warps, tiling.tiles, at_once, row, tile, columns)


def _kind(old: tl.dtype, new: tl.dtype) -> str:
    wider = new.primitive_bitwidth - old.primitive_bitwidth
    return "widen" if wider > 0 else "narrow" if wider < 0 else "rescale"


def _access(size: int, other: int, is_held: bool) -> int:
    """Bytes to access at once on this end, so that a thread holds the same elements from the load to the store.

    It stores 16 bytes at most, so reads less where what it reads gets wider; what it sums it holds as it was loaded.
    """
    return 16 * size // other if is_held and other > size else 16
