"""Two real engines that cannot share KV: the client has an answer, or an error, within a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from testing.waiting import wait_for
from tests.system.engines.fleet import Fleet, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SOON_S = 1.0


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Fleet]]:
    """Of one model, called by two names: their KV is not each other's."""
    with ExitStack() as stack:
        prefill, decode = (
            Fleet(tmp_path_factory.mktemp(name), stack, options={"kvbridge_model_name": name})
            for name in ("one", "another")
        )
        prefill.start("small")
        decode.start("large", "strict")
        yield prefill, decode


def test_an_engine_of_another_model_computes_within_a_second(fleets: tuple[Fleet, Fleet]) -> None:
    """Also the first time, when the two agents have never met."""
    prefill, decode = fleets
    (agent,) = decode.agents["large"]
    counted = "kvbridge_prompts_computed_here_total{reason=incompatible}"
    for seed in (1, 2, 3):
        tokens = prompt(300, seed=seed)
        _, prefilled = prefill.prefill("small", tokens)
        answer = decode["large"].run(decode.name("d"), tokens, 8, prefilled.params)
        assert len(answer.tokens) == 8 and answer.cached == 0
        assert list(answer.tokens) == list(prefill["small"].run(prefill.name("alone"), tokens, 8).tokens)
        assert answer.seconds < SOON_S
    wait_for(lambda: agent.status.counters.get(counted) == 3)


def test_an_engine_that_must_not_compute_fails_the_request_within_a_second(fleets: tuple[Fleet, Fleet]) -> None:
    prefill, decode = fleets
    for seed in (11, 12, 13):
        tokens = prompt(300, seed=seed)
        _, prefilled = prefill.prefill("small", tokens)
        answer = decode["strict"].run(decode.name("d"), tokens, 8, prefilled.params)
        assert answer.reason == "error" and not answer.tokens
        assert answer.seconds < SOON_S
