"""Real engines of a model that keeps only a window of some layers: bytes and tokens, as for any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from .engine_loop import LATER
from .fleet import Fleet, assert_same_as_alone, prompt
from .kinds import WINDOW, write_windowed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("windows"), stack, write=write_windowed)
        fleet.start("small", "large", "alone")
        yield fleet


@pytest.mark.parametrize(("source", "sink"), [("small", "large"), ("large", "small")], ids=["32 to 128", "128 to 32"])
@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, 700])
def test_decodes_from_the_windows_that_another_engine_kept(windows: Fleet, source: str, sink: str, length: int) -> None:
    assert_same_as_alone(windows, source, sink, prompt(length, seed=3 * length + (source == "large")))


def test_only_the_window_of_its_layers_travels(windows: Fleet) -> None:
    tokens = prompt(1000, seed=99)
    before = _wire_bytes(windows)
    answer, ours, theirs = windows.crossed("small", "large", tokens)
    moved = _wire_bytes(windows) - before
    assert answer.cached == len(tokens) - 1
    row = 2 * 4 * 64  # parts, heads, bytes
    assert moved == 2 * (len(tokens) - 1) * row + 2 * (WINDOW - 1) * row
    for (layer, part), rows in ours.rows.items():
        kept = np.flatnonzero(rows.any(axis=(0, 2)))
        assert kept[0] == (0 if layer % 2 else len(tokens) + LATER - WINDOW), f"layer {layer} {part}"
        assert np.array_equal(rows, theirs.rows[layer, part])


def _wire_bytes(fleet: Fleet) -> float:
    return sum(a.status.counters.get("kvbridge_wire_bytes_total{role=sink}", 0.0) for a in fleet.agents["large"])
