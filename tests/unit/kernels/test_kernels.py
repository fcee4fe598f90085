"""The kernels against their twins on the CPU, in a process where Triton interprets them; and tests without kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from kvbridge_kernels.codecs_ref import Cast, Number
from kvbridge_kernels.digest_ref import K1, K2, sum64
from kvbridge_kernels.field import Axis
from kvbridge_kernels.kernel import Kernel
from kvbridge_kernels.launch import Launch
from kvbridge_kernels.scales import _is_inverse_enough
from kvbridge_kernels.segment import Places, Segment, gaps
from kvbridge_kernels.segment_layout import layout_of, place_offsets
from kvbridge_kernels.tables import Work
from kvbridge_kernels.tiling import LEAST_GB_S, Tiling, tile_of, tiles_at_once

from tests.unit.kernels.chunks import (
    GUARD,
    POISON,
    Shape,
    chunk_of,
    field_of,
    gather,
    on,
    rows_by_head,
    scatter,
    slot_on,
)
from tests.unit.kernels.test_moves import addresses, at

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
INTERPRETED_S = 1800.0  # half a minute alone; beside fifteen others that compute, more than 280 s


@pytest.mark.timeout(INTERPRETED_S + 20)
@pytest.mark.parametrize(
    ("scripts", "interprets", "least"),
    [("interpreted.py interpreted_pull.py", "1", 80), ("compiled.py", "0", 15)],
)
def test_kernels_are_interpreted_as_their_twins_and_compiled(scripts: str, interprets: str, least: int) -> None:
    pytest.importorskip("triton")
    run_with_triton(scripts, least, TRITON_INTERPRET=interprets)


@pytest.mark.timeout(INTERPRETED_S + 20)
def test_the_oldest_triton_compiles_them() -> None:
    oldest = ROOT / ".triton"
    if not (oldest / ".ready").exists():
        pytest.skip("make .triton/.ready")
    run_with_triton("compiled.py", 15, TRITON_INTERPRET="0", PYTHONPATH=str(oldest))


def run_with_triton(scripts: str, least: int, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "--tb=short", *(str(HERE / script) for script in scripts.split())]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::RuntimeWarning", **environment}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=INTERPRETED_S)
    passed = re.search(r"(\d+) passed", found.stdout)
    assert found.returncode == 0 and passed and int(passed[1]) >= least, found.stdout[-4000:] + found.stderr[-1000:]


def mixed(word: int, position: int) -> int:
    """One term of sum64, by its definition."""
    x = word * ((2 * position + 1) * K1) % (1 << 64)
    x ^= x >> 32
    x = x * K2 % (1 << 64)
    return x ^ x >> 29


def bytes_segment(row: int, rows: int, slot_offset: int = 0) -> Segment:
    field = rows_by_head(torch.zeros(row * rows, dtype=torch.uint8), rows, 1, row, 1)
    return Segment(field, Places(torch.arange(rows)), slot_offset, 0)


@pytest.mark.parametrize(("row", "word"), [(1, 1), (6, 2), (12, 4), (8, 8), (40, 8)])
@pytest.mark.parametrize("slot_offset", [0, 16, 3])
def test_digest_is_the_sum_of_its_definition(row: int, word: int, slot_offset: int) -> None:
    slot = torch.from_numpy(np.random.default_rng(row).integers(0, 256, 5 * row + slot_offset, dtype=np.uint8))
    content = slot.numpy().tobytes()
    wanted = sum(
        mixed(int.from_bytes(content[i : i + word], "little"), i) for i in range(slot_offset, len(content), word)
    )
    assert sum64([bytes_segment(row, 5, slot_offset)], slot) % (1 << 64) == wanted % (1 << 64)


def test_digest_sees_every_bit_every_swap_and_flips_of_top_bits() -> None:
    segment = bytes_segment(8, 32)
    slot = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 256, dtype=np.uint8))
    seen = {sum64([segment], slot)}
    for bit in range(8 * 256):
        other = slot.clone()
        other[bit // 8] ^= 1 << bit % 8
        seen.add(sum64([segment], other))
    assert len(seen) == 1 + 8 * 256
    words = slot.view(torch.int64)
    for first in range(32):
        for second in range(first):
            swapped, flipped = words.clone(), words.clone()
            swapped[[first, second]] = words[[second, first]]
            flipped[[first, second]] ^= -(1 << 63)
            seen |= {sum64([segment], swapped.view(torch.uint8)), sum64([segment], flipped.view(torch.uint8))}
    assert len(seen) == 1 + 8 * 256 + 2 * 31 * 16


def test_digest_of_zeros_is_zero_and_order_of_segments_is_all_one() -> None:
    segments, size = chunk_of([Shape("nhd"), Shape("hnd", width=80), Shape("folded")], 3, 4)
    slot = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    assert sum64(segments, slot) == sum64(segments[::-1], slot) != 0
    assert sum64(segments, torch.zeros_like(slot)) == 0


def test_twins_fill_a_chunk_and_put_it_back() -> None:
    segments, size = chunk_of([Shape("nhd", planes=2), Shape("columns"), Shape("hnd", shift=1)], 3, 7)
    whole, span = slot_on("cpu", size)
    sums = torch.zeros(1, dtype=torch.int64)
    gather(segments, span, sums, Work("cpu"))
    slot = whole[GUARD:-GUARD]
    assert (whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()
    for segment in segments:
        where = addresses(segment.field, segment.places.index.tolist())
        for plane, row in enumerate(where):
            start = segment.slot_offset + plane * segment.slot_pitch
            found = slot[start : start + segment.plane_bytes].numpy()
            assert np.array_equal(found, segment.field.memory.numpy()[row])
    for start, end in gaps(segments, size):
        assert not slot[start:end].any()
    assert int(sums) == sum64(segments, slot)
    emptied = on(segments, "cpu")
    memory = emptied[0].field.memory
    for segment in emptied:
        memory[torch.from_numpy(addresses(segment.field, segment.places.index.tolist()).reshape(-1))] = POISON
    scatter(emptied, span, sums.zero_(), Work("cpu"))
    assert torch.equal(memory, segments[0].field.memory) and int(sums) == sum64(segments, slot)


def test_twins_refuse_scales_that_are_not_the_fields() -> None:
    segments, size = chunk_of([Shape("nhd", heads=3)], 3, 4, Cast(Number("bf16"), Number("fp8_e4m3")))
    _, span = slot_on("cpu", size)
    for cast, reason in [
        (Cast(Number("bf16"), Number("fp8_e4m3", torch.ones(1, 2))), r"scales must be fp32 \[1 or 1, 3 or 1\]"),
        (Cast(Number("fp32"), Number("fp8_e4m3")), "fp32 takes 4 bytes, the field's elements 2"),
    ]:
        segment = Segment(segments[0].field, segments[0].places, 0, 0, cast)
        with pytest.raises(ValueError, match=reason):
            gather([segment], span, None, Work("cpu"))


@pytest.mark.parametrize("layout", ["nhd", "hnd", "columns", "tiled", "folded"])
@pytest.mark.parametrize("block_tokens", [2, 6, 16])
def test_place_and_column_offsets_are_those_of_the_field(layout: str, block_tokens: int) -> None:
    field = field_of(Shape(layout, block_tokens=block_tokens, skip=8), 5, torch.empty(0, dtype=torch.uint8), 0)
    segment_layout = layout_of(field, None)
    places = np.arange(field.places)
    found = np.empty_like(places)
    place_offsets(places, *segment_layout.places_key, found)
    wanted = [p // field.block_tokens * field.blocks.stride + at(field.tokens, p % field.block_tokens) for p in places]
    assert found.tolist() == wanted
    elements = field.row_bytes // field.element_bytes
    columns = segment_layout.columns(field.element_bytes, 1).tolist()
    assert columns == [at(field.elements, element) for element in range(elements)]


@pytest.mark.proves("G25")
def test_a_block_of_many_tokens_costs_no_more_than_the_places_in_it() -> None:
    tokens, places = (Axis(1 << 12, 1 << 20), Axis(1 << 12, 16)), np.array([0, 5, (1 << 24) - 1, 1 << 24])
    found = np.empty_like(places)
    tracemalloc.start()
    place_offsets(places, 1 << 40, tokens, found)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()
    last = (1 << 12) - 1
    assert found.tolist() == [0, 5 * 16, last * (1 << 20) + last * 16, 1 << 40]


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_tiles_are_full_powers_of_two(layout: str) -> None:
    for width, heads in product((1, 5, 16, 20, 24, 32, 40, 144, 8192, 12288), (1, 2, 3, 6, 8, 12, 128)):
        segment_layout = layout_of(field_of(Shape(layout, heads, width), 5, torch.empty(0, dtype=torch.uint8), 0), None)
        places, head_tile, columns = tile_of(segment_layout, width, 8, 2, Tiling(16 << 10, 4, 8))
        assert places * head_tile * columns == 2048 and heads % head_tile == 0, (width, heads)
        assert all(part & (part - 1) == 0 for part in (places, head_tile, columns)), (width, heads)
        assert -(-width // columns) * columns < width * 1.5 + 16, (width, heads)
        assert head_tile == 1 or layout == "nhd", (width, heads)


@pytest.mark.proves("G20")
@pytest.mark.parametrize("tiles", [1, 2, 7, 64, 65, 1000, 12345])
@pytest.mark.parametrize("at_once", [1, 3, 64, 20000])
def test_launches_share_all_tiles_and_none_has_more_than_it_may(tiles: int, at_once: int) -> None:
    kernel = Kernel({}, 4, 1, at_once, 0, (1, 1, 1), ())
    parts = list(Launch(kernel, tiles, ()).parts())
    assert [tile for first, end in parts for tile in range(first, end)] == list(range(tiles))
    assert max(end - first for first, end in parts) <= at_once and len(parts) == -(-tiles // at_once)


@pytest.mark.parametrize("kind", LEAST_GB_S)
def test_a_launch_takes_as_many_bytes_as_it_has_time_for(kind: str) -> None:
    for tile_bytes, align in ((2 << 10, 16), (8 << 10, 8), (4 << 10, 2)):
        seconds = tiles_at_once(kind, tile_bytes, align, 250.0) * tile_bytes / (LEAST_GB_S[kind] * 1e9)
        assert 0.9 * 250e-6 < seconds * 8 / min(8, align) <= 250e-6
    assert tiles_at_once(kind, 1 << 30, 16, 250.0) == 1


def test_an_inverse_serves_only_where_every_number_comes_out_the_same() -> None:
    """Scales that put a quotient next to a tie, where the product with the inverse rounds the other way."""
    ties = np.arange(17, 32, 2, dtype=np.float32) / 16
    values = 1 + np.arange(128, dtype=np.float32) / 128
    scales = np.unique((values[:, None] / ties[None, :]).reshape(-1))
    verdicts = {False: 0, True: 0}
    for scale in scales.tolist():
        one, table = np.ones((1, 1), np.float32), np.full((1, 1), scale, np.float32)
        quotient, product = (
            torch.from_numpy(found).to(torch.float8_e4m3fn).float()
            for found in (values / table[0], values * (np.float32(1) / table[0]))
        )
        verdict = _is_inverse_enough("bf16", "fp8_e4m3", one, table)
        assert not verdict or torch.equal(quotient, product)
        verdicts[verdict] += 1
    assert verdicts[False] > 10 and verdicts[True] > 10
