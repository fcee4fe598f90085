"""Gather and scatter against the definition of a field, for every shape of axis and of places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from kvbridge_kernels import launch_ref
from kvbridge_kernels.codecs_ref import Cast, Number
from kvbridge_kernels.digest_ref import digest
from kvbridge_kernels.field import Axis, Field, Scratch
from kvbridge_kernels.prepared import Prepared
from kvbridge_kernels.segment import Places, Segment, Span, split
from kvbridge_kernels.tables import Work

from tests.unit.kernels import chunks
from tests.unit.kernels import slow_codecs as slow
from tests.unit.kernels.chunks import POISON, Shape

BLOCKS, T, H, D = 6, 16, 3, 16
FILLED = np.random.default_rng(7).integers(0, 256, 80_000).astype(np.uint8)


def gather_rows(field: Field, places: Places, slot: torch.Tensor, cast: Cast | None = None) -> None:
    launch_ref.gather_rows(field, places, slot, cast, Scratch())


def scatter_rows(field: Field, places: Places, slot: torch.Tensor, cast: Cast | None = None) -> None:
    launch_ref.scatter_rows(field, places, slot, cast, Scratch())


def field_of(layout: str, size: int, planes: int = 1, shift: int = 0) -> Field:
    """`size` is the bytes of an element, `shift` moves the whole field by single bytes."""
    row = D * size
    skip = 3 * row + (T * H * row if layout == "spread" else 0)
    shape = Shape(layout, H, D, size, T, planes, shift, skip=skip)
    return chunks.field_of(shape, BLOCKS, torch.from_numpy(np.copy(FILLED)), 0)


def at(axes: Sequence[Axis], index: int) -> int:
    offset = 0
    for axis in reversed(axes):
        index, digit = divmod(index, axis.count)
        offset += digit * axis.stride
    return offset


def addresses(field: Field, places: Sequence[int]) -> np.ndarray:
    """The byte in memory of every byte in the slot, by the definition: [plane, head, place, row]."""
    elements = prod(axis.count for axis in field.elements)
    row = [at(field.elements, e) + byte for e in range(elements) for byte in range(field.element_bytes)]
    lines = range(field.planes.count * field.heads.count)
    rows = [
        field.offset + at((field.planes, field.heads), line) + block * field.blocks.stride + at(field.tokens, token)
        for line, (block, token) in itertools.product(lines, [divmod(place, field.block_tokens) for place in places])
    ]
    found = np.asarray(rows, np.int64)[:, None] + np.asarray(row)[None, :]
    return found.reshape(field.planes.count, len(rows) // field.planes.count * len(row))


# Names say what the shape of a request is: blocks in any order, a prefix or a tail inside a block, anything at all.
PLACES = {
    "whole": [*range(32, 48), *range(0, 16), *range(64, 80)],
    "one_block": [*range(16, 32)],
    "tail": [*range(32, 48), *range(16, 20)],
    "prefix": [*range(37, 48), *range(0, 16)],
    "both": [*range(47, 48), *range(0, 16), *range(80, 83)],
    "inside": [*range(19, 25)],
    "single": [95],
    "first": [0],
    "next_blocks": [*range(0, 96)],
    "every_third": [*range(0, 96, 3)],
    "backwards": [*range(95, 40, -1)],
    "cut_short": [5, 6, 7, 32, 33],
    "borders_only": [0, 16, 32, 80],
    "none": [],
}
LAYOUTS = ["nhd", "hnd", "columns", "tiled", "spread", "folded"]


def places_for(field: Field, name: str) -> list[int]:
    if field.block_tokens == T:
        return PLACES[name]
    return list(dict.fromkeys(place // T for place in PLACES[name]))


@pytest.mark.parametrize(("planes", "shift"), [(1, 0), (2, 1), (1, 6)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_arrive_bit_for_bit_and_nothing_else_changes(layout: str, size: int, planes: int, shift: int) -> None:
    for name in PLACES:
        moved_both_ways(layout, size, planes, shift, name)


def moved_both_ways(layout: str, size: int, planes: int, shift: int, name: str) -> None:
    field = field_of(layout, size, planes, shift)
    places = places_for(field, name)
    where, index = addresses(field, places), Places(torch.tensor(places, dtype=torch.int64))
    pitch = field.plane_bytes(len(places)) + 5 * size  # planes need not touch in a slot
    whole = torch.full((planes * pitch + 1,), POISON, dtype=torch.uint8)
    slot = whole.as_strided([planes, field.plane_bytes(len(places))], [pitch, 1])
    gather_rows(field, index, slot)
    before = field.memory.numpy().copy()
    assert np.array_equal(slot.numpy(), before[where]), name
    assert (whole.numpy() == POISON)[field.plane_bytes(len(places)) :][: 5 * size].all()

    slot.copy_(slot ^ 0xFF)
    scatter_rows(field, index, slot)
    wanted = before.copy()
    wanted[where] = before[where] ^ 0xFF
    assert np.array_equal(field.memory.numpy(), wanted), name


@pytest.mark.parametrize(("planes", "shift"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in PLACES if name != "none"])
def test_long_runs_are_moved_by_themselves_to_the_same_places(
    layout: str, planes: int, shift: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_ref, "MEMMOVE_RUN", 1)
    monkeypatch.setattr(launch_ref, "_move_tile", None)
    first = field_of(layout, 2, planes, shift)
    fields = [first, replace(first, offset=first.offset + 5)]  # of the same form, elsewhere
    places = places_for(first, name)
    index, size = Places(torch.tensor(places, dtype=torch.int64)), first.plane_bytes(len(places))
    pitch = size + 6
    segments = [Segment(field, index, 3 + i * planes * pitch, pitch) for i, field in enumerate(fields)]
    slot = torch.full((2 * planes * pitch + 8,), POISON, dtype=torch.uint8)
    span, before = Span(slot.data_ptr(), slot.numel()), first.memory.numpy().copy()
    launch_ref.move(Prepared(segments, None, span.size_bytes).chunk, Work("cpu"), span)
    wanted, rows = np.zeros(slot.numel(), np.uint8), []
    for segment in segments:
        starts = segment.slot_offset + pitch * np.arange(planes)[:, None] + np.arange(size)
        rows.append((starts, addresses(segment.field, places)))
        wanted[starts] = before[rows[-1][1]]
    assert np.array_equal(slot.numpy(), wanted)

    slot.random_(0, 256, generator=torch.Generator().manual_seed(1))
    launch_ref.move(Prepared(None, segments[:1], span.size_bytes).chunk, Work("cpu"), span)
    changed = before.copy()
    changed[rows[0][1]] = slot.numpy()[rows[0][0]]
    assert np.array_equal(first.memory.numpy(), changed)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("layout", ["nhd", "columns", "tiled"])
@pytest.mark.parametrize(("inside", "outside"), [("bf16", "fp8_e4m3"), ("fp8_e4m3", "bf16"), ("fp16", "bf16")])
def test_rows_are_converted_on_the_way(inside: str, outside: str, layout: str, planes: int) -> None:
    sizes = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1}
    patterns = {1: np.uint8, 2: np.uint16}
    field = field_of(layout, sizes[inside], planes)
    places = PLACES["both"]
    scale = torch.tensor([[0.5, 3.0, 0.07]])
    conversion = Cast(Number(inside, scale), Number(outside, torch.tensor([[0.11]])))
    size = field.plane_bytes(len(places)) // sizes[inside] * sizes[outside]
    slot = torch.full((planes, size), POISON, dtype=torch.uint8)
    gather_rows(field, Places(torch.tensor(places)), slot, conversion)
    where = addresses(field, places)
    shape = (planes, H, -1)
    stored = field.memory.numpy()[where].view(patterns[sizes[inside]]).reshape(shape)
    each = scale.numpy()[0][None, :, None]
    wire = slow.encode(slow.decode(stored, inside, each), outside, 0.11)
    found = slot.numpy().view(patterns[sizes[outside]]).astype(np.int64).reshape(shape)
    assert slow.same(found, wire, outside).all()

    before = field.memory.numpy().copy()
    scatter_rows(field, Places(torch.tensor(places)), slot, conversion)
    after = field.memory.numpy()
    back = slow.encode(slow.decode(found, outside, 0.11), inside, each)
    assert slow.same(after[where].view(patterns[sizes[inside]]).astype(np.int64).reshape(shape), back, inside).all()
    untouched = np.ones(len(after), bool)
    untouched[where] = False
    assert np.array_equal(after[untouched], before[untouched])


def test_whole_blocks_are_moved_as_blocks() -> None:
    field = field_of("nhd", 2)
    assert [len(piece.index) for piece in split(field, torch.tensor(PLACES["whole"]))] == [3]
    assert [len(piece.index) for piece in split(field, torch.tensor(PLACES["both"]))] == [1, 1, 1]
    assert [len(piece.index) for piece in split(field, torch.tensor(PLACES["every_third"]))] == [32]


@pytest.mark.parametrize("places", [[-1], [BLOCKS * T], [0, 1 << 62]])
def test_refuses_places_outside_the_field_before_anything_is_written(places: list[int]) -> None:
    field = field_of("nhd", 2)
    before = field.memory.clone()
    slot = torch.full((field.plane_bytes(len(places)),), POISON, dtype=torch.uint8)
    segment = Segment(field, Places(torch.tensor(places)), 0, 0)
    for copy in (chunks.gather, chunks.scatter):
        with pytest.raises(ValueError, match=f"the field has {BLOCKS * T}"):
            copy([segment], Span(slot.data_ptr(), slot.numel()), None, Work("cpu"))
    assert torch.equal(field.memory, before)
    assert (slot == POISON).all()


def test_refuses_a_field_that_ends_outside_its_memory() -> None:
    field = field_of("nhd", 2)
    short = replace(field, memory=field.memory[: field.end - 1])
    with pytest.raises(ValueError, match=f"ends at byte {field.end}, its memory has {field.end - 1}"):
        chunks.gather([Segment(short, Places(torch.tensor([0])), 0, 0)], Span(0, 1 << 20), None, Work("cpu"))


def test_refuses_a_slot_of_another_size() -> None:
    field = field_of("nhd", 2)
    size = field.plane_bytes(1)
    with pytest.raises(ValueError, match=f"segment ends at byte {size}, the slot has {size - 1}"):
        chunks.gather([Segment(field, Places(torch.tensor([0])), 0, 0)], Span(0, size - 1), None, Work("cpu"))


def test_digest_is_of_the_bytes_in_order() -> None:
    slot = torch.arange(256, dtype=torch.uint8)
    assert digest(slot) == digest(slot.clone()) == digest(torch.cat([slot, slot])[:256])
    assert digest(slot) != digest(slot.flip(0))
    assert 0 <= digest(slot) < 1 << 64
