"""Scales that lie in planes of their own follow their rows, whatever both sides disagree about."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from kvbridge_proto.peer import Take
from kvbridge_proto.pool import Codec, CodecName

from kvbridge.errors import PeerError
from kvbridge.geometry.fold import fold
from kvbridge.geometry.plan import Move, plan
from kvbridge.geometry.strip import pair, split_heads
from kvbridge.geometry.wire import PLAIN, wire_codec
from tests.geometry.scaled import kept_as, poisoned, rows_at, scaled_pool, table_of, without_rows
from tests.oracle import Held, Shape, run, split

SHAPE = Shape(codec="fp8_e4m3", layers=2, kv_heads=4, key_width=64, value_width=32, block_tokens=16, blocks=6)
OWN: list[CodecName] = ["fp8_row_scale", "int8_row_scale", "int4_row_scale", "mxfp8_e4m3", "nvfp4"]
TOKENS = range(3, 75)
SIDES = [  # (tp_size, block_tokens, is_paged) of the source and of the sink
    ((2, 16, False), (4, 16, False)),
    ((4, 16, True), (1, 48, False)),
    ((1, 16, True), (1, 16, True)),
    ((2, 8, False), (2, 16, True)),
]


def ranks(shape: Shape, name: CodecName, is_paged: bool) -> list[Held]:
    return [poisoned(scaled_pool(shape, name, rank, is_paged)) for rank in range(shape.tp_size)]


def mine(shape: Shape, rank: int) -> range:
    return split(shape.kv_heads, rank, shape.tp_size)


@pytest.mark.parametrize("tokens", [TOKENS, range(0, 64)])
@pytest.mark.parametrize(("ours", "theirs"), SIDES)
@pytest.mark.parametrize("name", OWN)
def test_scales_travel_with_their_heads(
    name: CodecName, ours: tuple[int, int, bool], theirs: tuple[int, int, bool], tokens: range
) -> None:
    """Bit for bit at every place that is wanted, poison everywhere else."""
    one = replace(SHAPE, tp_size=ours[0], block_tokens=ours[1], blocks=80 // ours[1] + 1)
    other = replace(SHAPE, tp_size=theirs[0], block_tokens=theirs[1], blocks=80 // theirs[1] + 1)
    sources, sinks = ranks(one, name, ours[2]), ranks(other, name, theirs[2])
    for seed, source in enumerate(sources):
        for region in source.memory:
            region[:] = np.random.default_rng(seed).integers(0, 256, region.size)
    table, placed = table_of(sources[0].pool, tokens, 1), table_of(sinks[0].pool, tokens, 2)
    for rank, sink in enumerate(sinks):
        before = sink.copy()
        wanted = mine(other, rank)
        for index, source in enumerate(sources):
            held = mine(one, index)
            heads = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
            if not heads:
                continue
            takes = [Take(0, 2, heads.start, heads.stop)]
            planned = plan(source.pool, sink.pool, takes, tokens.start, tokens.stop, 1 << 12)
            run(planned, source, table, sink, placed)
            for plane in sink.pool.planes:
                sent = rows_at(source, plane.layer, plane.part, table, tokens)
                found = rows_at(sink, plane.layer, plane.part, placed, tokens)
                here, there = heads.start - wanted.start, heads.start - held.start
                count = len(heads)
                assert np.array_equal(found[:, here : here + count], sent[:, there : there + count]), plane.part
        tail = range(tokens.start, len(placed) * theirs[1])  # a last block may travel whole
        for found, kept in zip(without_rows(sink, placed, tail), without_rows(before, placed, tail), strict=True):
            assert np.array_equal(found, kept)


def test_equal_rows_and_scales_side_by_side_are_one_run() -> None:
    pool = scaled_pool(SHAPE, "fp8_row_scale")
    strips = pair(pool, pool, [Take(0, 2, 0, 4)])
    assert [strip.sink.part for strip in strips] == ["k", "k_scale", "v", "v_scale"] * 2
    assert all(strip.source_scale is strip.sink_scale is None for strip in strips)
    folded = fold(strips, pool, pool, 0, 1 << 20)
    assert (
        sorted((strip.wire.row_bytes, strip.unit_tokens) for strip in folded)
        == [(16 * 144, 16)] * 2 + [(16 * 272, 16)] * 2
    )
    tokens = fold(strips, pool, pool, 0, 1 << 20, is_whole=False)
    assert sorted((strip.wire.row_bytes, strip.unit_tokens) for strip in tokens) == [(144, 1)] * 2 + [(272, 1)] * 2


NUMBERS: list[CodecName] = [*PLAIN, "fp8_row_scale", "int8_row_scale"]


def codec_of(name: CodecName, scales: tuple[float, ...] = ()) -> Codec:
    size = PLAIN.get(name, 1)
    return Codec(name=name, width=64, element_bytes=size, row_bytes=64 * size, scales=scales)


@pytest.mark.parametrize("sink", NUMBERS)
@pytest.mark.parametrize("source", NUMBERS)
def test_the_wire_has_no_scales_of_rows_unless_bytes_move_as_they_are(source: CodecName, sink: CodecName) -> None:
    scales = {"int8": (1.0, 2.0, 3.0, 4.0), "fp8_e4m3": (5.0, 6.0, 7.0, 8.0)}
    ours, theirs = codec_of(source, scales.get(source, ())), codec_of(sink, scales.get(sink, ()))
    wire = wire_codec(ours, 1, theirs, 2, 2)
    own = [name for name in (source, sink) if name.endswith("row_scale")]
    if source == sink or not own:
        narrow = theirs if theirs.row_bytes < ours.row_bytes else ours
        assert wire.name == narrow.name
    elif len(own) == 2:
        assert (wire.name, wire.row_bytes, wire.scales) == ("fp32", 256, ())
    else:
        plain, first = (theirs, 2) if own == [source] else (ours, 1)
        assert (wire.name, wire.row_bytes) == (plain.name, plain.row_bytes)
        assert wire.scales == plain.scales[first : first + 2]


def test_converted_rows_say_where_their_scales_are_kept() -> None:
    plain, kept = scaled_pool(SHAPE, "int8_row_scale"), scaled_pool(SHAPE, "fp8_row_scale")
    for strip in pair(plain, kept, [Take(0, 2, 1, 3)]):
        assert strip.source_scale is not None and strip.sink_scale is not None
        assert strip.source_scale.part == strip.sink_scale.part == f"{strip.sink.part}_scale"
        assert strip.wire.name == "fp32"
        assert [piece.sink_scale for piece in split_heads(strip, 1)] == [strip.sink_scale] * 2
    planned = plan(plain, kept, [Take(0, 2, 1, 3)], 0, 16, 1 << 20)
    assert all(strip.source_scale is not None for strip in planned.strips)
    moves = [Move(strip.sink, 0, 1, strip.sink.codec, 0, np.arange(3), 1, strip.sink_scale) for strip in planned.strips]
    assert not any(move.is_bitwise for move in moves)
    assert all(replace(move, scale=None).is_bitwise for move in moves)


@pytest.mark.parametrize("lacking", ["source", "sink"])
@pytest.mark.parametrize("other", ["fp8_row_scale", "int8_row_scale"])
def test_refuses_rows_whose_scales_a_side_lacks(lacking: str, other: CodecName) -> None:
    pools = {"source": scaled_pool(SHAPE, "fp8_row_scale"), "sink": scaled_pool(SHAPE, other)}
    whole = pools[lacking]
    pools[lacking] = msgspec.structs.replace(
        whole, planes=tuple(plane for plane in whole.planes if plane.part != "v_scale")
    )
    with pytest.raises(PeerError, match=f"the {lacking} holds heads .0, 0. of layer 0 v_scale"):
        pair(pools["source"], pools["sink"], [Take(0, 1, 0, 4)])


def test_scales_of_blocks_are_a_part_of_the_width() -> None:
    assert kept_as("mxfp8_e4m3", 64).scale.row_bytes == 2
    assert (kept_as("nvfp4", 64).row_bytes, kept_as("nvfp4", 64).scale.row_bytes) == (32, 4)
