"""The oracle must be right before anything is measured by it."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.geometry.compat import check_pool
from testing.oracle import LAYOUTS, POISON, Shape, build, fill, mismatch, places_of, read, rows, table_of, value

SHAPE = Shape(key_width=32, value_width=16, pad_bytes=64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_where_the_definition_of_a_plane_says(layout: str) -> None:
    held = build(Shape(layout=layout, key_width=32, value_width=16, pad_bytes=64, tp_size=2), tp_rank=1)
    assert check_pool(held.pool) == ()
    table = table_of(held.pool, 40)
    fill(held, table, range(3, 40))
    for plane in held.pool.planes:
        for token in (3, 15, 16, 17, 39):
            for head in (2, 3):
                expected = b"".join(
                    int(value(plane.layer, plane.part, head, token, element) & np.uint64(0xFFFF)).to_bytes(2, "little")
                    for element in range(plane.codec.width)
                )
                assert read(held, table, plane.layer, plane.part, head, token) == expected
    poison = bytes([POISON]) * 64
    assert read(held, table, 0, "k", 2, 2) == poison


def test_the_tiled_cache_of_an_amx_machine_is_as_documented() -> None:
    width, tokens = 32, 32
    held = build(Shape(layout="cpu_amx", layers=1, kv_heads=1, key_width=width, value_width=width, block_tokens=tokens))
    key, kept = held.pool.planes
    fill(held, (0,), range(tokens))
    memory = held.memory[0].view(np.uint16)
    # K: groups of 16 tokens; in a group, element pairs outermost, then tokens, then the two of a pair.
    for token, element in ((0, 0), (0, 1), (1, 0), (17, 5), (31, 31)):
        where = (token // 16) * 16 * width + (element // 2) * 32 + (token % 16) * 2 + element % 2
        assert memory[where] == value(0, "k", 0, token, element) & np.uint64(0xFFFF)
    # V: groups of 16 elements; in a group, token pairs outermost, then elements, then the two of a pair.
    for token, element in ((0, 0), (0, 1), (1, 0), (17, 5), (31, 31)):
        where = (element // 16) * 16 * tokens + (token // 2) * 32 + (element % 16) * 2 + token % 2
        assert memory[tokens * width + where] == value(0, "v", 0, token, element) & np.uint64(0xFFFF)
    assert kept.offset - key.offset == 2 * tokens * width


def test_a_wrong_row_is_named_with_its_origin() -> None:
    held = build(SHAPE)
    before, table = held.copy(), table_of(held.pool, 20)
    fill(held, table, range(20))
    assert mismatch(held, before, table, range(20)) == ""
    plane = held.pool.planes[1]
    place = places_of(table, range(7, 8), 16)[0]
    start = plane.offset + place // 16 * plane.block_stride + place % 16 * plane.token_axis[0].stride
    row = held.memory[plane.region][start : start + plane.codec.row_bytes]
    row[:] = rows(plane, range(9, 10))[0, 2]
    assert mismatch(held, before, table, range(20)) == "layer 0 v head 0 token 7 holds layer 0 v head 2 token 9"


def test_a_byte_written_elsewhere_is_found() -> None:
    held = build(SHAPE)
    before, table = held.copy(), table_of(held.pool, 20)
    fill(held, table, range(20))
    held.memory[2][5] = 0
    assert mismatch(held, before, table, range(20)) == "region 2 byte 5: wrote 0x0 outside of the wanted rows"


def test_rows_that_were_not_moved_are_found() -> None:
    held = build(SHAPE)
    assert "holds poison" in mismatch(held, held, table_of(held.pool, 20), range(20))
