"""Recurrent states of a prefill engine that goes on at full load, preempts and aborts: sixteen at once, none wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.system.engines.fleet import PREFILL, Fleet, prompt
from tests.system.engines.states import MAMBA2, ONE_GROUP, writer
from tests.system.engines.test_states import alone, crosses

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

AT_ONCE = 16
DEADLINE_S = 150.0
# Room for a few prompts, of which vLLM admits as many as have room for their first piece.
SHORT = {"num_gpu_blocks_override": 24, "scheduler_reserve_full_isl": False, "max_num_seqs": 32}


@pytest.fixture(scope="module", params=["mamba2", "one group, prefixes"])
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fields, has_prefixes = {"mamba2": (MAMBA2, False)}.get(request.param, (ONE_GROUP, True))
    more = {"num_gpu_blocks_override": 160, "enable_prefix_caching": has_prefixes}
    with ExitStack() as stack:
        where, start = tmp_path_factory.mktemp("fleet"), ("small", "large", "alone")
        options = {"dtype": "float32", "write": writer(fields), "more": more, "start": start, "own": {"small": SHORT}}
        yield Fleet(where, stack, **options)  # type: ignore[arg-type]


@pytest.mark.proves("G13")
def test_sixteen_states_at_once_from_an_engine_that_preempts_and_aborts(states: Fleet) -> None:
    """What nobody asks for in 0.3 s is given back, as the engine is short of blocks: so both have met before."""
    prefill, decode = states["small"], states["large"]
    crosses(states, "small", "large", prompt(300, seed=699))
    offered = {states.name("p-small"): prompt(260 + 37 * number, seed=700 + number) for number in range(AT_ONCE)}
    wanted = dict[str, list[int]]()
    for number, (name, tokens) in enumerate(offered.items()):
        prefill.submit(name, tokens, 1, dict(PREFILL))
        if number % 4 == 1:
            prefill.submit(states.name("busy"), prompt(200 + 9 * number, seed=800 + number), 100)
        if number % 4 == 3:
            prefill.submit(aborted := states.name("aborted"), prompt(500, seed=900 + number), 1, dict(PREFILL))
            prefill.abort(aborted)
    end = time.monotonic() + DEADLINE_S
    while len(wanted) < AT_ONCE:
        assert time.monotonic() < end, f"{len(wanted)} of {AT_ONCE} were prefilled: {prefill.state()}"
        for name, result in prefill.take(0.2).items():
            if (tokens := offered.get(name, [])) and result.params:
                wanted[fetched := states.name("d-large")] = tokens
                decode.submit(fetched, tokens, 12, result.params)
    answers = decode.results(list(wanted))
    preempted = prefill.state()["preempted"]
    came = sum(answers[name].cached == len(tokens) - 1 for name, tokens in wanted.items())
    print(f"{preempted} preempted, {came} of {AT_ONCE} came")
    assert preempted >= AT_ONCE / 4 and came >= AT_ONCE / 2
    wrong = [len(tokens) for name, tokens in wanted.items() if list(answers[name].tokens) != alone(states, tokens, 12)]
    assert not wrong
    for each in (prefill, decode):
        each.wait_empty(60.0)
