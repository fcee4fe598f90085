"""The memory of a move: strided fields of rows, and working memory.

Fields know nothing of pools or engines. kvbridge/device makes them from planes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch


class Axis(NamedTuple):
    """`count` positions, `stride` bytes apart. A tuple, because a chunk compares hundreds of them."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    stride: int


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
    # Derived once, because every move of a field's rows asks for them.
    block_tokens: int = field(init=False, compare=False)
    row_bytes: int = field(init=False, compare=False)
    places: int = field(init=False, compare=False)
    end: int = field(init=False, compare=False)  # one past the field's last byte
    shape: tuple[object, ...] = field(init=False, compare=False)  # a key: all but the memory and the offset

    def __post_init__(self) -> None:
        outer = (self.planes, self.blocks, self.heads)
        block_tokens = prod([axis.count for axis in self.tokens])
        last = sum([(axis.count - 1) * axis.stride for axis in (*outer, *self.tokens, *self.elements)])
        derive = object.__setattr__  # the record is frozen
        derive(self, "block_tokens", block_tokens)
        derive(self, "row_bytes", prod([axis.count for axis in self.elements]) * self.element_bytes)
        derive(self, "places", self.blocks.count * block_tokens)
        derive(self, "end", self.offset + last + self.element_bytes)
        derive(self, "shape", (*outer, self.element_bytes, self.tokens, self.elements))

    def plane_bytes(self, places: int) -> int:
        """How many bytes one plane's rows take in a slot, unconverted."""
        return self.heads.count * places * self.row_bytes


class Scratch:
    """Working memory: one growing buffer per purpose, because on a CPU touching fresh pages costs more than a copy.

    Not thread-safe: its owner runs one move at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, size_bytes: int, device: torch.device) -> torch.Tensor:
        """An uninitialised uint8 tensor of `size_bytes`, valid until the next `take` for the same purpose."""
        kept = self._buffers.get(purpose)
        if kept is None or kept.numel() < size_bytes or kept.device != device:
            kept = self._buffers[purpose] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return kept[:size_bytes]
