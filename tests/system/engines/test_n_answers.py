"""Several answers to one prompt (`n`) between real engines: one transfer, and what one engine alone answers."""

from __future__ import annotations

import pytest

from testing.kept import kept
from tests.system.engines.fleet import Fleet, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ANSWERS, COUNT, LENGTH = 8, 12, 700

# In bf16, what a step computes of one token and of many differs by enough to turn ties.
fleet = kept(Fleet, dtype="float32", start=("small", "private", "alone"))


def answers(fleet: Fleet, engine: str, tokens: list[int], count: int) -> tuple[set[tuple[int, ...]], float]:
    """Those that differ, and how many bytes moved for all."""
    _, prefilled = fleet.prefill("small", tokens)
    name, before = f"cmpl-{fleet.name('n')}-0", fleet.moved_bytes(engine)
    fleet[engine].submit(name, tokens, COUNT, prefilled.params, answers=count)
    result = fleet[engine].result(name)
    assert len(result.others) == count - 1
    return {result.tokens, *result.others}, fleet.moved_bytes(engine) - before


@pytest.mark.parametrize("receiver", ["large", "private"])
def test_n_answers_cost_one_transfer(fleet: Fleet, receiver: str) -> None:
    """With a prefix cache and without. All are greedy, so each must be the answer of one engine alone."""
    fleet.start("small", receiver)  # what is offered is not held for as long as a start-up may take
    _, of_one = answers(fleet, receiver, prompt(LENGTH, seed=10), 1)
    tokens = prompt(LENGTH, seed=11)
    found, of_all = answers(fleet, receiver, tokens, ANSWERS)
    assert of_all == of_one > 0
    fleet["alone"].submit("alone", tokens, COUNT)
    assert found == {fleet["alone"].result("alone").tokens}
    fleet["small"].wait_empty()
