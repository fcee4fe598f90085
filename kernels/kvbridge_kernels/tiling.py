"""How segments are cut into tiles, and chunks into launches, by measured sizes and rates. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .segment_layout import SegmentLayout, low_bit


@dataclass(frozen=True, slots=True)
class Tiling:
    """How big a tile is, in bytes of the end with the wider elements, and how it is run."""

    tile_bytes: int
    warps: int
    tiles: int  # per program, if there are enough for all processors


# The best of 5 shapes x 4 counts at 1 GiB of Llama-8B's planes, NVIDIA H200, 2026-11. Programs that sum or convert take
# several tiles, because starting and ending one costs time. Eviction hints on loads or stores gained nothing.
TILINGS = {
    "move": Tiling(4 << 10, 2, 1),
    "sum": Tiling(2 << 10, 2, 8),
    "narrow": Tiling(8 << 10, 4, 4),
    "widen": Tiling(4 << 10, 2, 4),
    "rescale": Tiling(4 << 10, 2, 16),
    # Few programs pull over NVLink, so each needs many bytes under way. Not tuned.
    "pull": Tiling(16 << 10, 8, 1),
    "pull_sum": Tiling(16 << 10, 8, 4),
    "pull_cast": Tiling(16 << 10, 8, 4),
}

# The longest that a launch should take. Under MPS an agent that is killed inside a kernel of 2 ms may take the engine
# with it (1 of 6); with kernels of 0.5 or 1 ms none did (0 of 12); NVIDIA H200, 2026-11. The longest launch took 171 us
# alone and 195 us beside a decode-like engine (bench/results/gpu_launches.json). Pulls that may take all CTAs run two
# at once, which makes each up to twice as long; they do not under MPS.
LAUNCH_US = 250.0
# The rates by which chunks are cut into launches, by kind: GB/s of the wider end, a little less than measured on an
# NVIDIA H200, 2026-11. Over NVLink, because a slot may be a peer's: 346 at 128 MiB (680 and more inside one GPU).
# Writing rows with a scale each ("own"): 260. With accesses below 8 bytes the rate is assumed to fall in proportion.
LEAST_GB_S = {kind: 340.0 for kind in TILINGS} | {"own": 250.0}


def tiles_at_once(kind: str, tile_bytes: int, align: int, launch_us: float) -> int:
    """How many tiles one launch may move. `align`: bytes per access, at the end with the smaller one."""
    bytes_per_us = LEAST_GB_S[kind] * 1e3 * min(8, align) / 8
    return max(1, int(launch_us * bytes_per_us / tile_bytes))


def tile_of(
    layout: SegmentLayout, row: int, size: int, least: int, tiling: Tiling, is_whole: bool = False
) -> tuple[int, int, int]:
    """Places, heads and columns of a tile, powers of two: the columns that waste least, then the rows that lie next.

    In memory the next row is the token's next head (NHD) or the head's next token (HND). In the slot it is always the
    head's next token. `row` counts elements, of at most `size` bytes. A thread takes at least `least` of them. With
    `is_whole` the tile holds whole rows.
    """
    most = tiling.tile_bytes // size
    widths = [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
    columns = min(widths, key=lambda width: (-(-row // width) * width, -width))
    if is_whole:
        columns = max(least, 1 << (row - 1).bit_length())
        most = max(most, columns)
    head_tile = min(low_bit(layout.heads), most // columns, 16) if layout.head_stride < layout.token_stride else 1
    return most // (columns * head_tile), head_tile, columns
