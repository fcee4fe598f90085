"""The constants of a kernel, chosen from the layouts and alignments of its two ends, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from .codecs import TYPES
from .codecs_ref import DTYPES, unit_of
from .digest_ref import word_bytes
from .scales import Steps
from .segment_layout import Offsets, SegmentLayout, low_bit
from .tables import Work
from .tiles import EndConstants, Tile
from .tiling import tile_of, tiles_at_once

# Kernels count tiles in 32 bits, and step one whole grid beyond the last tile.
MOST_TILES = 1 << 30
UINTS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@dataclass(slots=True, eq=False)
class Kernel:
    """A kernel with its constants, in the order of its signature. `compiled` is set by the first launch."""

    constants: dict[str, Any]
    warps: int
    tiles: int  # per program
    tiles_at_once: int  # per launch
    row: int
    tile: tuple[int, int, int]  # places, heads, columns
    columns: Sequence[Offsets | None]  # for each end; None: dense rows
    is_exact: bool = False  # every operation rounds by itself: none is fused with another
    compiled: Any = None

    def tiles_of(self, planes: int, places: int, heads: int) -> int:
        """How many tiles so many planes, places and heads take. ValueError if they are too many to count."""
        most_places, most_heads, width = self.tile
        tiles = planes * -(-places // most_places) * (heads // most_heads) * -(-self.row // width)
        if tiles > MOST_TILES:
            raise ValueError(f"chunk: {tiles} tiles in planes of one layout, limit {MOST_TILES}")
        return tiles


class EndShape(NamedTuple):
    """What a kernel is chosen for at one end. Without a layout that is a slot. `align` divides all its addresses."""

    layout: SegmentLayout | None
    align: int
    steps: Steps = Steps()

    @property
    def key(self) -> object:
        return None if self.layout is None else self.layout.key, self.align, self.steps

    @property
    def codecs(self) -> tuple[str, str] | None:
        return None if self.layout is None else self.layout.codecs

    @property
    def is_dense(self) -> bool:
        return self.layout is None or self.layout.is_dense

    @property
    def run_bytes(self) -> int:
        return 16 if self.layout is None else self.layout.run_bytes

    def end(self, size: int, columns: int, is_read: bool, has_native: bool, work: Work) -> EndConstants:
        """Its constants, for elements of `size` bytes and a tile of `columns`."""
        layout, run = self.layout, columns if self.is_dense else min(columns, low_bit(self.run_bytes // size))
        if layout is None:
            return EndConstants(True, UINTS[size], self.align, run)
        own, steps = layout.row_scale, self.steps
        divide = steps.divide if work.is_native or not steps.divide else "exact"  # the interpreter's fma rounds twice
        return EndConstants(
            is_slot=False,
            element=UINTS[size],
            align=self.align,
            run=run,
            is_dense=layout.is_dense,
            codec=None if layout.codecs is None else TYPES[layout.codecs[0]],
            multiply="own" if own is not None and is_read else steps.multiply,
            divide="own" if own is not None and not is_read else divide,
            scale="" if own is None else own.form,
            scale_at=0 if own is None else own.at,
            scale_head=0 if own is None else own.head_stride,
            rotate=unit_of(layout.row_bytes // layout.element_bytes) if layout.rotates and not is_read else 0.0,
            is_native=has_native,
        )


def kernel_of(source: EndShape, target: EndShape, has_sums: bool, is_stored: bool, work: Work) -> Kernel:
    """The kernel between two ends. Unless `is_stored` it only sums."""
    layouts = [side.layout for side in (source, target) if side.layout is not None]
    align = min(source.align, target.align, low_bit(source.run_bytes), low_bit(target.run_bytes))
    wire = next((layout.codecs[1] for layout in layouts if layout.codecs is not None), None)
    sizes: Sequence[int] = (min(8, align),) * 3  # of an element at the source, on the wire and at the target
    if wire is not None:
        names = [wire if side.codecs is None else side.codecs[0] for side in (source, target)]
        sizes = [DTYPES[name].itemsize for name in (names[0], wire, names[1])]
        source = source._replace(align=min(source.align, _access(sizes[0], max(sizes), True)))
        is_held = has_sums and source.layout is not None
        target = target._replace(align=min(target.align, _access(sizes[2], max(sizes), is_held)))
    kind = _kind(sizes, wire is not None, has_sums, len(layouts) == 2)
    tiling = work.tilings[kind]
    row = layouts[0].wire_row_bytes // sizes[1]
    is_whole = target.layout is not None and (target.layout.row_scale is not None or target.layout.rotates)
    walked = next((layout for layout in layouts if layout.head_stride < layout.token_stride), layouts[-1])
    tile = tile_of(walked, row, max(sizes), 16 // min(sizes), tiling, is_whole)
    # If 8-bit numbers are both summed and written, either write the words that are summed or do not let the processor
    # round them: see `write_words` in tiles.py.
    is_rounded = has_sums and source.codecs is not None and sizes[1] == 1
    writes_words = has_sums and (
        target.layout is None or (is_rounded and target.codecs is None and target.layout.is_dense)
    )
    is_native = work.is_native and row % 4 == 0
    constants = {
        "TILE": Tile(
            *tile,
            has_more_heads=layouts[0].heads > tile[1],
            has_more_columns=row > tile[2],
            step=low_bit(row | 64),
            wire=UINTS[sizes[1]],
            wire_codec=None if wire is None else TYPES[wire],
            word=word_bytes(layouts[0].wire_row_bytes) if has_sums else 0,
            writes_words=writes_words,
        ),
        "SOURCE": source.end(sizes[0], tile[2], True, is_native and (writes_words or not is_rounded), work),
        "TARGET": target.end(sizes[2], tile[2], False, is_native, work) if is_stored else None,
    }
    columns = [
        None if side.layout is None or side.is_dense else side.layout.columns(size, size if side.align >= size else 1)
        for side, size in ((source, sizes[0]), (target, sizes[2]))
    ]
    has_own = is_whole or any(layout.row_scale is not None for layout in layouts)
    tile_bytes = tile[0] * tile[1] * tile[2] * max(sizes)
    at_once = tiles_at_once("own" if has_own else kind, tile_bytes, align, work.launch_us)
    is_exact = target.layout is not None and target.layout.rotates
    return Kernel(constants, tiling.warps, tiling.tiles, at_once, row, tile, columns, is_exact)


def _kind(sizes: Sequence[int], is_converted: bool, has_sums: bool, is_pull: bool) -> str:
    """Which of TILINGS."""
    if is_pull:
        return "pull_cast" if is_converted else "pull_sum" if has_sums else "pull"
    if not is_converted:
        return "sum" if has_sums else "move"
    wider = sizes[2] - sizes[0]
    return "widen" if wider > 0 else "narrow" if wider < 0 else "rescale"


def _access(size: int, widest: int, is_held: bool) -> int:
    """Bytes per access at an end with elements of `size` bytes, so that a thread stores the elements that it loaded.

    A thread stores at most 16 bytes at once. So it loads fewer if its elements become wider. `is_held`: the thread
    holds the elements as they are at this end, because it loads or sums them.
    """
    return 16 * size // widest if is_held and widest > size else 16
