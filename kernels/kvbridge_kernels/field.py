"""The memory that a kernel reads or writes: a strided field of rows. Pure.

Fields know nothing of pools or engines. kvbridge/device makes them from planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch


class Axis(NamedTuple):
    """`count` positions, `stride` bytes apart. A tuple, because a chunk compares hundreds of them."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    stride: int

    @property
    def reach(self) -> int:
        """Bytes from the first position to the last."""
        return (self.count - 1) * self.stride


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory by address, for kernels on GPU `device`. It may be a peer GPU's, which must never become a tensor."""

    address: int
    size_bytes: int
    device: int

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.size_bytes

    def get_device(self) -> int:
        return self.device


@dataclass(frozen=True, slots=True)
class Field:
    """Planes x blocks x tokens x heads x elements inside `memory`, a 1-D uint8 tensor or, for kernels, a `Mapped`.

    `offset` is in bytes. `tokens` and `elements` may each be several axes, the outermost first. A place is
    `block * block_tokens + token`. In a slot, the rows of each plane lie densely as [head][place][row].
    """

    memory: torch.Tensor | Mapped
    offset: int
    planes: Axis
    blocks: Axis
    tokens: tuple[Axis, ...]
    heads: Axis
    elements: tuple[Axis, ...]
    element_bytes: int

    @property
    def block_tokens(self) -> int:
        return prod(axis.count for axis in self.tokens)

    @property
    def row_bytes(self) -> int:
        return prod(axis.count for axis in self.elements) * self.element_bytes

    @property
    def places(self) -> int:
        return self.blocks.count * self.block_tokens

    @property
    def end(self) -> int:
        """One past the last byte of the field."""
        axes = (self.planes, self.blocks, *self.tokens, self.heads, *self.elements)
        return self.offset + sum(axis.reach for axis in axes) + self.element_bytes

    def plane_bytes(self, places: int) -> int:
        """How many bytes one plane's rows take in a slot, unconverted."""
        return self.heads.count * places * self.row_bytes

    @property
    def shape(self) -> tuple[object, ...]:
        """A key: everything except the memory and the offset."""
        outer = (self.planes, self.blocks, self.heads, self.element_bytes)
        return (*outer, self.tokens, self.elements)
