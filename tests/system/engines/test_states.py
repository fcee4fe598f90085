"""Real engines of models with states beside attention: Gated DeltaNet, and Mamba 2 with two groups or one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.halfway import BACK_S, about_to_read, go_on, start_agents
from tests.system.engines.states import BESIDE, CONV_ROWS, GATED, MAMBA2, ONE_GROUP, of_one_rank, writer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = [2, CONV_ROWS, CONV_ROWS + 1, CONV_ROWS + 2, 127, 128, 129, 255, 256, 257, 300, 384, 385, 900]
MORE = {"enable_prefix_caching": False, "num_gpu_blocks_override": 64}
MODELS = {
    "gated": (GATED, "bfloat16"),
    "mamba2": (MAMBA2, "float32"),
    "one group": (ONE_GROUP, "float32"),
    "beside": (BESIDE, "float32"),
}


@pytest.fixture(scope="module", params=list(MODELS))
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fields, dtype = MODELS[request.param]
    with ExitStack() as stack:
        start = ("small", "large", "alone")
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack, dtype=dtype, write=writer(fields), more=MORE, start=start)


@pytest.mark.parametrize("length", LENGTHS)
def test_decodes_from_the_state_that_another_engine_left(states: Fleet, length: int) -> None:
    tokens = prompt(length, seed=length)
    assert crosses(states, "large", "small", tokens) == alone(states, tokens, 12)


@pytest.mark.parametrize("length", [300, 900])
def test_a_prompt_that_is_computed_in_pieces_leaves_the_state_of_the_last(states: Fleet, length: int) -> None:
    """Of 256 tokens, which changes numbers a little: so tokens are compared in fp32 only."""
    tokens = prompt(length, seed=length + 1)
    answer = crosses(states, "small", "large", tokens)
    assert states.dtype == "bfloat16" or answer == alone(states, tokens, 12)


def test_a_prompt_of_one_token_is_computed_where_it_is_decoded(states: Fleet) -> None:
    """Nothing is before its last token. The block may hold another request's state, which must not be read."""
    crosses(states, "large", "small", prompt(40, seed=50))
    answer = states["small"].run(states.name("one"), [77], 12, states.fetched("large", "nothing"))
    assert answer.cached == 0 and list(answer.tokens) == states.alone([77], 12)


def test_a_request_is_aborted_while_its_state_travels(states: Fleet) -> None:
    _, wanted = about_to_read(states, "large", "small", prompt(300, seed=100))
    states["small"].abort(wanted)
    go_on(states, "small")
    for name in ("large", "small"):
        states[name].wait_empty(BACK_S)
    crosses(states, "large", "small", prompt(300, seed=101))


def test_a_prompt_whose_state_does_not_come_is_computed(states: Fleet) -> None:
    """The receiver's agent is killed: vLLM computes all of it, from no state at all."""
    tokens = prompt(300, seed=102)
    _, wanted = about_to_read(states, "large", "small", tokens)
    for each in states.agents["small"]:
        each.process.kill()
    answer = states["small"].result(wanted)
    assert answer.cached == 0
    assert states.dtype == "bfloat16" or list(answer.tokens) == states.alone(tokens, 12)
    start_agents(states, "small")
    states["large"].wait_empty(BACK_S)
    crosses(states, "large", "small", prompt(300, seed=103))


def test_states_are_not_written_while_they_are_offered(states: Fleet) -> None:
    """Other requests fill the sender, whose states and rows must stay until they are fetched."""
    prompts = [prompt(60 + 20 * number, seed=200 + number) for number in range(4)]
    offered = [states.prefill("large", tokens) for tokens in prompts]
    before = [
        states["large"].states(request, len(tokens) - 1, states.folder / "before.npz")[0]
        for (request, _), tokens in zip(offered, prompts, strict=True)
    ]
    busy = [states.name("busy") for _ in range(6)]
    for number, name in enumerate(busy):
        states["large"].submit(name, prompt(100 + number, seed=300 + number), 20)
    for tokens, (_, prefilled), ours in zip(prompts, offered, before, strict=True):
        wanted = states.name("d-small")
        answer = states["small"].run(wanted, tokens, 12, prefilled.params)
        assert answer.cached == len(tokens) - 1
        assert_equal(ours, states["small"].states(wanted, len(tokens) - 1, states.folder / "after.npz")[0])
        assert list(answer.tokens) == alone(states, tokens, 12)
    states["large"].results(busy)


@pytest.mark.parametrize("length", [2, 300])
@pytest.mark.parametrize(("sender", "receiver"), [("large", "two"), ("two", "large")])
def test_every_rank_gets_its_heads(states: Fleet, sender: str, receiver: str, length: int) -> None:
    """Attention's blocks differ, too: vLLM makes them as large as a rank's state."""
    tokens = prompt(length, seed=400 + length + (sender == "two"))
    answer = crosses(states, sender, receiver, tokens)
    assert states.dtype == "bfloat16" or answer == alone(states, tokens, 12)


def test_its_pool_is_known_before_it_starts(states: Fleet) -> None:
    states.assert_known_beforehand("small", "--no-enable-prefix-caching --mamba-ssm-cache-dtype float32")


def alone(fleet: Fleet, tokens: list[int], count: int) -> list[int]:
    """What one engine alone says that computes the prompt's last token in a step of its own."""
    answer = fleet["alone"].ask("likely", 60.0, request=fleet.name("alone"), tokens=tokens, amount=count)
    return list(answer["tokens"])


def crosses(fleet: Fleet, sender: str, receiver: str, tokens: list[int]) -> list[int]:
    """The states that came are those after all tokens but the last. Returns what is decoded from them."""
    fleet.start(sender, receiver)  # what is offered is not held for as long as a start-up may take
    request, prefilled = fleet.prefill(sender, tokens)
    ours = fleet[sender].states(request, len(tokens) - 1, fleet.folder / "ours.npz")
    wanted = fleet.name(f"d-{receiver}")
    answer = fleet[receiver].run(wanted, tokens, 12, prefilled.params)
    assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
    theirs = fleet[receiver].states(wanted, len(tokens) - 1, fleet.folder / "theirs.npz")
    assert_equal(of_one_rank(ours), of_one_rank(theirs))
    return list(answer.tokens)


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for key, rows in ours.items():
        assert rows.any(), f"{key}: zeros"
        assert np.array_equal(rows, theirs[key]), key
