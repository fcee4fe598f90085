"""Engines of unequal tensor parallel sizes. In fp32: TP changes the order of sums, which would show in bf16."""

from __future__ import annotations

import pytest

from testing.agents import is_at_rest
from testing.kept import kept
from tests.system.engines.fleet import PREFILL, Fleet, assert_same_as_alone, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


fleet = kept(Fleet, dtype="float32", start=("small", "large", "alone", "two"))


PAIRS = [
    pytest.param("two", "small", id="tp 2 to 1"),
    pytest.param("small", "two", id="tp 1 to 2"),
    pytest.param("two", "large", id="tp 2 to 1 and block 32 to 128"),
    pytest.param("large", "two", id="tp 1 to 2 and block 128 to 32"),
]
# No prompt twice: a decode engine that has computed one keeps it in its prefix cache.
SEEDS = {("two", "small"): 1, ("small", "two"): 11, ("two", "large"): 21, ("large", "two"): 41}


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
@pytest.mark.parametrize("length", [2, 33, 700])
def test_decodes_what_an_engine_of_other_size_prefilled(fleet: Fleet, sender: str, receiver: str, length: int) -> None:
    assert_same_as_alone(fleet, sender, receiver, prompt(length, seed=length + SEEDS[sender, receiver]))


def test_two_prefill_engines_feed_one_decode_engine(fleet: Fleet) -> None:
    prompts = {name: prompt(300, seed=7 + i) for i, name in enumerate(("small", "two"))}
    wanted, ours = {}, {}
    for name, tokens in prompts.items():
        given, prefilled = fleet.prefill(name, tokens)
        ours[name] = fleet.rows(name, given, 0, len(tokens) - 1)
        wanted[name] = fleet.name("fed")
        fleet["large"].submit(wanted[name], tokens, 12, prefilled.params, fleet.folder / f"{wanted[name]}.npz")
    for name, tokens in prompts.items():
        answer = fleet["large"].result(wanted[name])
        assert answer.cached == len(tokens) - 1
        assert_carried(ours[name], fleet["large"].dumped(wanted[name], fleet.folder / f"{wanted[name]}.npz"))
        assert list(answer.tokens) == fleet.alone(tokens, 12)


def test_thirty_two_requests_at_once(fleet: Fleet) -> None:
    lengths = [1, 2, 15, 31, 32, 33, 64, 127, 128, 129, 200, 1500] + [3 + 41 * i for i in range(20)]
    requests = {fleet.name("many"): prompt(length, seed=20 + i) for i, length in enumerate(lengths)}
    assert len(requests) == 32
    for request, tokens in requests.items():
        fleet["two"].submit(f"p{request}", tokens, 1, dict(PREFILL))
    prefilled = fleet["two"].results([f"p{request}" for request in requests])
    ours = {r: fleet.rows("two", f"p{r}", 0, len(tokens) - 1) for r, tokens in requests.items() if len(tokens) > 1}
    for request, tokens in requests.items():
        kept = fleet.folder / f"{request}.npz" if len(tokens) > 1 else None
        fleet["large"].submit(request, tokens, 4, prefilled[f"p{request}"].params, kept)
    answers = fleet["large"].results(requests)
    for request, tokens in requests.items():
        fleet["alone"].submit(f"a{request}", tokens, 4)
        answer = answers[request]
        assert answer.cached == len(tokens) - 1, f"{len(tokens)} tokens: {answer}"
        if len(tokens) > 1:
            assert_carried(ours[request], fleet["large"].dumped(request, fleet.folder / f"{request}.npz"))
    for request, alone in fleet["alone"].results([f"a{request}" for request in requests]).items():
        assert list(answers[request[1:]].tokens) == list(alone.tokens)
    for name in ("two", "large"):
        fleet[name].wait_empty()
        assert all(is_at_rest(each.status) for each in fleet.agents[name])
