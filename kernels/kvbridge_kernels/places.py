"""A list of places, and how a CPU copies its rows: worked out once for all fields of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .field import Field
from .pieces import Piece, split
from .segment_layout import Offsets
from .walks import Walk, fold, through_scratch, walks

# Runs shorter than this are copied element by element, which is cheaper from a dense scratch than from memory.
SHORT_RUN = 16


@dataclass(frozen=True, slots=True)
class Detour:
    """Two copies, memory to scratch and scratch to slot, for memory whose own order has longer runs."""

    to_scratch: Sequence[Walk]
    to_slot: Sequence[Walk]
    size_bytes: int  # of the scratch, per index position


@dataclass(frozen=True, slots=True)
class Route:
    """How one piece is copied. `reach`: index positions in memory; `pitch`: bytes from one to the next in the slot."""

    piece: Piece
    reach: int
    pitch: int
    direct: Sequence[Walk]
    detour: Detour | None


class Places:
    """int64 [n]: which places of a field, in slot order. ValueError for any other array or tensor."""

    def __init__(self, places: torch.Tensor | Offsets) -> None:
        self.array: Offsets = places if isinstance(places, np.ndarray) else places.numpy()
        if self.array.dtype != np.int64 or self.array.ndim != 1:
            raise ValueError(f"places must be int64 [n], got {places.dtype} {list(places.shape)}")
        self.count = len(self.array)
        self.lowest = int(np.minimum.reduce(self.array)) if self.count else 0
        self.highest = int(np.maximum.reduce(self.array)) if self.count else -1
        self._routes: dict[object, Sequence[Route]] = {}

    @cached_property
    def index(self) -> torch.Tensor:
        """The same as a tensor, for copies on a CPU."""
        return torch.from_numpy(self.array)

    def routes(self, field: Field, plane_pitch: int) -> Sequence[Route]:
        """The pieces that make up the places, each with how it is copied between `field` and a slot."""
        key = (field.shape, plane_pitch)
        if key not in self._routes:
            self._routes[key] = [self._route(field, piece, plane_pitch) for piece in split(field, self.index)]
        return self._routes[key]

    def _route(self, field: Field, piece: Piece, plane_pitch: int) -> Route:
        axes = walks(field, piece, self.count, plane_pitch)
        direct = fold(axes)
        detour = None
        if direct[-1].count < SHORT_RUN:
            to_scratch, to_slot, size_bytes = through_scratch(axes)
            if fold(to_scratch)[-1].count > direct[-1].count:
                detour = Detour(fold(to_scratch), fold(to_slot), size_bytes)
        pitch = piece.rows * field.row_bytes
        return Route(piece, int(piece.index.max()) + 1, pitch, direct, detour)
