"""Real engines of a model that keeps only a window of some layers: bytes and tokens, as for any other."""

from __future__ import annotations

import numpy as np
import pytest

from demo.vllm_rows import LATER
from tests.system.engines.engine_process import Rows
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.kinds import WINDOW, write_windowed
from tests.system.kept import kept

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


windows = kept(Fleet, write=write_windowed, start=("small", "large", "alone"))


@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, WINDOW + 127, 700])
def test_decodes_from_the_windows_that_another_engine_kept(windows: Fleet, length: int) -> None:
    tokens = prompt(length, seed=3 * length)
    answer, ours, theirs = windows.crossed("large", "small", tokens)
    assert answer.cached == length - 1, "the prompt did not travel, it was computed again"
    assert list(answer.tokens) == windows.alone(tokens, 12)
    assert_equal_where_kept(ours, theirs, length - 1)


def test_a_receiver_whose_block_is_larger_computes_by_itself(windows: Fleet) -> None:
    """It would keep whole blocks of which the sender has a part only."""
    tokens = prompt(300, seed=98)
    _, prefilled = windows.prefill("small", tokens)
    answer = windows["large"].run(windows.name("refused"), tokens, 12, prefilled.params)
    assert answer.cached == 0 and list(answer.tokens) == windows.alone(tokens, 12)
    said = "block_tokens: sender 32, receiver 128 (layer 0 k"
    assert any(said in agent.text() for agent in windows.agents["large"]), "refused, but not for this"


def test_only_the_window_of_its_layers_travels(windows: Fleet) -> None:
    tokens = prompt(1000, seed=99)
    before = windows.moved_bytes("small")
    answer, ours, theirs = windows.crossed("large", "small", tokens)
    moved = windows.moved_bytes("small") - before
    fetched = len(tokens) - 1
    assert answer.cached == fetched
    row = 2 * 4 * 64  # parts, heads, bytes
    assert moved == 2 * fetched * row + 2 * (fetched - first_kept(fetched)) * row
    assert_equal_where_kept(ours, theirs, fetched)


@pytest.mark.parametrize("name", ["small", "large"])
def test_its_pool_is_known_before_it_starts(windows: Fleet, name: str) -> None:
    windows.assert_known_beforehand(name)


def first_kept(fetched: int) -> int:
    """Where a window begins that sees token `fetched`: on a border of the receiver's blocks."""
    return max(0, fetched + 1 - WINDOW) // 32 * 32


def assert_equal_where_kept(ours: Rows, theirs: Rows, fetched: int) -> None:
    for (layer, part), rows in theirs.rows.items():
        first = 0 if layer % 2 else first_kept(fetched + LATER)  # as they are dumped
        assert rows[first:].any(axis=(1, 2)).all(), f"layer {layer} {part}"
        assert np.array_equal(ours.rows[layer, part][first:], rows[first:]), f"layer {layer} {part}"
