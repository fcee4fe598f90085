"""Real engines of a model that keeps only a window of some layers: bytes and tokens, as for any other."""

from __future__ import annotations

import numpy as np
import pytest

from demo.vllm_rows import LATER
from testing.kept import kept
from tests.system.engines.engine_process import Rows
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.kinds import CHUNK, WINDOW, write_gemma4, write_llama4, write_windowed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


windows = kept(Fleet, write=write_windowed, start=("small", "large", "private", "alone"))
# vLLM chooses a backend for Gemma 4 itself, which is for GPUs.
gemma = kept(
    Fleet,
    write=write_gemma4,
    dtype="float32",
    more={"attention_backend": "CPU_ATTN"},
    start=("small", "large", "private", "alone"),
)
chunks = kept(Fleet, write=write_llama4, dtype="float32", start=("small", "large", "alone"))


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


@pytest.mark.parametrize("length", [2, WINDOW + 1, 300, 700])
def test_a_receiver_whose_block_is_larger_takes_windows_if_nobody_else_gets_its_blocks(
    windows: Fleet, length: int
) -> None:
    """The window begins inside its first block, of which the sender has a part only."""
    assert_takes_windows(windows, "small", "private", prompt(length, seed=600 + length), seen_of(length))


@pytest.mark.parametrize("length", [2, WINDOW + 1, 300, 700])
@pytest.mark.parametrize(("sender", "receiver"), [("large", "small"), ("small", "private")])
def test_windows_in_blocks_of_another_size_than_those_of_full_layers(
    gemma: Fleet, sender: str, receiver: str, length: int
) -> None:
    """As Gemma 4 has them, with heads of another number and width. Blocks of windows are 32 and 128 tokens."""
    seed = 800 + length + 10 * (sender == "large") + 20 * (receiver == "private")
    assert_takes_windows(gemma, sender, receiver, prompt(length, seed=seed), seen_of(length))


@pytest.mark.parametrize("length", [2, 100, 200, 700])
@pytest.mark.parametrize(("sender", "receiver"), [("large", "small"), ("small", "large")])
def test_chunks_of_tokens_that_see_each_other_alone(chunks: Fleet, sender: str, receiver: str, length: int) -> None:
    """As Llama 4 has them. A chunk begins where a block does, so blocks may be larger on either side."""
    tokens = prompt(length, seed=900 + length + 10 * (sender == "large"))
    assert_takes_windows(chunks, sender, receiver, tokens, (length - 1 + LATER) // CHUNK * CHUNK)


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


@pytest.mark.parametrize("name", ["small", "large", "private"])
def test_its_pool_is_known_before_it_starts(windows: Fleet, gemma: Fleet, chunks: Fleet, name: str) -> None:
    for fleet in (windows, gemma, chunks):
        fleet.assert_known_beforehand(name)


def assert_takes_windows(fleet: Fleet, sender: str, receiver: str, tokens: list[int], seen: int) -> None:
    """Rows that the decoded tokens see are the sender's, and the tokens those of one engine alone."""
    answer, ours, theirs = fleet.crossed(sender, receiver, tokens)
    assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
    assert list(answer.tokens) == fleet.alone(tokens, 12)
    for (layer, part), rows in theirs.rows.items():
        first = 0 if layer % 2 else seen
        assert rows[first:].any(axis=(1, 2)).all(), f"layer {layer} {part}"
        assert np.array_equal(ours.rows[layer, part][first:], rows[first:]), f"layer {layer} {part}"


def seen_of(length: int) -> int:
    """The first token that a window sees of all that are decoded."""
    return max(0, length + LATER - WINDOW)


def first_kept(fetched: int) -> int:
    """Where a window begins that sees token `fetched`: on a border of the receiver's blocks."""
    return max(0, fetched + 1 - WINDOW) // 32 * 32


def assert_equal_where_kept(ours: Rows, theirs: Rows, fetched: int) -> None:
    for (layer, part), rows in theirs.rows.items():
        first = 0 if layer % 2 else first_kept(fetched + LATER)  # as they are dumped
        assert rows[first:].any(axis=(1, 2)).all(), f"layer {layer} {part}"
        assert np.array_equal(ours.rows[layer, part][first:], rows[first:]), f"layer {layer} {part}"
