"""Mistakes of a router between two engines: each costs one request, and both engines go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from testing.kept import kept
from testing.waiting import wait_for
from tests.system.cross.fleet import TOKENS, Cross, decode_body, fetch_params, prefill_body
from tests.system.engines.fleet import PREFILL, Fleet
from tests.system.sglang import rows
from tests.system.sglang.fleet import answer_of, assert_idle, assert_same_tokens, prompt

pytestmark = [pytest.mark.cross, pytest.mark.timeout(400)]


cross = kept(Cross, start=("p16", "d16"))


@pytest.fixture(autouse=True)
def go_on(cross: Cross) -> Iterator[None]:
    """Whatever was asked: nothing is held, and the next prompt is carried."""
    yield
    assert_idle(cross.sglang, "p16", "d16")
    cross.vllm["small"].wait_empty(40)
    _, given, taken = cross.to_sglang("small", "d16", prompt(40, seed=next(SEEDS)))
    rows.assert_carried(given, taken)


SEEDS = iter(range(9000, 9100))
SOON_S = 1.0


@pytest.mark.proves("G9")
@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"first_token": 1024}, "token 1024: must be in [0, 1024)"),
        ({"first_token": None}, "Expected `int`, got `null`"),
        ({"rendezvous": f"room/7/{'0' * 40}"}, "the request of the other side has another prompt"),
        ({"sender": "tcp://127.0.0.1:1"}, ""),
        ({"sender": "nowhere"}, ""),
    ],
    ids=["token", "none", "prompt", "nobody", "nonsense"],
)
def test_what_a_router_says_wrongly_of_vllm_fails_that_request(cross: Cross, told: Any, reason: str) -> None:
    tokens, room = prompt(40, seed=next(SEEDS)), cross.room()
    prefilled = cross.vllm["small"].run(cross.vllm.name("p"), tokens, 1, PREFILL | {"bootstrap_room": room})
    body = decode_body(tokens, room, prefilled, **told)
    began = time.monotonic()
    status, said = cross.sglang["d16"].generate(body)
    assert status != 200 and reason in str(said), said
    assert time.monotonic() - began < 45
    if not told.get("sender"):  # nobody comes for what was offered: it is let go of
        assert time.monotonic() - began < 5


def test_a_request_for_another_engines_prompt_that_says_nothing_of_it_is_refused(cross: Cross) -> None:
    body = {"input_ids": prompt(40), "sampling_params": {"max_new_tokens": 4}, "bootstrap_host": "kvbridge"}
    status, said = cross.sglang["d16"].generate(body | {"bootstrap_room": cross.room()})
    assert status != 200 and "custom_params['kvbridge']: Expected `object`, got `null`" in str(said), said


def test_a_prefill_that_is_told_nonsense_is_refused(cross: Cross) -> None:
    body = prefill_body(prompt(40), cross.room())
    body["sampling_params"]["custom_params"]["kvbridge"] = {"fetched": 1}
    status, said = cross.sglang["p16"].generate(body)
    assert status != 200 and "unknown field `fetched`" in str(said), said


def test_a_prompt_that_sglang_has_and_vllm_does_not_ask_for_is_let_go(cross: Cross) -> None:
    room = cross.room()
    connection = cross.sglang["p16"].begin(prefill_body(prompt(40, seed=next(SEEDS)), room))
    time.sleep(1)
    connection.close()


def test_a_client_that_leaves_while_sglang_waits_for_vllms_rows(cross: Cross) -> None:
    tokens, room = prompt(40, seed=next(SEEDS)), cross.room()
    prefilled = cross.vllm["small"].run(cross.vllm.name("p"), tokens, 1, PREFILL | {"bootstrap_room": room})
    other: dict[str, Any] = {
        "rendezvous": "",
        "sender": cross.sglang.agents["p16"][0].address,
    }  # an agent that has no such offer
    connection = cross.sglang["d16"].begin(decode_body(tokens, room, prefilled, **other))
    time.sleep(1)
    connection.close()


def test_what_vllm_has_prefilled_is_held_while_sglang_lets_requests_queue(cross: Cross) -> None:
    cross.sglang.start("d16-small")
    first, second = prompt(400, seed=next(SEEDS)), prompt(500, seed=next(SEEDS))
    long = {"sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}}

    def begin(tokens: list[int], more: dict[str, Any]) -> HTTPConnection:
        room = cross.room()
        prefilled = cross.vllm["small"].run(cross.vllm.name("p"), tokens, 1, PREFILL | {"bootstrap_room": room})
        body = decode_body(tokens, room, prefilled)
        body["sampling_params"] |= more.get("sampling_params", {})
        return cross.sglang["d16-small"].begin(body)

    def states() -> list[str]:
        return [each.state for each in cross.vllm.agents["small"][0].status.offers]

    running = begin(first, long)
    wait_for(lambda: not states())  # it has been fetched
    queued = begin(second, {})
    wait_for(lambda: states() == ["awaited"], 3)
    answers = [answer_of(json.loads(each.getresponse().read())) for each in (queued, running)]
    assert_same_tokens(cross.sglang.alone(second, TOKENS), answers[0])
    assert len(answers[1].tokens) == 600
    # And one that leaves while it queues: vLLM has its blocks back at once.
    running, queued = begin(prompt(400, seed=next(SEEDS)), long), begin(prompt(500, seed=next(SEEDS)), {})
    wait_for(lambda: states() == ["awaited"], 3)
    queued.close()
    wait_for(lambda: not states(), 5)
    running.close()
    assert_idle(cross.sglang, "d16-small")


def test_engines_of_two_models_answer_within_a_second(cross: Cross, tmp_path: Path) -> None:
    """Also the first time, when the two agents have never met: SGLang with an error, vLLM with a prompt of its own."""
    with ExitStack() as stack:
        python, options = os.environ["KVBRIDGE_TEST_VLLM_PYTHON"], {"kvbridge_model_name": "another"}
        other = Fleet(tmp_path, stack, dtype="float32", options=options, python=python)
        other.start("small")
        for _ in range(3):
            tokens, room = prompt(300, seed=next(SEEDS)), cross.room()
            prefilled = other["small"].run(other.name("p"), tokens, 1, PREFILL | {"bootstrap_room": room})
            body = decode_body(tokens, room, prefilled)
            began = time.monotonic()
            status, said = cross.sglang["d16"].generate(body)
            assert time.monotonic() - began < SOON_S
            assert status != 200 and "incompatible: model: sender another, receiver model" in str(said), said
        for _ in range(3):
            tokens, room = prompt(300, seed=next(SEEDS)), cross.room()
            fetched = fetch_params(cross.sglang.agents["p16"][0], room)
            began = time.monotonic()
            prefilling = cross.sglang["p16"].begin(prefill_body(tokens, room))
            answer = other["small"].run(other.name("d"), tokens, TOKENS, fetched)
            assert time.monotonic() - began < SOON_S
            assert len(answer.tokens) == TOKENS and answer.cached == 0
            prefilling.close()
        (agent,) = other.agents["small"]
        wait_for(lambda: agent.status.counters.get("kvbridge_prompts_computed_here_total{reason=incompatible}") == 3)
