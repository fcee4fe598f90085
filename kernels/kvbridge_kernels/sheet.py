"""Launches, and the tables they read, packed once for all chunks that differ in their places only.

Tables name each other by address. A sheet has distances from its own start, and `put` adds the address at which it is
put into the buffers of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .prepared_copy import LISTS_AT, RECORD, Numbers, Packed
from .segment_layout import Offsets
from .tables import LaunchTables

WORD_BYTES = 8
# Kernels count tiles in 32 bits, and step one whole grid beyond the last tile.
MOST_TILES = 1 << 30
# This many programs reach nearly the rate of NVLink: 366 of 375 GB/s (NVIDIA H200, 2026-11).
ENOUGH_PROGRAMS = 33


@dataclass(slots=True, eq=False)
class Kernel:
    """A kernel with its constants, in the order of its signature. `compiled` is set by the first launch."""

    constants: dict[str, Any]
    warps: int
    tiles: int  # per program
    tiles_at_once: int  # per launch
    row: int
    tile: tuple[int, int, int]
    columns: Sequence[Offsets | None]  # for each end in memory; None: dense rows
    is_exact: bool = False  # every operation rounds by itself: none is fused with another
    compiled: Any = None

    def tiles_of(self, planes: int, places: int, heads: int) -> int:
        """How many tiles so many planes, places and heads take. ValueError if they are too many to count."""
        most_places, most_heads, width = self.tile
        tiles = planes * -(-places // most_places) * (heads // most_heads) * -(-self.row // width)
        if tiles > MOST_TILES:
            raise ValueError(f"chunk: {tiles} tiles in planes of one layout, limit {MOST_TILES}")
        return tiles


class LaunchSide(NamedTuple):
    """What a launch reads about one of its memories: records, offsets of a row's elements (None: dense), scales.

    Lists of places are numbered from `first_list` on.
    """

    packed: Packed
    columns: Offsets | None
    scales: Offsets
    first_list: int = 0


class GroupLaunch(NamedTuple):
    """The launch of a group, before its tables have addresses. `sizes` are its last arguments but the tiles."""

    function: Any
    kernel: Kernel
    tiles: int
    ends: Sequence[LaunchSide]
    sizes: tuple[int, int, int, int]  # planes, places, heads, elements of a row

    def of_chunks(self, count: int) -> GroupLaunch:
        """The launch of so many chunks at once, with their places one behind the other."""
        if count == 1:
            return self
        planes, places, heads, row = self.sizes
        tiles = self.kernel.tiles_of(planes, places * count, heads)
        return self._replace(tiles=tiles, sizes=(planes, places * count, heads, row))


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of one group, launched in as few parts as allowed."""

    function: Any
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
class Sheet:
    """The tables of some groups as one array of words, and where addresses belong in it."""

    words: Offsets
    address_at: Offsets  # the words that are addresses of lists
    lists: Offsets  # for each of them: which list
    groups: tuple[tuple[GroupLaunch, tuple[int, ...]], ...]  # with the byte at which each table begins

    @classmethod
    def of(cls, groups: Iterable[GroupLaunch]) -> Sheet:
        tables: list[Offsets] = []
        at: list[Offsets] = []
        lists: list[Offsets] = []
        starts: list[tuple[GroupLaunch, tuple[int, ...]]] = []
        used = 0

        def add(table: Offsets | None) -> int:
            """Where it begins. A table that no kernel reads may begin anywhere."""
            nonlocal used
            if table is None or not table.size:
                return 0
            tables.append(table.reshape(-1))
            used += table.size
            return (used - table.size) * WORD_BYTES

        for group in groups:
            found = []
            for packed, columns, scales, first_list in group.ends:
                for column in range(LISTS_AT, LISTS_AT + len(Numbers._fields)):
                    at.append(used + RECORD * np.arange(len(packed.records)) + column)
                    lists.append(packed.records[:, column] + first_list)
                found += [add(packed.records), add(columns), add(scales)]
            starts.append((group._replace(ends=()), tuple(found)))  # their tables are among the words
        words, address_at, of = (np.concatenate([*each, np.empty(0, np.int64)]) for each in (tables, at, lists))
        return cls(words, address_at, of, tuple(starts))

    def put(self, tables: LaunchTables, lists: Sequence[int], *given: int, chunks: int = 1) -> list[Launch]:
        """Put the sheet into the tables of a chunk, or of several. `lists` are the addresses of their places.

        A launch's arguments are the addresses of its tables, then what is `given`, then its sizes.
        """
        room, address = tables.take(len(self.words))
        room[:] = self.words
        room[self.address_at] = lists[0] if len(lists) == 1 else np.array(lists)[self.lists]
        return [
            Launch(group.function, group.kernel, group.tiles, (*(address + at for at in starts), *given, *group.sizes))
            for group, starts in ((group.of_chunks(chunks), starts) for group, starts in self.groups)
        ]
