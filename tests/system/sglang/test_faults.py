"""A client, an agent or a server disappears in the middle: the request ends, nothing stays held, the next one works."""

from __future__ import annotations

import contextlib
import http.client
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.model import write_model
from testing.kept import kept
from testing.waiting import wait_for
from tests.system.sglang.fleet import Fleet, assert_idle, assert_works, prompt
from tests.system.sglang.server import PATIENCE_S

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LONG = 4000  # tokens, in chunks of 256: the prompt takes a second or more
SENDER, RECEIVER = "p16", "d32"
LATE_S = PATIENCE_S + 25
OWN = {SENDER: 0, RECEIVER: 1}  # no prompt is used twice


fleet = kept(Fleet, start=(SENDER, RECEIVER, "alone"))


def works(fleet: Fleet, seed: int) -> None:
    assert_works(fleet, SENDER, RECEIVER, seed, LATE_S)


class Asked:
    """One long prompt, asked of both servers; `taken` and `given` are their answers when they have ended."""

    def __init__(self, fleet: Fleet, seed: int, tokens: int = LONG) -> None:
        self.room = fleet.room()
        self.rid = f"asked-{self.room}"
        self._pool = ThreadPoolExecutor(2)
        body = fleet.body(SENDER, prompt(tokens, seed=seed), self.room, rid=self.rid)
        self.taken: Future[Any] = self._pool.submit(ask, fleet, RECEIVER, body)
        self.given: Future[Any] = self._pool.submit(ask, fleet, SENDER, body)
        wait_for(lambda: fleet[RECEIVER].held()["decode_transfer_queue_reqs"], 10)

    def ended(self, timeout_s: float = LATE_S) -> tuple[Any, Any]:
        return self.given.result(timeout_s), self.taken.result(timeout_s)


def ask(fleet: Fleet, name: str, body: dict[str, Any]) -> tuple[int, Any]:
    """0 and why where the server did not answer."""
    try:
        return fleet[name].generate(body, LATE_S + 10)
    except (OSError, http.client.HTTPException) as error:
        return 0, error


def failed(answer: tuple[int, Any]) -> bool:
    status, said = answer
    return status != 200 or (isinstance(said, dict) and said["meta_info"]["finish_reason"]["type"] == "abort")


@pytest.mark.parametrize("is_aborted", [False, True], ids=["its client leaves", "it is aborted"])
@pytest.mark.parametrize(("name", "queue"), [(RECEIVER, "decode"), (SENDER, "prefill")])
def test_a_request_ends_while_one_side_waits_for_the_other(
    fleet: Fleet, name: str, queue: str, is_aborted: bool
) -> None:
    seed, rid = 1 + OWN[name] + 10 * is_aborted, f"waits-{queue}-{is_aborted}"
    with contextlib.closing(
        fleet[name].begin(fleet.body(SENDER, prompt(200, seed=seed), fleet.room(), rid=rid))
    ) as waits:
        wait_for(lambda: _waits(fleet, name, queue), 10)
        if is_aborted:
            fleet[name].abort(rid)
            waits.getresponse().read()
    works(fleet, seed=3 + seed)


def _waits(fleet: Fleet, name: str, queue: str) -> int:
    return sum(count for key, count in fleet[name].held().items() if key.startswith(queue))


@pytest.mark.parametrize("name", [SENDER, RECEIVER])
def test_a_request_is_aborted_while_it_travels(fleet: Fleet, name: str) -> None:
    """The side that is told ends at once, the other one when it has heard of it."""
    asked = Asked(fleet, seed=20 + OWN[name])
    time.sleep(0.3)
    fleet[name].abort(asked.rid)
    began = time.monotonic()
    given, taken = asked.ended()
    assert failed(taken), (given, taken)
    assert time.monotonic() - began < LATE_S
    works(fleet, seed=30 + OWN[name])


@pytest.mark.parametrize("name", [SENDER, RECEIVER])
def test_a_client_goes_away_while_its_request_travels(fleet: Fleet, name: str) -> None:
    other = RECEIVER if name == SENDER else SENDER
    body = fleet.body(SENDER, prompt(LONG, seed=40 + OWN[name]), fleet.room())
    with ThreadPoolExecutor(1) as pool, contextlib.closing(fleet[name].begin(body)):
        stays = pool.submit(ask, fleet, other, body)
        wait_for(lambda: fleet[RECEIVER].held()["decode_transfer_queue_reqs"], 10)
        time.sleep(0.3)
    assert stays.result()
    works(fleet, seed=50 + OWN[name])


