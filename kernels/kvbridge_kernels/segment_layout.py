"""The layout of a segment: strides, rows, codecs, and what follows from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from .codecs_ref import Cast, RowScale
from .field import Axis, Field

Offsets = npt.NDArray[np.int64]
MOST_LISTED_TOKENS = 1 << 16  # tokens of a block whose offsets are listed: a peer says how many its blocks have


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLayout:
    """A field and a cast without addresses, places and scales."""

    heads: int
    head_stride: int
    places: int
    reach: int  # bytes from the start of a plane to its end
    element_bytes: int
    row_bytes: int
    wire_row_bytes: int
    run_bytes: int  # length of the contiguous runs of a row in memory
    elements: tuple[Axis, ...]
    stride_bits: int  # all strides or-ed: its lowest set bit divides each of them
    places_key: tuple[int, tuple[Axis, ...]]
    codecs: tuple[str, str] | None
    row_scale: RowScale | None
    rotates: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What a kernel is compiled for, apart from alignment and scales."""
        is_token_major = self.head_stride < self.token_stride
        return (
            self.heads,
            is_token_major,
            self.row_bytes,
            self.run_bytes,
            self.element_bytes,
            self.elements,
            self.codecs,
            self.row_scale and (self.row_scale.at, self.row_scale.head_stride, self.row_scale.form),
            self.rotates,
        )

    @property
    def scale_places_key(self) -> tuple[int, tuple[Axis, ...]]:
        """As `places_key`, for the scales of rows; that of the rows if they have none."""
        scale = self.row_scale
        return self.places_key if scale is None else (scale.block_stride, _steps(scale.tokens))

    @property
    def token_stride(self) -> int:
        """Bytes from a token to the next, or from a block to the next if blocks have one token."""
        block_stride, tokens = self.places_key
        return tokens[-1].stride if tokens else block_stride

    @property
    def is_dense(self) -> bool:
        return self.run_bytes == self.row_bytes

    def columns(self, size: int, unit: int) -> Offsets:
        """Where each element of `size` bytes is, from the start of its row in units of `unit` bytes."""
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
        """The axes of a row outside its contiguous runs."""
        return _fold(self.elements, self.element_bytes)[1]


def layout_of(field: Field, cast: Cast | None) -> SegmentLayout:
    """ValueError if a stride is negative."""
    run_bytes, outer = _fold(field.elements, field.element_bytes)
    inner = (field.blocks, *field.tokens, field.heads, *outer)
    bits = 0
    for axis in inner:
        bits |= axis.stride if axis.count > 1 else 0
    if min(axis.stride for axis in (field.planes, *inner)) < 0:
        raise ValueError("strides must not be negative")
    row = field.row_bytes
    return SegmentLayout(
        heads=field.heads.count,
        head_stride=field.heads.stride,
        places=field.places,
        reach=field.end - field.offset - (field.planes.count - 1) * field.planes.stride,
        element_bytes=field.element_bytes,
        row_bytes=row,
        wire_row_bytes=row if cast is None else cast.wire_bytes(row),
        run_bytes=run_bytes,
        elements=field.elements,
        stride_bits=bits,
        places_key=(field.blocks.stride, _steps(field.tokens)),
        codecs=None if cast is None else (cast.memory.name, cast.wire.name),
        row_scale=cast.memory.scale if cast is not None and isinstance(cast.memory.scale, RowScale) else None,
        rotates=cast is not None and cast.rotates,
    )


def _fold(elements: tuple[Axis, ...], element_bytes: int) -> tuple[int, tuple[Axis, ...]]:
    """How many bytes are contiguous, and the axes outside them."""
    run, outer = element_bytes, list(_steps(elements))
    while outer and outer[-1].stride == run:
        run *= outer.pop().count
    return run, tuple(outer)


def _steps(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Without those of one position."""
    return tuple(axis for axis in axes if axis.count > 1)


def place_offsets(places: Offsets, block_stride: int, tokens: tuple[Axis, ...], out: Offsets) -> None:
    """Write to `out` the bytes from a field's offset to each place."""
    block_tokens = tokens[0].count if len(tokens) == 1 else prod(axis.count for axis in tokens)
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
        out += _listed(tokens)[token] if block_tokens <= MOST_LISTED_TOKENS else _within(tokens, token)


@lru_cache(maxsize=256)
def _listed(tokens: tuple[Axis, ...]) -> Offsets:
    """As `_within` for all tokens of a block, kept: to look one up takes an eighth of the time (2-core AMD EPYC)."""
    return _within(tokens, np.arange(prod(axis.count for axis in tokens)))


def _within(tokens: tuple[Axis, ...], token: Offsets) -> Offsets:
    """The bytes from a block's first token to each of these of its tokens."""
    found = np.zeros(len(token), np.int64)
    for axis in reversed(tokens):
        token, at = np.divmod(token, axis.count)
        found += at * axis.stride
    return found


def _quotient(places: Offsets, divisor: int) -> Offsets:
    return places >> (divisor.bit_length() - 1) if divisor & (divisor - 1) == 0 else places // divisor


def low_bit(bits: int) -> int:
    """The largest power of two that divides everything or-ed into `bits`."""
    return bits & -bits
