"""Real servers whose weights change: rows of other weights are never used, and nothing waits for prompts that are held.

Nobody fetches what is held here, and `HOLD_S` is longer than every wait.
"""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.model import write_model
from testing.kept import kept
from testing.waiting import wait_for
from tests.system.sglang.fleet import Fleet, assert_idle, prompt
from tests.system.sglang.server import ServerConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
SENDER, RECEIVER, HOLD_S = "p16-holds", "d32", 900
HOLDS = ServerConfig("prefill", environment={"KVBRIDGE_ENGINE_HOLD_S": str(HOLD_S)})
LONG = 3000  # tokens, in chunks of 256


fleet = kept(Fleet, start=(SENDER, RECEIVER), others={SENDER: HOLDS})


@contextmanager
def begun(fleet: Fleet, tokens: list[int]) -> Iterator[http.client.HTTPConnection]:
    """A prompt that another engine is to fetch, and no one does. At the end its client has been told so."""
    body = fleet.body(SENDER, tokens, fleet.room())
    body["sampling_params"] |= {"custom_params": {"kvbridge": {"fetched_by": "nobody"}}}
    with closing(fleet[SENDER].begin(body)) as connection:
        yield connection
        answer = connection.getresponse()
        assert answer.status == 500 and b"KVTransferError" in answer.read()


@contextmanager
def held(fleet: Fleet, seed: int) -> Iterator[None]:
    tokens = prompt(300, seed=seed)
    with begun(fleet, tokens):
        wait_for(lambda: [each.tokens for each in fleet.agents[SENDER][0].status.offers] == [len(tokens)], 60)
        yield


def assert_done(fleet: Fleet, name: str, path: str, body: dict[str, Any]) -> None:
    status, said = fleet[name].ask(path, body, 120)
    assert status == 200, said


@pytest.mark.parametrize("path", ["/flush_cache", "/flush_cache?timeout=100"])
def test_a_flush_succeeds_the_first_time_while_a_prompt_is_held(fleet: Fleet, path: str) -> None:
    with held(fleet, seed=len(path)):
        assert_done(fleet, SENDER, path, {})


def test_a_flush_that_waits_for_running_prompts_does_not_wait_for_their_being_fetched(fleet: Fleet) -> None:
    with begun(fleet, prompt(LONG, seed=510)):
        wait_for(lambda: fleet.agents[SENDER][0].status.offers, 60)  # its first chunk
        assert_done(fleet, SENDER, "/flush_cache?timeout=100", {})


def test_memory_is_released_while_a_prompt_is_held_but_not_while_the_agent_stands_still(fleet: Fleet) -> None:
    cache, (agent,) = {"tags": ["kv_cache"]}, fleet.agents[SENDER]
    agent.process.send_signal(signal.SIGSTOP)
    try:
        assert agent.process.is_stopped(10)
        status, said = fleet[SENDER].ask("/release_memory_occupation", cache, 120)
        assert status == 400 and "not_let_go" in said
        assert_done(fleet, SENDER, "/resume_memory_occupation", cache)
    finally:
        agent.process.send_signal(signal.SIGCONT)
    wait_for(lambda: agent.status.engine is not None, 60)
    with held(fleet, seed=520):
        assert_done(fleet, SENDER, "/release_memory_occupation", cache)
        assert agent.status.engine is None
    assert_done(fleet, SENDER, "/resume_memory_occupation", cache)
    wait_for(lambda: agent.status.engine is not None, 60)
    fleet.crossed(SENDER, RECEIVER, prompt(300, seed=521))


def load(fleet: Fleet, name: str, model: Path, version: str | None) -> None:
    body = {"model_path": str(model), "weight_version": version, "flush_cache": True}
    assert_done(fleet, name, "/update_weights_from_disk", body)


def failed(fleet: Fleet, tokens: list[int]) -> str:
    """What the decode server says of a prompt that it does not get."""
    (given, why), (status, said) = fleet.both(SENDER, RECEIVER, fleet.body(SENDER, tokens, fleet.room()))
    assert given != 200 and status != 200, (why, said)
    return str(said)


@pytest.mark.proves("G10")
def test_rows_of_the_weights_of_before_are_never_used(fleet: Fleet, tmp_path: Path) -> None:
    model, tokens = write_model(tmp_path, seed=5), prompt(300, seed=501)
    (of_a,) = fleet.crossed(SENDER, RECEIVER, tokens)
    with held(fleet, seed=502):  # if it is not paused, SGLang's update waits for all its requests
        assert_done(fleet, SENDER, "/pause_generation", {"mode": "retract"})
        load(fleet, SENDER, model, "B")
        assert_done(fleet, SENDER, "/continue_generation", {})
    assert "other_weights" in failed(fleet, tokens)
    load(fleet, RECEIVER, model, None)  # the same weights, but who knows?
    assert "other_weights" in failed(fleet, tokens)
    assert_done(fleet, RECEIVER, "/update_weight_version", {"new_version": "B", "abort_all_requests": False})
    (of_b,) = fleet.crossed(SENDER, RECEIVER, tokens)
    assert of_b.tokens != of_a.tokens
    assert_idle(fleet, SENDER, RECEIVER)
