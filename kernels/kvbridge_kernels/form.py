"""What fields and conversions alike in shape have in common, worked out once: strides, row, tile. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from .codecs_ref import Cast, RowScale
from .field import Axis, Field

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How big a tile is, in bytes of the wider end, and how it is run."""

    tile_bytes: int
    warps: int
    tiles: int  # that a program walks through, if there are enough for all processors


# The best of 5 shapes x 4 counts at 1 GiB of Llama-8B's planes, NVIDIA H200, 2026-11. A program that sums or converts
# has a beginning and an end worth sharing between tiles. Eviction hints on loads or stores gain nothing.
TILINGS = {
    "move": Tiling(4 << 10, 2, 1),
    "sum": Tiling(2 << 10, 2, 8),
    "narrow": Tiling(8 << 10, 4, 4),
    "widen": Tiling(4 << 10, 2, 4),
    "rescale": Tiling(4 << 10, 2, 16),
    # Few programs pull over NVLink, so each has much under way. Not tuned yet.
    "pull": Tiling(16 << 10, 8, 1),
    "pull_sum": Tiling(16 << 10, 8, 4),
    "pull_cast": Tiling(16 << 10, 8, 4),
}

# A chunk is moved in launches of about so long at most. Under MPS an agent that is killed in a kernel of 2 ms takes the
# engine with it now and then (1 of 6), in one of 0.5 or 1 ms it did not (0 of 12); NVIDIA H200, 2026-11. The longest
# launch took 171 us alone and 195 us beside a decode-like engine (bench/results/gpu_launches.json).
LAUNCH_US = 250.0
# GB/s of the wider end that are expected at least, by kind: NVLink's where both ends are dense, for a slot may be a
# peer's (346 at 128 MiB; 680 and more in one GPU), and 260 where rows get scales of their own. Aligned to less than
# 8 bytes a launch is taken to be so much slower; that was not measured. NVIDIA H200, 2026-11.
LEAST_GB_S = {kind: 340.0 for kind in TILINGS} | {"own": 250.0}


def tiles_at_once(kind: str, tile_bytes: int, align: int, launch_us: float) -> int:
    """How many tiles one launch may move; `align` bytes are accessed at once at the narrower end."""
    bytes_per_us = LEAST_GB_S[kind] * 1e3 * min(8, align) / 8
    return max(1, int(launch_us * bytes_per_us / tile_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """All of a field and a cast but addresses, places and scales."""

    heads: int
    head_stride: int
    places: int
    reach: int  # bytes from the offset to the end of one plane
    element_bytes: int
    row_bytes: int
    wire_row_bytes: int
    run_bytes: int  # so many bytes of a row are contiguous in memory
    elements: tuple[Axis, ...]
    stride_bits: int  # all strides or-ed: what they are multiples of
    places_key: tuple[int, tuple[Axis, ...]]
    codecs: tuple[str, str] | None
    row_scale: RowScale | None

    @property
    def key(self) -> tuple[object, ...]:
        """What a kernel is compiled for, besides alignment and scales."""
        is_token_major = self.head_stride < self.token_stride
        return (
            self.heads,
            is_token_major,
            self.row_bytes,
            self.run_bytes,
            self.element_bytes,
            self.elements,
            self.codecs,
            self.row_scale,
            self.row_scale and self.head_stride,
        )

    @property
    def token_stride(self) -> int:
        """From a token to the next; from a block to the next where each is one token."""
        block_stride, tokens = self.places_key
        return tokens[-1].stride if tokens and tokens[-1].count > 1 else block_stride

    @property
    def is_dense(self) -> bool:
        return self.run_bytes == self.row_bytes

    def columns(self, size: int, unit: int) -> Offsets:
        """Where each `size` bytes of a row are from its start, in units of `unit` bytes."""
        at = np.arange(self.row_bytes // size, dtype=np.int64) * size
        index, within = np.divmod(at, self.run_bytes)
        found = within
        run = 1
        for axis in reversed(self.outer):
            found = found + index // run % axis.count * axis.stride
            run *= axis.count
        return found // unit

    @property
    def outer(self) -> tuple[Axis, ...]:
        """The axes of a row above its contiguous runs."""
        return _fold(self.elements, self.element_bytes)[1]


def form_of(field: Field, cast: Cast | None) -> Form:
    run_bytes, outer = _fold(field.elements, field.element_bytes)
    inner = (field.blocks, *field.tokens, field.heads, *outer)
    bits = 0
    for axis in inner:
        bits |= axis.stride if axis.count > 1 else 0
    if min(axis.stride for axis in (field.planes, *inner)) < 0:
        raise ValueError("strides must not be negative")
    row = field.row_bytes
    return Form(
        heads=field.heads.count,
        head_stride=field.heads.stride,
        places=field.places,
        reach=field.end - field.offset - field.planes.reach,
        element_bytes=field.element_bytes,
        row_bytes=row,
        wire_row_bytes=row if cast is None else cast.wire_bytes(row),
        run_bytes=run_bytes,
        elements=field.elements,
        stride_bits=bits,
        places_key=(field.blocks.stride, field.tokens),
        codecs=None if cast is None else (cast.memory.name, cast.wire.name),
        row_scale=cast.memory.scale if cast is not None and isinstance(cast.memory.scale, RowScale) else None,
    )


def tile_of(
    form: Form, row: int, size: int, least: int, tiling: Tiling, is_whole: bool = False
) -> tuple[int, int, int]:
    """Places, heads and columns of a tile, powers of two: as much of a row as wastes least, then what follows it.

    In memory that is the token's next head (NHD) or the head's next token (HND); in the slot it is always the token.
    `row` counts elements of `size` bytes at most; a thread takes `least` of them. The row is in one tile if `is_whole`.
    """
    most = tiling.tile_bytes // size
    widths = [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
    columns = min(widths, key=lambda width: (-(-row // width) * width, -width))
    if is_whole:
        columns = max(least, 1 << (row - 1).bit_length())
        most = max(most, columns)
    head_tile = min(low_bit(form.heads), most // columns, 16) if form.head_stride < form.token_stride else 1
    return most // (columns * head_tile), head_tile, columns


def _fold(elements: tuple[Axis, ...], element_bytes: int) -> tuple[int, tuple[Axis, ...]]:
    """The bytes that are contiguous, and the axes above them."""
    run, outer = element_bytes, [axis for axis in elements if axis.count > 1]
    while outer and outer[-1].stride == run:
        run *= outer.pop().count
    return run, tuple(outer)


def place_offsets(places: Offsets, block_stride: int, tokens: tuple[Axis, ...], out: Offsets) -> None:
    """out = bytes from a field's offset to each place."""
    block_tokens = prod(axis.count for axis in tokens)
    if block_tokens == 1:
        np.multiply(places, block_stride, out=out)
    elif len(tokens) == 1:
        stride = tokens[0].stride
        np.multiply(places, stride, out=out)
        if block_stride != block_tokens * stride:
            out += _quotient(places, block_tokens) * (block_stride - block_tokens * stride)
    else:
        block = _quotient(places, block_tokens)
        np.multiply(block, block_stride, out=out)
        token = places - block * block_tokens
        for axis in reversed(tokens):
            token, digit = np.divmod(token, axis.count)
            out += digit * axis.stride


def _quotient(places: Offsets, divisor: int) -> Offsets:
    return places >> (divisor.bit_length() - 1) if divisor & (divisor - 1) == 0 else places // divisor


def low_bit(bits: int) -> int:
    """The largest power of two that divides everything or-ed into `bits`."""
    return bits & -bits
