"""The reference for converted rows must be right, and must find what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from testing.oracle import Held, Shape, Table, build, mla, put_rows, rows, rows_at, tables_of
from testing.slow_rows import twin_of, wrong

TOKENS = range(3, 40)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
SHAPE = Shape(key_width=32, value_width=32, kv_heads=2)
RANKS = (0, 0, 0)

Convert = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def converted(sender: Shape, receiver: Shape, convert: Convert) -> tuple[Held, Held, Table]:
    """A receiver with every row of a bf16 sender written by `convert`, by torch; and the receiver before."""
    held = build(receiver)
    before, table = held.copy(), tables_of(held.pool, 40)
    planes = {(plane.layer, plane.part): plane for plane in held.pool.planes}
    for plane in twin_of(sender, receiver, RANKS).planes:
        token, places = rows_at(held.pool, 0, table, TOKENS)
        values = torch.from_numpy(rows(plane, token, is_tame=True)).view(torch.bfloat16).float()
        for suffix, what in convert(values).items():
            stored = what.contiguous().view(torch.uint8).numpy()
            put_rows(held, planes[plane.layer, plane.part + suffix], places, stored)
    return held, before, table


def found_wrong(sender: Shape, receiver: Shape, case: tuple[Held, Held, Table]) -> str:
    return wrong(twin_of(sender, receiver, RANKS), *case, TOKENS, range(0))


def by_rows(values: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = values.abs().amax(-1, keepdim=True) / 448
    return {"": (values / scale).to(torch.float8_e4m3fn), "_scale": scale}


def in_one_row(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """As vLLM lays out fp8_ds_mla."""
    tiles = values[..., :512].unflatten(-1, (4, 128))
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    quantized = (tiles / scale).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    rope = values[..., 512:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return {"": torch.cat((quantized, scale[..., 0].contiguous().view(torch.uint8), rope), -1)}


CASES: dict[str, tuple[Shape, Shape, Convert]] = {
    "fp16": (SHAPE, replace(SHAPE, codec="fp16"), lambda values: {"": values.half()}),
    "fp8": (
        SHAPE,
        replace(SHAPE, codec="fp8_e4m3", scales={"k": (0.5,), "v": (0.5,)}),
        lambda values: {"": (values / 0.5).to(torch.float8_e4m3fn)},
    ),
    "row scales": (SHAPE, replace(SHAPE, codec="fp8_row_scale", layout="packed_hnd"), by_rows),
    "ds_mla": (mla(), mla("fp8_ds_mla"), in_one_row),
}


@pytest.mark.parametrize("name", CASES)
def test_one_number_of_a_neighbour_is_found(name: str) -> None:
    sender, receiver, convert = CASES[name]
    assert found_wrong(sender, receiver, converted(sender, receiver, convert)) == ""

    def spoiled(values: torch.Tensor) -> dict[str, torch.Tensor]:
        values = values.clone()
        values[7, -1, 5] = values[7, -1, 9]
        return convert(values)

    assert "element 5: " in found_wrong(sender, receiver, converted(sender, receiver, spoiled))
