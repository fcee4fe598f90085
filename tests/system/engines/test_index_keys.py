"""Real engines of a model with sparse attention: index keys travel beside its latents, in the layers that have them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from demo.model import LAYERS
from kvbridge.failpoints import VARIABLE
from tests.support.waiting import wait_for
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.index_keys import SCALE, WIDTH
from tests.system.engines.kinds import write_sparse
from tests.system.kept import kept
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PLUGIN = Path(__file__).parent / "dsa_plugin"
INDEXED = range(0, LAYERS, 2)
BACK_S = 60.0  # for an engine to attach to another agent, and for requests to travel again


sparse = kept(
    Fleet,
    dtype="float32",
    write=write_sparse,
    more={"attention_backend": "CPU_MLA"},
    environment={"PYTHONPATH": str(PLUGIN)},
    options={"kvbridge_deadline_s": 10},
    start=("sixteen", "two-sixteen"),
)


@pytest.mark.parametrize(("sender", "receiver"), [("sixteen", "two-sixteen"), ("two-sixteen", "sixteen")])
def test_every_rank_gets_the_index_keys_whatever_the_number_of_ranks(sparse: Fleet, sender: str, receiver: str) -> None:
    """Read by the tests' own reader, in every rank: the same bytes as where they were computed."""
    for length in (2, 17, 300):
        tokens = prompt(length, seed=length + 1 + (sender == "sixteen"))
        answer, ours, theirs = sparse.crossed(sender, receiver, tokens)
        assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
        assert_carried(ours, theirs)
        assert {layer for layer, part in ours.rows if part == "index_key"} == set(INDEXED)
        assert {layer for layer, part in ours.rows if part == "latent"} == set(range(LAYERS))
        for layer in INDEXED:
            assert ours.rows[layer, "index_key"].shape == (length - 1, 1, WIDTH)
            assert ours.rows[layer, "index_key_scale"].shape == (length - 1, 1, SCALE)


def test_what_the_receiver_has_in_its_prefix_cache_is_not_fetched_again(sparse: Fleet) -> None:
    first = prompt(100, seed=7)
    sparse.crossed("sixteen", "two-sixteen", first)
    longer = first[:90] + prompt(120, seed=8)
    answer, ours, theirs = sparse.crossed("sixteen", "two-sixteen", longer)
    assert answer.cached == len(longer) - 1
    assert_carried(ours, theirs)


def start_agents(fleet: Fleet, name: str, armed: str = "") -> None:
    """Others beside this engine, which will fail as told; they are waited for."""
    for each in fleet.agents[name]:
        each.stop()
    os.environ[VARIABLE] = armed
    try:
        fleet.start_agents(name)
    finally:
        del os.environ[VARIABLE]
    for each in fleet.agents[name]:
        wait_for(lambda each=each: each.status.engine is not None, BACK_S)


def travels(fleet: Fleet, sender: str, receiver: str, seed: int) -> None:
    """Nothing is held, and the next request goes from one engine to the other, row for row."""
    for name in (sender, receiver):
        fleet[name].wait_empty(BACK_S)
    end = time.monotonic() + BACK_S
    while True:
        tokens = prompt(200, seed=seed)
        answer, ours, theirs = fleet.crossed(sender, receiver, tokens)
        if answer.cached == len(tokens) - 1:
            assert_carried(ours, theirs)
            break
        assert time.monotonic() < end, "requests do not travel again"
        seed += 1
    for name in (sender, receiver):
        fleet[name].wait_empty(BACK_S)


def about_to_read(fleet: Fleet, sender: str, receiver: str, tokens: list[int]) -> tuple[str, str]:
    """The prefill's name and that of a request whose agents stand still, about to read its rows."""
    start_agents(fleet, receiver, "receiver.read_begun=stop")
    request, prefilled = fleet.prefill(sender, tokens)
    wanted = fleet.name(f"d-{receiver}")
    fleet[receiver].submit(wanted, tokens, 12, prefilled.params)
    for each in fleet.agents[receiver]:
        stat = Path(f"/proc/{each.process.pid}/stat")
        wait_for(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "T", BACK_S)
    return request, wanted


def go_on(fleet: Fleet, name: str) -> None:
    for each in fleet.agents[name]:
        os.kill(each.process.pid, signal.SIGCONT)


def test_a_request_that_is_aborted_while_its_rows_travel(sparse: Fleet) -> None:
    sender, receiver = "sixteen", "two-sixteen"
    _, wanted = about_to_read(sparse, sender, receiver, prompt(900, seed=100))
    sparse[receiver].abort(wanted)
    go_on(sparse, receiver)
    travels(sparse, sender, receiver, seed=2101)


def test_the_receivers_agents_are_killed_while_they_read(sparse: Fleet) -> None:
    sender, receiver = "sixteen", "two-sixteen"
    _, wanted = about_to_read(sparse, sender, receiver, prompt(900, seed=102))
    for each in sparse.agents[receiver]:
        each.process.kill()
    answer = sparse[receiver].result(wanted)
    assert (answer.cached, len(answer.tokens)) == (0, 12), "it is computed where it was to be decoded"
    start_agents(sparse, receiver)
    travels(sparse, sender, receiver, seed=2103)


def test_the_senders_agents_are_killed_while_it_is_read(sparse: Fleet) -> None:
    """The receiver counts what it has read under a lease, or computes the prompt; never other rows."""
    sender, receiver = "two-sixteen", "sixteen"
    tokens = prompt(900, seed=104)
    request, wanted = about_to_read(sparse, sender, receiver, tokens)
    ours = sparse.rows(sender, request, 0, len(tokens) - 1)
    for each in sparse.agents[sender]:
        each.process.kill()
    go_on(sparse, receiver)
    answer = sparse[receiver].result(wanted)
    if answer.cached:
        assert answer.cached == len(tokens) - 1
        assert_carried(ours, sparse.rows(receiver, wanted, 0, len(tokens) - 1))
    start_agents(sparse, sender)
    travels(sparse, sender, receiver, seed=2105)
