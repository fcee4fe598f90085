"""Moves rows on a GPU: engine memory -> slot, slot -> engine memory, or engine memory -> engine memory.

Planes of one layout are moved together, in short launches of one kernel (tiles.py), which converts and sums on the way.
The tables of all launches are packed once for all chunks that differ in their places only. Tables name each other by
address: they have distances from their own start, to which is added where they are put into the buffers of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import clear
from .kernel import EndShape, Kernel, kernel_of
from .prepared import LISTS_AT, RECORD, Placed, PlaneGroup, Prepared
from .segment import Span
from .segment_layout import Offsets, low_bit
from .tables import LaunchTables, Work
from .tiles import move_tiles

WORD_BYTES = 8
# About how many programs of a launch run at once on one multiprocessor.
RESIDENT = 16
# This many programs reach nearly the rate of NVLink: 366 of 375 GB/s (NVIDIA H200, 2026-11).
ENOUGH_PROGRAMS = 33


class NotCompiled(Exception):
    """Nothing was enqueued: kernels must be compiled first, which `work` leaves to the caller (`Work.compiles`)."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        super().__init__(f"kernels: {len(launches)} are not compiled")
        self.launches = launches


def move(
    placed: Placed,
    work: Work,
    slot: Span | None = None,
    sums: torch.Tensor | None = None,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
) -> None:
    """Write the target's rows from the source's. Adds the sum64 of the chunk's slot to `sums`, int64 [1].

    The end that is not in memory is `slot`. Where that is the target, its gaps become zeros. Without a slot such a move
    only sums.

    Enqueued on `stream`, or on the current stream of `work.device`, in launches of at most about `work.launch_us` and
    at most `programs` programs (CTAs). Allocates nothing and waits for nothing. Places and scales are read before this
    returns; `work` is read until the launches have run. The device must be able to reach all memory; what is read may
    be a peer GPU's (`field.Mapped`). The target's places must not repeat, and none of the rows that this writes may be
    among those it reads. Raises ValueError if something does not fit, and NotCompiled unless `work.compiles`, both
    before anything is enqueued.
    """
    _check(placed, work, slot, sums)
    prepared = placed.prepared
    tables = LaunchTables(work, placed.chunks * prepared.slot_bytes)
    lists = [
        tables.offsets(places[which], stride, tokens)
        for memory, places in zip(prepared.memories, placed.places, strict=True)
        for which, stride, tokens in memory.offsets
    ]
    packed = _packed(prepared, slot, sums is not None, work)
    launches = packed.put(tables, lists, slot, 0 if sums is None else sums.data_ptr(), placed.chunks)
    last = None
    if slot is not None and prepared.ends[1] is None and len(prepared.gaps):
        gaps = tables.put(prepared.gaps)
        last = lambda: clear.start(gaps, len(prepared.gaps) // 2, slot)  # noqa: E731
    _enqueue(launches, tables, work, stream, programs, last)


def warm(placed: Placed, work: Work, slot: Span | None, has_sums: bool) -> None:
    """Compile what `move` would launch, which may take seconds; NotCompiled unless `work.compiles`.

    The number of places does not matter.
    """
    _check(placed, work, slot, None)
    prepared = placed.prepared
    lists = [0] * sum(len(memory.offsets) for memory in prepared.memories)
    sums = work.table.data_ptr() if has_sums else 0  # a kernel that is only compiled adds zero
    launches = _packed(prepared, slot, has_sums, work).put(LaunchTables(work, prepared.slot_bytes), lists, slot, sums)
    for launch in _missing(launches, work):
        prepare(launch, work)


def chunks_at_once(prepared: Prepared, work: Work) -> int:
    """How many such pulls without sums the tables of `work` have room for, at least 1. 0 if kernels are missing."""
    packed = _packed(prepared, None, False, work)
    if any(kernel.compiled is None for kernel, _, _ in packed.launches):
        return 0
    words = sum(memory.places[which].count for memory in prepared.memories for which, *_ in memory.offsets)
    return max(1, (len(work.words) - len(packed.words)) // max(1, words))


def _check(placed: Placed, work: Work, slot: Span | None, sums: torch.Tensor | None) -> None:
    """ValueError if work, sums, memory or slot do not fit each other."""
    if work.index >= 0 and work.index != torch.cuda.current_device():
        raise ValueError(f"work is on {work.device}, the current device is cuda:{torch.cuda.current_device()}")
    if sums is not None and (sums.dtype != torch.int64 or sums.numel() != 1 or sums.device != work.device):
        raise ValueError(f"sums must be int64 [1] on {work.device}, got {sums.dtype} {list(sums.shape)} {sums.device}")
    placed.check(slot, sums is not None)
    for memory in placed.prepared.memories:
        if memory.device not in (None, work.index):
            raise ValueError(f"fields are on device {memory.device}, work on {work.device}")


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of one group, launched in as few parts as allowed."""

    kernel: Kernel
    tiles: int
    arguments: tuple[int, ...]  # without the first and the end tile

    def parts(self, programs: int | None = None) -> Iterator[tuple[int, int]]:
        """First and end tile of each part, all about as large; smaller if `programs` are too few for the full rate."""
        most = self.kernel.tiles_at_once
        if programs is not None:
            most = max(1, most * min(programs, ENOUGH_PROGRAMS) // ENOUGH_PROGRAMS)
        count = -(-self.tiles // most)
        for part in range(count):
            yield part * self.tiles // count, (part + 1) * self.tiles // count


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """The tables of some launches as one array of words, and where addresses belong in it."""

    words: Offsets
    address_at: Offsets  # the words that are addresses of lists
    lists: Offsets  # for each of them: which list
    # A kernel, the byte at which each of its tables begins (None: the slot), planes, places and heads.
    launches: Sequence[tuple[Kernel, Sequence[int | None], tuple[int, int, int]]]

    def put(
        self, tables: LaunchTables, lists: Sequence[int], slot: Span | None, sums: int, chunks: int = 1
    ) -> list[Launch]:
        """Put the tables into those of a chunk, or of several. `lists` are the addresses of their places."""
        room, address = tables.take(len(self.words))
        room[:] = self.words
        room[self.address_at] = lists[0] if len(lists) == 1 else np.array(lists)[self.lists]
        slot_address, found = 0 if slot is None else slot.address, []
        for kernel, starts, (planes, places, heads) in self.launches:
            given = [slot_address if at is None else address + at for at in starts]
            tiles = kernel.tiles_of(planes, places * chunks, heads)
            found.append(Launch(kernel, tiles, (*given, sums, planes, places * chunks, heads, kernel.row)))
        return found


def _packed(prepared: Prepared, slot: Span | None, has_sums: bool, work: Work) -> _Packed:
    key = work.kernels, low_bit(16 if slot is None else slot.address | 16), slot is None, has_sums
    packed = prepared.packed.get(key)
    if packed is None:
        packed = prepared.packed[key] = _pack(prepared, slot, has_sums, work)
    assert isinstance(packed, _Packed)
    return packed


def _pack(prepared: Prepared, slot: Span | None, has_sums: bool, work: Work) -> _Packed:
    tables, at, lists, launches = [], [], [], []
    used = 0

    def add(table: Offsets | None) -> int:
        """Where it begins. A table that no kernel reads may begin anywhere."""
        nonlocal used
        if table is None or not table.size:
            return 0
        tables.append(table.reshape(-1))
        used += table.size
        return (used - table.size) * WORD_BYTES

    first_list = [0, len(prepared.memories[0].offsets)]  # the target's lists are numbered after the source's
    for group in prepared.groups:
        kernel, scales = _kernel(group, prepared, slot, has_sums, work)
        starts: list[int | None] = []
        numbers = iter(first_list)
        for planes, columns, scale in zip(group, kernel.columns, scales, strict=True):
            if planes is None:
                starts += [None, 0, 0]
                continue
            first = next(numbers)
            for column in range(LISTS_AT, RECORD):
                at.append(used + RECORD * np.arange(planes.count) + column)
                lists.append(planes.records[:, column] + first)
            starts += [add(planes.records), add(columns), add(scale)]
        planes = group.in_memory
        launches.append((kernel, starts, (planes.count, planes.places, planes.layout.heads)))
    words, address_at, of = (np.concatenate([*each, np.empty(0, np.int64)]) for each in (tables, at, lists))
    return _Packed(words, address_at, of, launches)


def _kernel(
    group: PlaneGroup, prepared: Prepared, slot: Span | None, has_sums: bool, work: Work
) -> tuple[Kernel, list[Offsets | None]]:
    """A group's kernel, and the scales at its two ends."""
    known, sides = work.kernels, list[EndShape]()
    tables: list[Offsets | None] = []
    for planes, is_read in zip(group, (True, False), strict=True):
        if planes is None:
            sides.append(EndShape(None, low_bit(group.in_memory.slot_bits | (0 if slot is None else slot.address))))
            tables.append(None)
        else:
            scaled = planes.scales(is_read, known.steps)
            sides.append(EndShape(planes.layout, low_bit(planes.bits), scaled.steps))
            tables.append(scaled.table)
    source, target = sides
    is_stored = slot is not None or prepared.ends[1] is not None
    key = source.key, target.key, has_sums, is_stored
    kernel: Kernel | None = known.chosen.get(key)
    if kernel is None:
        kernel = known.chosen[key] = kernel_of(source, target, has_sums, is_stored, work)
    return kernel, tables


def _missing(launches: Sequence[Launch], work: Work) -> list[Launch]:
    missing = [launch for launch in launches if launch.kernel.compiled is None]
    if missing and not work.compiles:
        raise NotCompiled(missing)
    return missing


def _enqueue(
    launches: Sequence[Launch],
    tables: LaunchTables,
    work: Work,
    stream: torch.cuda.Stream | None,
    programs: int | None,
    last: Callable[[], None] | None,
) -> None:
    """Enqueue the tables, all launches (of at most `programs` programs each) and `last`."""
    is_known = not _missing(launches, work)
    # Making the stream current would cost as much as a launch.
    is_named = is_known and last is None and (work.copy is not None or not tables.must_upload)
    number = stream.cuda_stream if stream is not None and is_named else None
    if stream is not None and not is_named:
        with torch.cuda.stream(stream):
            return _enqueue(launches, tables, work, None, programs, last)
    tables.upload(number)
    for launch in launches:
        for first, end in launch.parts(programs):
            start(launch, work, first, end, number, programs)
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
        kernel.compiled = move_tiles[grid](*arguments, **kernel.constants, **options)
    else:
        kernel.compiled[grid](*arguments, *kernel.constants.values(), stream=stream)


def prepare(launch: Launch, work: Work) -> None:
    """Launch for no tiles: compiles and loads the kernel, touches nothing. On any thread."""
    start(launch, work, 0, 0)
