"""Bad requests, peers and operators cost a server one request, and the server goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbridge.errors import OperatorError
from testing.kept import kept
from testing.waiting import wait_for
from tests.support.hostile_prefill import RANK, SERVER, Prefill
from tests.system.sglang.fleet import CONFIGS, Fleet, assert_idle, assert_works, prompt
from tests.system.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

# Another set of metadata fields, a server that would give pages away half a second after an abort, and
# one with room for so few tokens that running requests are retracted.
OTHERS = {
    "d16-masks": replace(CONFIGS["d16"], environment={"SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1"}),
    "d16-hasty": replace(
        CONFIGS["d16"], environment={"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "0.5"}
    ),
    "d16-small": replace(
        CONFIGS["d16"], max_total_tokens=1024, keeps_prefixes=False, flags=("--schedule-conservativeness", "0.0")
    ),
}


fleet = kept(Fleet, others=OTHERS)


def reason(answer: tuple[int, Any]) -> str:
    status, said = answer
    assert status != 200, said
    return str(said)


@pytest.mark.proves("G9", "T8")
def test_a_room_that_is_in_use_is_refused_to_the_next(fleet: Fleet) -> None:
    """A client may choose any number. Whose request came first keeps it."""
    fleet.start("p16", "d16", "alone")
    room, first, second = fleet.room(), prompt(700, seed=1), prompt(90, seed=2)
    bodies = [fleet.body("p16", tokens, room) for tokens in (first, second)]
    with ThreadPoolExecutor(4) as pool:
        waits = pool.submit(fleet["d16"].generate, bodies[0])  # its prompt is asked for, and nobody prefills it yet
        wait_for(lambda: fleet["d16"].held()["decode_transfer_queue_reqs"], 10)
        refused = fleet["d16"].generate(bodies[1])
        fleet["p16"].generate(bodies[0])
        status, said = waits.result()
    assert "in use by another request" in reason(refused)
    assert status == 200, said
    assert_works(fleet, "p16", "d16", seed=3)


@pytest.mark.proves("G9", "T8")
def test_requests_of_one_room_and_other_prompts_do_not_meet(fleet: Fleet) -> None:
    fleet.start("p16", "d16")  # or the one may wait for the other's start in vain
    room = fleet.room()
    bodies = {name: fleet.body("p16", prompt(90, seed=seed), room) for name, seed in (("p16", 11), ("d16", 12))}
    with ThreadPoolExecutor(2) as pool:
        given, taken = (pool.submit(fleet[name].generate, body) for name, body in bodies.items())
        assert "another prompt" in reason(taken.result()) and given.result()[0] != 200
    assert_works(fleet, "p16", "d16", seed=13)


HOSTILE: list[dict[str, Any]] = [
    *({"body": SERVER | {"attn_tp_size": size}} for size in (0, -3, 30_000_000)),
    {"body": SERVER | {"attn_tp_size": 1}, "ranks": [[*(RANK | {"agent": "tcp://" + "x" * 300}).values()]]},
    {"body": SERVER | {"attn_tp_size": 1}, "ranks": [[*(RANK | {"rank_ip": "x\n\x1b[2J"}).values()]]},
]


def test_prefill_servers_that_a_client_made_up_cost_their_requests_only(fleet: Fleet) -> None:
    """Sizes of 0 and -3 ended the scheduler. A long address detached the agent for a minute."""
    fleet.start("p16", "d16", "alone")
    (agent,) = fleet.agents["d16"]
    attached = agent.status.engine
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(HOSTILE) + 1) as pool:
        servers = [stack.enter_context(contextlib.closing(Prefill())) for _ in HOSTILE]
        for server, told in zip(servers, HOSTILE, strict=True):
            server.body, server.ranks = told["body"], told.get("ranks")
        hosts = [server.address.rpartition(":") for server in servers]
        named = [{"bootstrap_host": host, "bootstrap_port": int(port)} for host, _, port in hosts]
        named.append({"bootstrap_host": "x\nforged: a line of its own\x1b[2J/", "bootstrap_port": 1})
        bodies = [fleet.body("p16", prompt(90, seed=71), fleet.room()) | each for each in named]
        for answer in pool.map(fleet["d16"].generate, bodies):
            assert reason(answer)
    assert_works(fleet, "p16", "d16", seed=72)
    assert attached is not None and agent.status.engine == attached, "it was detached meanwhile"
    log = fleet["d16"].text()
    assert "\x1b[2J" not in log and "\nforged" not in log


def test_a_metadata_buffer_of_another_size_is_named(fleet: Fleet) -> None:
    _, taken = fleet.both("p16", "d16-masks", fleet.body("p16", prompt(90, seed=31), fleet.room()))
    assert "metadata buffer" in reason(taken)
    assert_works(fleet, "p16", "d16", seed=32)


@pytest.mark.proves("G12")
def test_pages_that_an_agent_may_write_are_not_given_back_because_time_has_passed(fleet: Fleet) -> None:
    """The agent is stopped in the middle of a transfer, and cannot say that it is over."""
    fleet.start("p16", "d16-hasty", "alone")
    assert_works(fleet, "p16", "d16-hasty", seed=61)
    (agent,) = fleet.agents["d16-hasty"]
    body = fleet.body("p16", prompt(6000, seed=62), fleet.room(), rid="stopped")
    with ThreadPoolExecutor(2) as pool:
        taken = pool.submit(fleet["d16-hasty"].generate, body)
        wait_for(lambda: fleet["d16-hasty"].held()["decode_transfer_queue_reqs"], 10)
        os.kill(agent.process.pid, signal.SIGSTOP)
        try:
            given = pool.submit(fleet["p16"].generate, body)
            time.sleep(0.5)
            fleet["d16-hasty"].abort("stopped")
            assert taken.result()[0] != 200
            time.sleep(3.0)
            assert fleet["d16-hasty"].held()["num_used_tokens"] >= 6000
        finally:
            os.kill(agent.process.pid, signal.SIGCONT)
        assert given.result()[0] != 200
    assert_idle(fleet, "p16", "d16-hasty")
    assert_works(fleet, "p16", "d16-hasty", seed=63)


def test_requests_that_are_retracted_go_on_where_they_were(fleet: Fleet) -> None:
    """The decoding server gives their pages away, and takes them back from its own copy."""
    fleet.start("p16", "d16-small", "alone")
    prompts = [prompt(200, seed=41 + i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tokens: fleet.ask("p16", "d16-small", [tokens], 160)[0][1], prompts))
    assert "retract" in fleet["d16-small"].text().lower()
    for tokens, answer in zip(prompts, answers, strict=True):
        fleet.assert_same_as_alone(tokens, answer)
    assert_idle(fleet, "p16", "d16-small")


@pytest.mark.parametrize("name", ["p16", "d16"])
def test_memory_is_given_back_and_taken_again(fleet: Fleet, name: str) -> None:
    assert_works(fleet, "p16", "d16", seed=51)
    (agent,) = fleet.agents[name]
    assert fleet[name].ask("/release_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    assert agent.status.engine is None, "the agent still has the memory"
    assert fleet[name].ask("/resume_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    wait_for(lambda: agent.status.engine is not None, 10)
    assert_works(fleet, "p16", "d16", seed=52 + len(name))


def test_a_name_that_nobody_knows_in_the_environment_stops_the_server(fleet: Fleet, tmp_path: Path) -> None:
    """Loudly: SGLang only logs what goes wrong in a plugin, so it must not go wrong there."""
    config = replace(CONFIGS["p16"], environment={"KVBRIDGE_ENGINE_SOKET": "/x"})
    with Server(config, fleet._model, tmp_path, "misspelt") as server, pytest.raises(OperatorError) as died:
        server.wait_ready()
    assert "KVBRIDGE_ENGINE_SOKET: not an option" in str(died.value)
