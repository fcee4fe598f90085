"""The oracle must be right before anything is measured by it."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.geometry.compat import check_pool
from tests.support.oracle import (
    LAYOUTS,
    POISON,
    Shape,
    block_table,
    build,
    build_all,
    describe,
    fill,
    first_seen,
    mismatch,
    mla,
    places_of,
    read,
    rows,
    rows_at,
    table_of,
    tables_of,
    take_rows,
    transfer,
    value,
)

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_two_elements_share_a_byte(layout: str) -> None:
    held = build(Shape(layout=layout, key_width=32, value_width=16, pad_bytes=64, blocks=2))
    table = (0, 1)
    fill(held, table, range(32))
    for plane in held.pool.planes:
        assert np.array_equal(take_rows(held, plane, places_of(table, range(32), 16)), rows(plane, range(32)))


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


def test_an_empty_transfer_writes_nothing() -> None:
    assert transfer([build(SHAPE)], [build(SHAPE)], range(4, 4)) == ""


@pytest.mark.parametrize(("cp_size", "interleave"), [(2, 1), (3, 16), (8, 3), (3, 64)])
def test_every_token_is_on_one_rank_of_a_context_parallel_engine(cp_size: int, interleave: int) -> None:
    ranks = [describe(Shape(cp_size=cp_size, cp_interleave=interleave), cp_rank=rank) for rank in range(cp_size)]
    assert [pool.shard.tp_rank for pool in ranks] == list(range(cp_size))
    found = []
    for pool in ranks:
        tokens, places = rows_at(pool, 0, tables_of(pool, 100), range(5, 100))
        assert len(set(places.tolist())) == len(tokens)
        found += tokens.tolist()
        table = tables_of(pool, 100)[0]
        local = [token for token in range(100) if token // interleave % cp_size == pool.shard.cp_rank]
        for token, place in zip(tokens, places, strict=True):
            assert place == table[local.index(token) // 16] * 16 + local.index(token) % 16
    assert sorted(found) == list(range(5, 100))


@pytest.mark.parametrize(
    ("kind", "end", "first"),
    [("full", 40, 0), ("sliding", 40, 28), ("sliding", 9, 0), ("sliding", 13, 4), ("chunked", 39, 28)],
)
def test_a_window_keeps_what_the_next_query_sees(kind: str, end: int, first: int) -> None:
    pool = describe(Shape(kinds=(kind,), window=10, block_tokens=4))
    assert first_seen(pool.groups[0], end) == first
    tokens, _ = rows_at(pool, 0, tables_of(pool, end), range(end))
    assert tokens.tolist() == list(range(first, end))


def test_a_state_is_one_row_of_the_last_block() -> None:
    (held,) = build_all(Shape(kinds=("full", "state"), layers=2))
    table = tables_of(held.pool, 33)
    assert [plane.part for plane in held.pool.planes] == ["k", "v", "conv", "ssm"]
    tokens, places = rows_at(held.pool, 1, table, range(33))
    assert (tokens.tolist(), places.tolist()) == ([32], [table[1][2]])
    sent = block_table(held.pool, table, 0, 33)[1]
    assert (sent.first_block, sent.ids.tolist()) == (0, list(table[1]))


@pytest.mark.parametrize(
    "codec", ["fp8_row_scale", "int8_row_scale", "int4_row_scale", "mxfp8_e4m3", "nvfp4", "fp8_e4m3"]
)
@pytest.mark.parametrize("layout", ["nhd", "packed_hnd", "cross_layer", "cpu_vec"])
def test_scales_lie_beside_the_rows_and_on_no_other_byte(layout: str, codec: str) -> None:
    if layout == "cpu_vec" and codec.endswith("_row_scale"):
        return  # no engine has it, and no plane could say it: the token axes are not the same
    (held,) = build_all(Shape(layout=layout, codec=codec, key_width=32, value_width=64, blocks=2))
    fill(held, (1, 0), range(32))
    for plane in held.pool.planes:
        assert np.array_equal(take_rows(held, plane, places_of((1, 0), range(32), 16)), rows(plane, range(32)))
        if plane.codec.name == "fp32":
            strides = [plane.offset, plane.block_stride, plane.head_stride, *(s.stride for s in plane.token_axis)]
            assert all(stride % 4 == 0 for stride in strides)


@pytest.mark.parametrize(
    ("codec", "row_bytes"), [("bf16", [1152]), ("fp8_e4m3", [576]), ("fp8_ds_mla", [656]), ("fp8_ds_v4", [576, 8])]
)
def test_a_latent_is_whole_on_every_rank(codec: str, row_bytes: list[int]) -> None:
    for held in build_all(mla(codec, tp_size=2, layers=1)):
        assert [plane.codec.row_bytes for plane in held.pool.planes] == row_bytes
        assert [(plane.first_head, plane.heads, plane.total_heads) for plane in held.pool.planes] == [
            (0, 1, 1) for _ in row_bytes
        ]
