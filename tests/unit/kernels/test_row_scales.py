"""Rows with a scale each, against the definition: read with the row, or computed from its largest number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import DTYPES, LARGEST, SMALLEST_SCALE, Cast, Number, RowScale
from kvbridge_kernels.field import Axis, Field
from kvbridge_kernels.segment import Places, Span
from kvbridge_kernels.tables import Work

from tests.unit.kernels import slow_codecs as slow
from tests.unit.kernels.chunks import gather, scatter
from tests.unit.kernels.rows import WHERE, Rows, segment_of
from tests.unit.kernels.test_codecs import bytes_as_stored, stored_as_bytes
from tests.unit.kernels.test_moves import POISON, addresses, gather_rows, scatter_rows

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
    return field, RowScale(-4, 0, stride, (Axis(1, 0),))


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


def hadamard(width: int) -> np.ndarray:
    """By its definition: the sign of an element is the parity of the bits that its row and column have in common."""
    both = np.arange(width)[:, None] & np.arange(width)[None, :]
    return np.where(np.bitwise_count(both) % 2, -1.0, 1.0) / np.sqrt(width)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("form", ["pow2_fp32", "ue8m0_x4"])
def test_a_scale_that_is_a_power_of_two_is_rounded_up(form: str, rotates: bool) -> None:
    """As engines write index keys: at least 1e-4 counts as the largest number of a row."""
    rng = np.random.default_rng(3)
    usual = rng.standard_normal((60, 128)) * np.exp2(np.arange(-30.0, 30.0))[:, None]
    edges = np.zeros((6, 128))
    edges[1:, 5] = (448.0, -448.0000305, 223.99998, 0.25, 1e-4)  # the scale is 1, 2, 0.5, ...
    values = np.concatenate([usual, edges]).astype(np.float32)
    field, own = rows_of(len(values), 128)
    places = Places(torch.from_numpy(rng.permutation(len(values))))
    slot = torch.from_numpy(values.reshape(1, -1).view(np.uint8).copy())
    cast = Cast(Number("fp8_e4m3", replace(own, form=form)), Number("fp32"), rotates)
    scatter_rows(field, places, slot, cast)
    table = field.memory.numpy().reshape(len(values), 132)[places.index.numpy()]
    sent = values.astype(np.float64) @ (hadamard(128) if rotates else np.eye(128))
    least = np.maximum(np.abs(sent).max(axis=1), np.float32(1e-4)) / 448
    wanted = np.exp2(np.ceil(np.log2(least)))
    if not rotates:
        assert wanted[61:65].tolist() == [1, 2, 0.5, 2.0**-10]
    stored = table[:, :4].copy().view("<u4")[:, 0]
    exponents = (np.log2(wanted) + 127).astype(np.uint32)
    assert np.array_equal(stored, exponents << 23 if form == "pow2_fp32" else exponents * 0x01010101)
    found = slow.decode(table[:, 4:].astype(np.int64), "fp8_e4m3", wanted[:, None])
    if not rotates:
        assert np.array_equal(table[:, 4:], slow.encode(values, "fp8_e4m3", wanted[:, None]))
    bound = np.abs(sent) * (2.0**-4 + 2.0**-20) + wanted[:, None] * 2.0**-10
    assert (np.abs(found - sent) <= bound).all() and sent[:60].any()

    back = moved(field, places, cast)
    gather_rows(field, places, back, cast)
    assert np.array_equal(back.numpy().view(np.float32).reshape(values.shape), found.astype(np.float32))


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp16", "fp8_e5m2"])
@pytest.mark.parametrize("width", [1, 2, 64, 1024])
def test_rows_without_a_scale_are_rotated_too_and_twice_is_not_at_all(name: str, width: int) -> None:
    """By head: rows of different heads have nothing to do with each other."""
    tokens, heads, size = 5, 3, DTYPES[name].itemsize
    memory = torch.full((tokens * heads * width * size,), POISON, dtype=torch.uint8)
    axes = Axis(1, 0), Axis(tokens, heads * width * size), (Axis(1, 0),), Axis(heads, width * size)
    field = Field(memory, 0, *axes, (Axis(width, size),), size)
    values = np.random.default_rng(2).standard_normal((heads, tokens, width)).astype(np.float32)
    sent = torch.from_numpy(values.reshape(1, -1).view(np.uint8).copy())
    places, cast = Places(torch.arange(tokens)), Cast(Number(name), Number("fp32"), True)
    scatter_rows(field, places, sent, cast)
    found = memory.view(DTYPES[name]).float().numpy().reshape(tokens, heads, width).swapaxes(0, 1)
    step = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8_e5m2": 2.0**-2}.get(name, 2.0**-20)
    assert np.abs(found - values @ hadamard(width)).max() <= step * 4
    if name == "fp32":
        scatter_rows(field, places, torch.from_numpy(found.reshape(1, -1).copy().view(np.uint8)), cast)
        again = memory.view(torch.float32).numpy().reshape(tokens, heads, width).swapaxes(0, 1)
        assert np.abs(again - values).max() < 1e-5


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
    before, slot = segment.field.memory.clone(), torch.empty(16, dtype=torch.uint8)
    for copy in (gather, scatter):
        copy([segment], Span(slot.data_ptr(), 16), None, Work("cpu"))
    assert torch.equal(segment.field.memory, before)


def scale_at(at: int, **changes: Any) -> RowScale:
    """Those of `Rows()`, elsewhere."""
    return replace(Rows().row_scale(), at=at, **changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": scale_at(1 << 20)}, "row scales from byte"),
        ({"scale": scale_at(-1000)}, "row scales from byte"),
        ({"scale": scale_at(2)}, "multiples of 4 bytes: offset"),
        ({"scale": scale_at(64, head_stride=34)}, "multiples of 4 bytes: offset"),
        ({"name": "fp8_e5m2"}, "for fp8_e4m3 and int8, not for fp8_e5m2"),
        ({"rows": Rows(width=1028, blocks=1)}, "row: 1028 numbers, with row scales at most 1024"),
        ({"wire": Number("fp8_e4m3", scale_at(0))}, "the wire has none"),
        ({"scale": scale_at(64, form="fp16")}, "row scales are fp32, pow2_fp32, ue8m0_x4, not fp16"),
        ({"scale": scale_at(64, tokens=(Axis(3, 272),))}, "row scales: 3 in a block of 4 rows"),
        ({"rows": Rows(width=96), "rotates": True}, "row: 96 numbers, rotated ones have a power of two, at most 1024"),
    ],
)
def test_refuses_what_does_not_fit_before_anything_is_written(change: dict[str, Any], reason: str) -> None:
    rows = change.get("rows", Rows())
    segment, size = segment_of(rows, "fp8_e4m3", Number("bf16"), 4)
    memory = Number(change.get("name", "fp8_e4m3"), change.get("scale", rows.row_scale()))
    segment = replace(segment, cast=Cast(memory, change.get("wire", Number("bf16")), change.get("rotates", False)))
    before = segment.field.memory.clone()
    slot = torch.full((size,), POISON, dtype=torch.uint8)
    for copy in (gather, scatter):
        with pytest.raises(ValueError, match=reason):
            copy([segment], Span(slot.data_ptr(), size), None, Work("cpu"))
    assert torch.equal(segment.field.memory, before) and (slot == POISON).all()
