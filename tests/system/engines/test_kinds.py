"""Windows and drafts between engines of other ranks and blocks: prefixes on both sides, aborts, killed agents.

In fp32: TP changes the order of sums, which would show in bf16. Index keys have such tests beside their others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from demo.vllm_rows import LATER
from tests.system.engines.drafts import Drafting
from tests.system.engines.engine_process import Rows
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.halfway import Interrupted, Pairs
from tests.system.engines.kinds import WINDOW, write_windowed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PAIRS = (("large", "two"), ("two", "small"))  # TP 1 to 2 and blocks of 128 to 32 tokens, TP 2 to 1
KINDS = ["windows", "drafts"]


class Kind:
    def __init__(self, fleet: Fleet, windowed: tuple[int, ...]) -> None:
        self.fleet = fleet
        self._windowed = windowed  # layers that keep a window

    def check(self, ours: Rows, theirs: Rows) -> None:
        """What was computed is what came, byte for byte, in all rows that the next tokens see."""
        assert ours.rows.keys() == theirs.rows.keys()
        for (layer, part), rows in theirs.rows.items():
            first = max(0, len(rows) + 1 + LATER - WINDOW) if layer in self._windowed else 0
            assert rows[first:].any(axis=(1, 2)).all(), f"layer {layer} {part}: a row of zeros"
            assert np.array_equal(ours.rows[layer, part][first:], rows[first:]), f"layer {layer} {part}"

    def crosses(self, sender: str, receiver: str, tokens: list[int]) -> None:
        answer, ours, theirs = self.fleet.crossed(sender, receiver, tokens)
        assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert list(answer.tokens) == self.fleet.alone(tokens, 12)
        self.check(ours, theirs)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        if request.param == "drafts":
            yield Kind(Drafting(folder, stack, "eagle", dtype="float32"), ())
        else:
            start = ("small", "large", "two", "alone")
            yield Kind(Fleet(folder, stack, dtype="float32", write=write_windowed, start=start), (0, 2))


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_every_rank_gets_its_rows(kind: Kind, sender: str, receiver: str) -> None:
    for length in (2, WINDOW + 1, 300):
        kind.crosses(sender, receiver, prompt(length, seed=length + 10 * (sender == "two")))


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_prefixes_on_both_sides_are_neither_computed_nor_fetched_again(kind: Kind, sender: str, receiver: str) -> None:
    head = prompt(400, seed=60 + (sender == "two"))
    kind.fleet.start(sender, receiver)
    before = kind.fleet.moved_bytes(receiver)
    kind.crosses(sender, receiver, head)
    first = kind.fleet.moved_bytes(receiver) - before
    kind.crosses(sender, receiver, head[:390] + prompt(30, seed=62 + (sender == "two")))
    assert kind.fleet.moved_bytes(receiver) - before - first < first / 2


class TestInterrupted(Interrupted):
    @pytest.fixture
    def pairs(self, kind: Kind) -> Pairs:
        return Pairs(kind.fleet, *PAIRS, kind.check, is_like_alone=True)
