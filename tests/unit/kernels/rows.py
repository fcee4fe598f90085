"""Rows with a scale each, laid out as engines keep them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kvbridge_kernels.codecs_ref import Cast, Number, RowScale
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.segment import Places, Segment
from kvbridge_kernels.tables import Work

from tests.unit.kernels.chunks import (
    GUARD,
    Move,
    assert_same_memory,
    check_gather,
    content,
    move,
    on,
    scatter,
    slot_on,
    work_on,
)
from tests.unit.kernels.test_moves import addresses

WHERE = ("behind", "before", "token", "head", "page")


@dataclass(frozen=True, slots=True)
class Rows:
    """fp8 or int8 rows: their scales lie behind or before each, behind all of a token, or behind each, heads outside.

    "page": all rows of half a block, head by head, then their scales, so that the two have other strides. `form` is
    that of the scales. `moved` are the heads that the field has of all in memory.
    """

    where: str = "behind"
    heads: int = 4
    width: int = 64
    block_tokens: int = 4
    blocks: int = 5
    planes: int = 1
    moved: range = range(1, 3)
    form: str = "fp32"

    def fields(self, memory: torch.Tensor) -> tuple[Field, Field]:
        """The rows and their scales, each by its own strides."""
        if self.where == "page":
            return self._pages(memory)
        one = self.width + 4
        token, head = (one, self.block_tokens * one) if self.where == "head" else (self.heads * one, one)
        row_at, scale_at, scale_head = {"before": (4, 0, head), "token": (0, self.heads * self.width, 4)}.get(
            self.where, (0, self.width, head)
        )
        if self.where == "token":
            head = self.width
        block = self.block_tokens * self.heads * one + 32
        found = []
        for at, stride, elements in ((row_at, head, Axis(self.width, 1)), (scale_at, scale_head, Axis(1, 4))):
            found.append(
                Field(
                    memory,
                    64 + at + self.moved.start * stride,
                    Axis(self.planes, self.blocks * block),
                    Axis(self.blocks, block),
                    (Axis(self.block_tokens, token),),
                    Axis(len(self.moved), stride),
                    (elements,),
                    4 if elements.stride == 4 else 1,
                )
            )
        return found[0], found[1]

    def _pages(self, memory: torch.Tensor) -> tuple[Field, Field]:
        tokens = self.block_tokens // 2
        page = tokens * self.heads * (self.width + 4) + 16
        planes, blocks = Axis(self.planes, self.blocks * 2 * page), Axis(self.blocks, 2 * page)
        found = []
        for at, size, unit in ((0, self.width, 1), (tokens * self.heads * self.width, 4, 4)):
            offset = 64 + at + self.moved.start * size
            token = Axis(2, page), Axis(tokens, self.heads * size)
            heads, elements = Axis(len(self.moved), size), (Axis(size // unit, unit),)
            found.append(Field(memory, offset, planes, blocks, token, heads, elements, unit))
        return found[0], found[1]

    @property
    def size_bytes(self) -> int:
        block = self.block_tokens * self.heads * (self.width + 4) + 32
        return 128 + self.planes * self.blocks * block

    def row_scale(self) -> RowScale:
        row, scale = self.fields(torch.empty(0, dtype=torch.uint8))
        return RowScale(scale.offset - row.offset, scale.heads.stride, scale.blocks.stride, scale.tokens, self.form)


def segment_of(
    rows: Rows,
    name: str,
    wire: Number,
    wanted: int,
    seed: int = 0,
    tame: bool = False,
    is_exact: bool = False,
    rotates: bool = False,
) -> tuple[Segment, int]:
    """Random numbers under random scales (exact ones are powers of two) at `wanted` random places; the slot's bytes."""
    rng = np.random.default_rng(seed)
    memory = content(rng, rows.size_bytes, tame)
    field, scales = rows.fields(memory)
    where = addresses(scales, range(scales.places))
    values = np.exp2(rng.uniform(-9, 9, where.size // 4)).astype(np.float32)
    values = (np.exp2(np.round(np.log2(values))) if is_exact else values).astype("<f4")
    if rows.form == "ue8m0_x4":
        values = (values.view(np.uint32) >> 23).astype(np.uint8).repeat(4)
    memory.numpy()[where.reshape(-1)] = values.view(np.uint8)
    places = Places(torch.from_numpy(rng.permutation(field.places)[:wanted].astype(np.int64)))
    segment = Segment(field, places, 16, 0, Cast(Number(name, rows.row_scale()), wire, rotates))
    pitch = -(-segment.plane_bytes // 16) * 16
    return Segment(field, places, 16, pitch, segment.cast), 16 + rows.planes * pitch


def check_rows(
    by: Move,
    rows: Rows,
    name: str,
    wire: Number,
    wanted: int = 9,
    device: str = "cpu",
    tame: bool = False,
    rotates: bool = False,
) -> None:
    """Both ways against the twins: rows, their scales bit for bit, slot, digest, and all that is no one's."""
    segment, size = segment_of(rows, name, wire, wanted, tame=tame, is_exact=tame, rotates=rotates)
    check_gather(by, [segment], size, device)
    check_rows_scattered(by, rows, segment, content(np.random.default_rng(1), size, tame), device)


def check_rows_scattered(by: Move, rows: Rows, segment: Segment, sent: torch.Tensor, device: str) -> None:
    found, twins = on([segment], device), on([segment], "cpu")
    sums = []
    for each, segments, where in ((by, found, device), (move, twins, "cpu")):
        slot, span = slot_on(where, len(sent))
        slot[GUARD:-GUARD] = sent.to(where)
        total = torch.zeros(1, dtype=torch.int64, device=where)
        scatter(segments, span, total, work_on(where) if each is by else Work("cpu"), each)
        sums.append(int(total))
    assert sums[0] == sums[1]
    memory, wanted = found[0].field.memory.cpu(), twins[0].field.memory
    _, scales = rows.fields(wanted)
    at_scales = torch.from_numpy(addresses(scales, segment.places.index.tolist()))
    assert torch.equal(memory[at_scales], wanted[at_scales])
    assert not torch.equal(wanted[at_scales], segment.field.memory[at_scales])
    assert_same_memory([segment], memory, wanted)
