"""Real SGLang servers of models whose layers with a window have memory of their own (`SWAKVPool`).

The oracle is SGLang's own mapping of slots, on both sides: the rows that a token of the window has on the prefill side
are those it has on the decode side. Before the window the decode side has no slots.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from testing.kept import kept
from tests.system.engines.kinds import SEEN, write_alike_halves, write_halves
from tests.system.sglang.fleet import Answer, Fleet, assert_idle, prompt
from tests.system.sglang.halfway import Interrupted, Pair
from tests.system.sglang.rows import SavedRows, assert_carried
from tests.system.sglang.server import ServerConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

# SGLang has no prefix cache on the decode side for a model whose halves differ in their heads. It takes running
# requests out every few steps, and puts them back.
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
PLAIN = ServerConfig("decode", page_size=64, keeps_prefixes=False)
OTHERS = {
    "d64-plain": replace(PLAIN, environment=RETRACTS),
    "d64-two-plain": replace(PLAIN, tensor_parallel_size=2),
}
LAYERS = (1, 2)  # with a window

fleet = kept(Fleet, write=write_halves, others=OTHERS, start=("p16", "d64-plain", "alone"))
alike = kept(Fleet, write=write_alike_halves, start=("p16", "d16", "alone"))


@dataclass(frozen=True)
class WindowPair(Pair):
    """`before`: how many tokens before the current one a window has."""

    before: int

    def crossed(self, tokens: list[int]) -> Answer:
        """The rows of full layers come, those of windows from the window on; the tokens are one server's alone."""
        ((room, answer),) = self.fleet.ask(self.sender, self.receiver, [tokens])
        self.check(room, tokens, answer)
        return answer

    def check(self, room: int, tokens: list[int], answer: Answer) -> None:
        given, taken = self.fleet.rows(self.sender, self.receiver, room)
        assert_carried(chosen(given, False), chosen(taken, False))
        first = max(0, len(tokens) - self.before)
        assert_carried(chosen(given, True, first), chosen(taken, True, first))
        config, ours = self.fleet.configs[self.receiver], chosen(given, True).rows
        early = slice(max(0, first - config.page_size - max(config.page_size, self.before)))
        for key, rows in chosen(taken, True).rows.items():
            held = rows[early].any(axis=(1, 2))
            assert config.keeps_prefixes or not held.any(), "rows before the window"
            both = held & ours[key][early].any(axis=(1, 2))  # those of earlier prompts, as far as each side has them
            assert np.array_equal(rows[early][both], ours[key][early][both])
        self.fleet.assert_same_as_alone(tokens, answer)


def chosen(rows: SavedRows, have_window: bool, first: int = 0) -> SavedRows:
    """The rows of some layers, from a token on."""
    return SavedRows(
        {key: each[first:] for key, each in rows.rows.items() if (key[0] in LAYERS) == have_window}, rows.codec
    )


@pytest.fixture
def pair(fleet: Fleet) -> WindowPair:
    return WindowPair(fleet, "p16", "d64-plain", SEEN)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 79, 80, 81, 96, 300, 304, 319])
def test_a_window_is_carried(pair: WindowPair, length: int) -> None:
    pair.crossed(prompt(length, seed=length))


@pytest.mark.parametrize(("sender", "receiver"), [("p16", "d64-two-plain"), ("p16-two", "d64-plain")])
def test_every_rank_gets_the_windows_of_its_heads(fleet: Fleet, sender: str, receiver: str) -> None:
    """A half of them, in full layers one of two. Rows of windows have other heads than those of full layers."""
    pair = WindowPair(fleet, sender, receiver, SEEN)
    for length in (1, 17, 81, 300, 513):
        pair.crossed(prompt(length, seed=4000 + length + (sender == "p16")))
    assert_idle(fleet, sender, receiver)


@pytest.mark.parametrize("length", [257, 512, 513, 1500])
def test_a_window_of_a_prompt_that_is_computed_in_chunks(pair: WindowPair, length: int) -> None:
    pair.crossed(prompt(length, seed=1000 + length))


def test_a_prefix_that_the_prefilling_side_has(pair: WindowPair) -> None:
    """Its own rows are offered where it has them; the window may lie in the prefix, behind it, or in both."""
    head = prompt(320, seed=2000)
    pair.crossed(head)
    for more in (1, 40, 200):
        answer = pair.crossed(head + prompt(more, seed=2000 + more))
        assert len(answer.tokens) > 1


def test_requests_that_are_taken_out_and_put_back(pair: WindowPair) -> None:
    prompts = [prompt(60 + 90 * i, seed=3000 + i) for i in range(6)]
    pair.fleet.start(pair.sender, pair.receiver)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: pair.fleet.ask(pair.sender, pair.receiver, [each])[0], prompts))
    for tokens, (room, answer) in zip(prompts, answers, strict=True):
        pair.check(room, tokens, answer)
    assert "Testing retraction. #retracted_reqs: 1" in pair.fleet[pair.receiver].text()
    assert_idle(pair.fleet, pair.sender, pair.receiver)


class TestInterrupted(Interrupted):
    read = "@2"  # the rows of full layers are there, those of windows are about to be written


def test_a_prefix_that_the_decoding_side_has(alike: Fleet) -> None:
    """Its full layers keep it, up to the window. The window comes anew.

    SGLang finds a prefix only where it has a whole window before its end: where an earlier prompt ended.
    """
    pair, tokens = WindowPair(alike, "p16", "d16", SEEN - 1), prompt(320, seed=5000)
    row = 2 * 2 * 4 * 128  # layers, parts, heads, bytes
    for more in (0, 200, 300):
        known, before = len(tokens), alike.moved_bytes("d16") if more else 0
        tokens = tokens + prompt(more, seed=5001 + more)
        pair.crossed(tokens)
        moved = (alike.moved_bytes("d16") - before) / row
        # Of full layers from the last page that was there on, and of windows.
        assert not more or 0 < moved <= more + 2 * 16 + SEEN + 2 * 16, f"rows of {moved} tokens: {known} were there"
    assert_idle(alike, "p16", "d16")
