"""Rows with a scale each, against the definition: read with the row, or computed from its largest number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, LARGEST, SMALLEST_SCALE, Cast, Number, RowScale
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.gather_ref import gather_rows
from kvbridge_kernels.places import Places
from kvbridge_kernels.scatter_ref import scatter_rows
from kvbridge_kernels.segment import Span, check

from tests.unit.kernels import slow_codecs as slow
from tests.unit.kernels.rows import WHERE, Rows, segment_of
from tests.unit.kernels.test_codecs import bytes_as_stored, stored_as_bytes
from tests.unit.kernels.test_moves import POISON, addresses

NAMES = ("fp8_e4m3", "int8")
WIRES = tuple(DTYPES)
RNG = np.random.default_rng(5)
SCALES = np.concatenate([np.exp2(np.arange(-12.0, 12.0)), RNG.uniform(1e-4, 9, 12), [1e-30, 1e-4, 37.0, 1e36]])
SCALES = SCALES.astype(np.float32)


def rows_of(count: int, width: int) -> tuple[Field, RowScale]:
    """`count` rows, each behind its scale."""
    memory = torch.full((count * (width + 4),), POISON, dtype=torch.uint8)
    stride = width + 4
    field = Field(memory, 4, Axis(1, 0), Axis(count, stride), (Axis(1, 0),), Axis(1, 0), (Axis(width, 1),), 1)
    return field, RowScale(-4, 0)


def moved(field: Field, places: Places, cast: Cast) -> torch.Tensor:
    """A poisoned slot."""
    size = cast.wire_bytes(field.plane_bytes(places.count))
    return torch.full((field.planes.count, size), POISON, dtype=torch.uint8)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wire_scale", [None, 0.0371])
def test_every_8_bit_pattern_under_every_scale(name: str, wire: str, wire_scale: float | None) -> None:
    field, own = rows_of(len(SCALES), 256)
    table = field.memory.numpy().reshape(len(SCALES), 260)
    table[:, :4] = SCALES.view(np.uint8).reshape(-1, 4)
    table[:, 4:] = np.arange(256)
    scale = None if wire_scale is None else torch.tensor([[wire_scale]])
    cast, places = Cast(Number(name, own), Number(wire, scale)), Places(torch.arange(len(SCALES)))
    slot = moved(field, places, cast)
    gather_rows(field, places, slot, cast)
    found = bytes_as_stored(slot[0].numpy(), wire).reshape(len(SCALES), 256)
    values = slow.decode(np.tile(np.arange(256), (len(SCALES), 1)), name, SCALES[:, None])
    agree = slow.same(found, slow.encode(values, wire, wire_scale), wire)
    assert agree.all(), f"scale and pattern {np.argwhere(~agree)[:4].tolist()}"


def odd_rows(width: int) -> np.ndarray:
    """fp32 rows of every size, and such as have no largest number."""
    rng = np.random.default_rng(9)
    usual = rng.standard_normal((40, width)) * np.exp2(np.arange(-20.0, 20.0))[:, None]
    found = np.concatenate([usual, np.zeros((7, width))]).astype(np.float32)
    found[41] = np.nan
    found[42, ::2] = np.inf
    found[43, 3], found[43, 5:9] = np.nan, (1, -2, 3, -4)
    found[44, :3] = (-np.inf, 1.0, np.nan)
    found[45, :3] = (3.4028235e38, -1e38, 1.0)
    found[46, :3] = (1e-40, -1e-38, 1e-33)
    return found


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_quantized_by_its_own_largest(name: str, wire: str) -> None:
    stored = slow.encode(odd_rows(128), wire)
    values = slow.decode(stored, wire)
    field, own = rows_of(len(values), 128)
    places = Places(torch.from_numpy(np.random.default_rng(1).permutation(len(values))))
    slot = torch.from_numpy(stored_as_bytes(stored.reshape(-1), wire)).view(1, -1)
    scatter_rows(field, places, slot, Cast(Number(name, own), Number(wire)))
    table = field.memory.numpy().reshape(len(values), 132)[places.index.numpy()]
    scales, found = table[:, :4].copy().view(np.float32), table[:, 4:].astype(np.int64)

    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        sizes = np.where(np.isnan(values), np.float32(0), np.minimum(np.abs(values), np.float32(LARGEST["bf16"])))
    largest = sizes.max(axis=1, keepdims=True)
    assert np.array_equal(scales, np.maximum(largest / np.float32(LARGEST[name]), np.float32(SMALLEST_SCALE)))
    assert slow.same(found, slow.encode(values, name, scales), name).all()

    back = slow.decode(found, name, scales).astype(np.float64)
    wide = scales.astype(np.float64)
    bound = np.abs(values) * 2.0**-4 + wide * 2.0**-10 if name == "fp8_e4m3" else wide * 0.50001
    bound = np.where(np.abs(values) > LARGEST["bf16"], np.abs(values) * 2.0**-4, bound)
    with np.errstate(invalid="ignore"):
        near = np.abs(back - values) <= bound
    assert near[finite].all() and np.isfinite(back[finite]).all(), np.argwhere(finite & ~near)[:4]
    assert not found[40].any() and scales[40] == SMALLEST_SCALE


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", NAMES)
def test_scales_and_rows_of_other_heads_are_untouched(name: str, where: str, planes: int) -> None:
    """Two heads of four at some places: each row is read under its own scale, and nothing else is written."""
    rows = Rows(where, planes=planes, width=24)
    wire = Number("fp32")
    segment, _ = segment_of(rows, name, wire, 9, is_exact=True)
    field, scales = rows.fields(segment.field.memory)
    index = segment.places.index.tolist()
    at_rows, at_scales = addresses(field, index), addresses(scales, index)
    memory = field.memory.numpy()
    stored = memory[at_rows].reshape(planes, -1, 24).astype(np.int64)
    kept = memory[at_scales].view(np.float32).reshape(planes, -1, 1)
    assert len(np.unique(kept)) > 5

    slot = moved(field, segment.places, segment.cast)
    gather_rows(field, segment.places, slot, segment.cast)
    values = slot.numpy().view(np.float32).reshape(stored.shape)
    assert slow.same(values, slow.decode(stored, name, kept), "fp32").all()

    before = memory.copy()
    sent = np.asarray(np.random.default_rng(2).standard_normal(values.shape), np.float32) * kept
    scatter_rows(field, segment.places, torch.from_numpy(sent.reshape(planes, -1).view(np.uint8)), segment.cast)
    own = np.abs(sent).max(axis=2, keepdims=True) / np.float32(LARGEST[name])
    assert np.array_equal(memory[at_scales].view(np.float32).reshape(own.shape), own)
    assert np.array_equal(memory[at_rows].reshape(sent.shape), slow.encode(sent, name, own))
    others = np.ones(memory.size, bool)
    others[at_rows.reshape(-1)] = others[at_scales.reshape(-1)] = False
    assert np.array_equal(memory[others], before[others])


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_heads_on_the_wire_are_those_of_their_rows(name: str) -> None:
    rows, given = Rows("token", planes=2), torch.tensor([[0.5, 0.07], [3.0, 1.9]])
    segment, _ = segment_of(rows, name, Number("fp8_e5m2", given), 7)
    field, scales = rows.fields(segment.field.memory)
    index = segment.places.index.tolist()
    shape = (2, 2, 7, 64)
    stored = field.memory.numpy()[addresses(field, index)].reshape(shape).astype(np.int64)
    kept = field.memory.numpy()[addresses(scales, index)].view(np.float32).reshape(2, 2, 7, 1)
    slot = moved(field, segment.places, segment.cast)
    gather_rows(field, segment.places, slot, segment.cast)
    each = given.numpy()[:, :, None, None]
    wire = slot.numpy().reshape(shape).astype(np.int64)
    assert slow.same(wire, slow.encode(slow.decode(stored, name, kept), "fp8_e5m2", each), "fp8_e5m2").all()

    wire &= ~0x20  # no infinity, no NaN
    scatter_rows(field, segment.places, torch.from_numpy(wire.astype(np.uint8)).view(2, -1), segment.cast)
    values = slow.decode(wire, "fp8_e5m2", each)
    own = np.abs(values).max(axis=3, keepdims=True) / np.float32(LARGEST[name])
    assert np.array_equal(field.memory.numpy()[addresses(scales, index)].view(np.float32).reshape(own.shape), own)
    found = field.memory.numpy()[addresses(field, index)].reshape(shape).astype(np.int64)
    assert slow.same(found, slow.encode(values, name, own), name).all()


def test_no_places_are_fine() -> None:
    segment, _ = segment_of(Rows(), "int8", Number("bf16"), 0)
    before, slot = segment.field.memory.clone(), torch.empty(1, 0, dtype=torch.uint8)
    gather_rows(segment.field, segment.places, slot, segment.cast)
    scatter_rows(segment.field, segment.places, slot, segment.cast)
    assert torch.equal(segment.field.memory, before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": RowScale(1 << 20, 0)}, "row scales from byte"),
        ({"scale": RowScale(-1000, 0)}, "row scales from byte"),
        ({"scale": RowScale(2, 68)}, "multiples of 4 bytes: offset"),
        ({"scale": RowScale(64, 34)}, "multiples of 4 bytes: offset"),
        ({"name": "fp8_e5m2"}, "for fp8_e4m3 and int8, not for fp8_e5m2"),
        ({"rows": Rows(width=1028, blocks=1)}, "row: 1028 numbers, with row scales at most 1024"),
        ({"wire": Number("fp8_e4m3", RowScale(0, 0))}, "the wire has none"),
    ],
)
def test_refuses_what_does_not_fit_before_anything_is_written(change: dict[str, Any], reason: str) -> None:
    rows = change.get("rows", Rows())
    segment, size = segment_of(rows, "fp8_e4m3", Number("bf16"), 4)
    memory = Number(change.get("name", "fp8_e4m3"), change.get("scale", rows.row_scale()))
    segment = replace(segment, cast=Cast(memory, change.get("wire", Number("bf16"))))
    before = segment.field.memory.clone()
    slot = torch.full((1, segment.plane_bytes), POISON, dtype=torch.uint8)
    with pytest.raises(ValueError, match=reason):
        check(segment, Span(0, size))
    for move in (gather_rows, scatter_rows):
        with pytest.raises(ValueError, match=reason):
            move(segment.field, segment.places, slot, segment.cast)
    assert torch.equal(segment.field.memory, before) and (slot == POISON).all()
