"""Launches kernels over the groups of a chunk: constants from layout and alignment, arguments from the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl

from . import clear
from .codecs import TYPES
from .codecs_ref import DTYPES, unit_of
from .digest_ref import word_bytes
from .places import Places
from .prepared_copy import Lists, Packed, PlacedCopy, PreparedCopy
from .scales import Steps
from .segment import Segment, Span
from .segment_layout import SegmentLayout, low_bit
from .sheet import GroupLaunch, Kernel, Launch, LaunchSide, Sheet
from .tables import LaunchTables, Work
from .tiling import tile_of, tiles_at_once

# About how many programs of a launch run at once on one multiprocessor.
RESIDENT = 16
UINTS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


class NotCompiled(Exception):
    """Nothing was enqueued: kernels must be compiled first, which `work` leaves to the caller (`Work.compiles`)."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        super().__init__(f"kernels: {len(launches)} are not compiled")
        self.launches = launches


def run(
    function: Any,
    moved: Sequence[Segment] | PlacedCopy,
    slot: Span,
    sums: torch.Tensor | None,
    work: Work,
    is_gather: bool,
    stream: torch.cuda.Stream | None,
    is_stored: bool = True,
) -> None:
    """Check, pack, upload, launch. Unless `is_stored`, nothing is written to the slot: only its size matters."""
    prepared, places = _checked(moved, slot, sums, work)
    tables = LaunchTables(work, slot.size_bytes)
    lists = offsets_of(prepared.lists, places, tables)
    sheet = _sheet(function, prepared, slot, sums is not None, work, is_gather, is_stored)
    launches = sheet.put(tables, lists, slot.address, 0 if sums is None else sums.data_ptr())
    gaps = tables.put(prepared.gaps) if is_gather and is_stored and len(prepared.gaps) else None
    last = None if gaps is None else lambda: clear.start(gaps, len(prepared.gaps) // 2, slot)
    enqueue(launches, tables, work, stream, last=last)


def warm(
    function: Any,
    moved: Sequence[Segment] | PlacedCopy,
    slot: Span,
    has_sums: bool,
    work: Work,
    is_gather: bool,
    is_stored: bool = True,
) -> None:
    """Compile what `run` would launch; NotCompiled unless `work.compiles`."""
    prepared, _ = _checked(moved, slot, None, work)
    sheet = _sheet(function, prepared, slot, has_sums, work, is_gather, is_stored)
    lists = [0] * len(prepared.lists.offsets)
    launches = sheet.put(LaunchTables(work, slot.size_bytes), lists, slot.address, added(has_sums, work))
    compiled(launches, work)


def added(has_sums: bool, work: Work) -> int:
    """Where a kernel that is only compiled may add its sum, which is zero."""
    return work.table.data_ptr() if has_sums else 0


def compiled(launches: Sequence[Launch], work: Work) -> None:
    """Compile the kernels that are not yet, which may take seconds; NotCompiled unless `work.compiles`."""
    for launch in _missing(launches, work):
        prepare(launch, work)


def prepare(launch: Launch, work: Work) -> None:
    """Launch for no tiles: compiles and loads the kernel, touches nothing. On any thread."""
    start(launch, work, 0, 0)


def _missing(launches: Sequence[Launch], work: Work) -> list[Launch]:
    missing = [launch for launch in launches if launch.kernel.compiled is None]
    if missing and not work.compiles:
        raise NotCompiled(missing)
    return missing


def enqueue(
    launches: Sequence[Launch],
    tables: LaunchTables,
    work: Work,
    stream: torch.cuda.Stream | None,
    programs: int | None = None,
    last: Callable[[], None] | None = None,
) -> None:
    """Enqueue the tables, all launches (of at most `programs` programs each) and `last`. NotCompiled as `compiled`."""
    is_known = not _missing(launches, work)
    if stream is not None and is_known and last is None and (work.copy is not None or not tables.must_upload):
        tables.upload(stream.cuda_stream)
        for launch in launches:  # making the stream current would cost as much as a launch
            for first, end in launch.parts(programs):
                start(launch, work, first, end, stream.cuda_stream, programs)
        return
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        tables.upload()
        for launch in launches:
            for first, end in launch.parts(programs):
                start(launch, work, first, end, None, programs)
        if last is not None:
            last()


def start(
    launch: Launch,
    work: Work,
    first: int,
    end: int,
    stream: int | None = None,
    most_programs: int | None = None,
) -> None:
    """Launch the tiles from `first` to `end`."""
    kernel, tiles = launch.kernel, end - first
    programs = min(tiles, max(-(-tiles // kernel.tiles), work.processors * RESIDENT))
    grid = (max(1, programs if most_programs is None else min(programs, most_programs)), 1, 1)
    arguments = (*launch.arguments, first, end)
    if kernel.compiled is None:
        options = {"num_warps": kernel.warps, "enable_fp_fusion": not kernel.is_exact}
        kernel.compiled = launch.function[grid](*arguments, **kernel.constants, **options)
    else:
        kernel.compiled[grid](*arguments, *kernel.constants.values(), stream=stream)


def offsets_of(lists: Lists, places: Sequence[Places], tables: LaunchTables) -> list[int]:
    """Put the offsets of all places into the tables. Returns an address for each list of offsets."""
    return [tables.offsets(places[which], stride, tokens) for which, stride, tokens in lists.offsets]


def check_sums(sums: torch.Tensor | None, work: Work) -> None:
    """ValueError if `sums` cannot take a digest, or `work` is not on the current device."""
    if work.index >= 0 and work.index != torch.cuda.current_device():
        raise ValueError(f"work is on {work.device}, the current device is cuda:{torch.cuda.current_device()}")
    if sums is not None and (sums.dtype != torch.int64 or sums.numel() != 1 or sums.device != work.device):
        raise ValueError(f"sums must be int64 [1] on {work.device}, got {sums.dtype} {list(sums.shape)} {sums.device}")


def check_device(lists: Lists, work: Work) -> None:
    """ValueError if the fields are not on the device of `work`."""
    if lists.device not in (None, work.index):
        raise ValueError(f"fields are on device {lists.device}, work on {work.device}")


def _checked(moved: Sequence[Segment] | PlacedCopy, slot: Span, sums: torch.Tensor | None, work: Work) -> PlacedCopy:
    check_sums(sums, work)
    if not isinstance(moved, PlacedCopy):
        prepared = PreparedCopy(moved, slot.size_bytes)
        moved = PlacedCopy(prepared, prepared.places)
    if moved.prepared.slot_bytes != slot.size_bytes:
        raise ValueError(f"slot: {slot.size_bytes} bytes, the copy was prepared for {moved.prepared.slot_bytes}")
    check_device(moved.prepared.lists, work)
    return moved


def _sheet(
    function: Any, prepared: PreparedCopy, slot: Span, has_sums: bool, work: Work, is_gather: bool, is_stored: bool
) -> Sheet:
    """The tables of all launches."""

    def launched(packed: Packed) -> GroupLaunch:
        group = packed.group
        layout = group.layout
        near = low_bit(group.near_bits | layout.stride_bits | 16)
        far = low_bit(group.far_bits | slot.address | layout.wire_row_bytes | 16)
        scales = group.scales(is_gather, work.steps)
        key = (function, near, far, scales.steps, has_sums, is_stored, *layout.key)
        kernel = work.kernels.get(key)
        if kernel is None:
            kernel = _kernel(layout, near, far, scales.steps, has_sums, is_gather, work)
            if not is_stored:
                kernel.constants["FAR"] = 0
            work.kernels[key] = kernel
        end = LaunchSide(packed, kernel.columns[0], scales.table)
        tiles = kernel.tiles_of(group.planes, group.places, layout.heads)
        return GroupLaunch(function, kernel, tiles, [end], (group.planes, group.places, layout.heads, kernel.row))

    key = function, low_bit(slot.address | 16), has_sums, is_stored
    return work.sheet(prepared, key, lambda: Sheet.of(map(launched, prepared.groups)))


def _kernel(
    layout: SegmentLayout, near: int, far: int, steps: Steps, has_sums: bool, is_gather: bool, work: Work
) -> Kernel:
    align = min(near, far, low_bit(layout.run_bytes))
    if layout.codecs is None:
        size = wire_size = min(8, align)
        kind, old, new = "sum" if has_sums else "move", None, None
    else:
        size, wire_size = (DTYPES[name].itemsize for name in layout.codecs)
        memory, wire = (TYPES[name] for name in layout.codecs)
        old, new = (memory, wire) if is_gather else (wire, memory)
        kind = _kind(old, new)
        near = min(near, access(size, wire_size, is_gather))
        far = min(far, access(wire_size, size, not is_gather or has_sums))
    tiling = work.tilings[kind]
    row = layout.row_bytes // size
    is_whole = not is_gather and (layout.row_scale is not None or layout.rotates)
    tile = tile_of(layout, row, max(size, wire_size), 16 // min(size, wire_size), tiling, is_whole)
    run = tile[2] if layout.is_dense else min(tile[2], low_bit(layout.run_bytes // size))
    constants = {
        "PLACES": tile[0],
        "HEADS": tile[1],
        "COLUMNS": tile[2],
        "MEMORY": UINTS[size],
        "WIRE": UINTS[wire_size],
        "OLD": old,
        "NEW": new,
        **arithmetic(layout, steps, is_gather, work),
        "NATIVE": work.is_native and row % 4 == 0,
        "NEAR": near,
        "FAR": far,
        "RUN": run,
        "STEP": low_bit(row | 64),
        "WORD": word_bytes(layout.wire_row_bytes) if has_sums else 0,
        "DENSE": layout.is_dense,
        "MANY_HEADS": layout.heads > tile[1],
        "MANY_COLUMNS": row > tile[2],
    }
    columns = None if layout.is_dense else layout.columns(size, size if near >= size else 1)
    tile_bytes = tile[0] * tile[1] * tile[2] * max(size, wire_size)
    has_own = is_whole or layout.row_scale is not None
    at_once = tiles_at_once("own" if has_own else kind, tile_bytes, align, work.launch_us)
    return Kernel(constants, tiling.warps, tiling.tiles, at_once, row, tile, (columns,), is_whole and layout.rotates)


def _kind(old: tl.dtype, new: tl.dtype) -> str:
    wider = new.primitive_bitwidth - old.primitive_bitwidth
    return "widen" if wider > 0 else "narrow" if wider < 0 else "rescale"


def arithmetic(layout: SegmentLayout, steps: Steps, is_read: bool, work: Work) -> dict[str, Any]:
    """The constants of a conversion out of memory, or into it. See codecs.py."""
    own = layout.row_scale
    is_own = own is not None
    divide = steps.divide if work.is_native or not steps.divide else "exact"  # the interpreter's fma rounds twice
    return {
        "MULTIPLY": "own" if is_own and is_read else steps.multiply,
        "DIVIDE": "own" if is_own and not is_read else divide,
        "SCALE": "" if own is None else own.form,
        "SCALE_AT": 0 if own is None else own.at,
        "SCALE_HEAD": 0 if own is None else own.head_stride,
        "ROTATE": unit_of(layout.row_bytes // layout.element_bytes) if layout.rotates and not is_read else 0.0,
    }


def access(size: int, other: int, is_held: bool) -> int:
    """Bytes per access at an end with elements of `size` bytes, so that a thread stores the elements that it loaded.

    A thread stores at most 16 bytes at once. So it loads fewer if its elements become wider (`other` bytes). `is_held`:
    the thread holds the elements as they are at this end, because it loads or sums them.
    """
    return 16 * size // other if is_held and other > size else 16