@pytest.mark.parametrize("name", [SENDER, RECEIVER])
def test_an_agent_is_killed_while_a_request_travels(fleet: Fleet, name: str) -> None:
    """The request fails, the servers stay; with the next agent the next one is carried."""
    asked = Asked(fleet, seed=60 + OWN[name])
    time.sleep(0.3)
    fleet.agents[name][0].kill()
    _, taken = asked.ended()
    assert failed(taken), taken
    for side in (SENDER, RECEIVER):
        assert fleet[side].process.poll() is None
        fleet[side].wait_empty(LATE_S)
    fleet.start_agents(name)
    wait_for(lambda: fleet.agents[name][0].status.engine is not None, 10)
    wait_for(lambda: _carries(fleet, seed=70 + OWN[name]), LATE_S)
    works(fleet, seed=80 + OWN[name])


@pytest.mark.parametrize("name", [SENDER, RECEIVER])
def test_an_idle_server_attaches_again_before_the_next_request(fleet: Fleet, name: str) -> None:
    works(fleet, seed=90 + OWN[name])
    fleet.agents[name][0].kill()
    time.sleep(1.0)
    fleet.start_agents(name)
    wait_for(lambda: fleet.agents[name][0].status.engine is not None, 10)
    wait_for(lambda: _carries(fleet, seed=100 + OWN[name]), LATE_S)
    works(fleet, seed=110 + OWN[name])


def _carries(fleet: Fleet, seed: int) -> bool:
    """Peers may need a moment to find each other again."""
    room = fleet.room()
    _, taken = fleet.both(SENDER, RECEIVER, fleet.body(SENDER, prompt(50, seed=seed), room))
    return not failed(taken)


def test_a_room_that_nobody_has_costs_that_request_only(fleet: Fleet) -> None:
    tokens = prompt(150, seed=120)
    lost = fleet[RECEIVER].begin(fleet.body(SENDER, tokens, fleet.room()))
    wait_for(lambda: _waits(fleet, RECEIVER, "decode"), 10)
    (answer,) = fleet.crossed(SENDER, RECEIVER, prompt(150, seed=121))
    assert answer.tokens
    with contextlib.closing(lost):
        answered = lost.getresponse()
        said = answered.read().decode()
    assert answered.status != 200, said
    works(fleet, seed=122)


def test_an_array_of_rooms_with_a_hole_costs_that_request_only(fleet: Fleet) -> None:
    body = fleet.body(SENDER, [prompt(90, seed=130), prompt(90, seed=131)], [fleet.room(), None])
    given, taken = fleet.both(SENDER, RECEIVER, body)
    assert taken[0] != 200, (given, taken)
    works(fleet, seed=132)


def test_a_decode_server_of_another_model_is_refused_by_the_request(fleet: Fleet, tmp_path: Path) -> None:
    with ExitStack() as stack:
        other = Fleet(tmp_path / "other", stack, write=partial(write_model, num_hidden_layers=2))
        other.start("d16")
        body = fleet.body(SENDER, prompt(100, seed=180), fleet.room())
        with ThreadPoolExecutor(2) as pool:
            given, taken = pool.submit(ask, fleet, SENDER, body), pool.submit(ask, other, "d16", body)
        assert failed(taken.result()), (given.result(), taken.result())
        works(fleet, seed=181)
        assert_idle(other, "d16", timeout_s=LATE_S)
        assert other["d16"].process.poll() is None


# The last ones: they start servers anew.
@pytest.mark.parametrize("name", [RECEIVER, SENDER])
def test_a_server_is_killed_while_a_request_travels(fleet: Fleet, name: str) -> None:
    other = RECEIVER if name == SENDER else SENDER
    asked = Asked(fleet, seed=140 + OWN[name])
    time.sleep(0.3)
    fleet.kill(name)
    given, taken = asked.ended()
    assert failed(taken), (given, taken)
    fleet[other].wait_empty(LATE_S)
    assert fleet[other].process.poll() is None
    fleet.start(name)
    wait_for(lambda: _carries(fleet, seed=150 + OWN[name]), LATE_S)
    works(fleet, seed=160 + OWN[name])
