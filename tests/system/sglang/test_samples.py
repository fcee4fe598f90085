"""Several answers to one prompt: SGLang makes n + 1 requests of it, and each has its own transfer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.adapters.sglang.samples import SampleRooms
from testing.kept import kept
from testing.waiting import wait_for
from tests.system.sglang.fleet import CONFIGS, TOKENS, Fleet, answer_of, assert_idle, assert_same_tokens, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

N = 3


fleet = kept(Fleet, others={"d32-plain": replace(CONFIGS["d32"], keeps_prefixes=False)}, start=("p16", "d32", "alone"))


def sampled(fleet: Fleet, tokens: Any, room: Any, n: int = N, **more: Any) -> dict[str, Any]:
    """A body that asks for `n` answers; `more` are sampling parameters."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "n": n} | more
    return fleet.body("p16", tokens, room, sampling_params=sampling)


def works(fleet: Fleet, receiver: str, body: dict[str, Any], prompts: list[list[int]]) -> None:
    """All answers to a prompt are the greedy one."""
    given, (status, said) = fleet.both("p16", receiver, body)
    assert status == 200, (said, given)
    expected = [tokens for tokens in prompts for _ in range(len(said) // len(prompts))]
    for tokens, each in zip(expected, said, strict=True):
        assert_same_tokens(fleet.alone(tokens), answer_of(each))
    assert_idle(fleet, "p16", receiver)


@pytest.mark.parametrize("receiver", ["d32", "d32-plain"])
def test_each_is_carried_and_says_what_one_server_alone_says(fleet: Fleet, receiver: str) -> None:
    """A decoding side that keeps prefixes fetches the prompt's once."""
    tokens, room, rooms = prompt(300, seed=71 + len(receiver)), fleet.room(), SampleRooms()
    works(fleet, receiver, sampled(fleet, tokens, room), [tokens])
    for _ in range(N + 1):
        each = rooms.next(room)
        assert isinstance(each, int)
        assert_carried(*fleet.rows("p16", receiver, each))


@pytest.mark.parametrize("shared", ["follow each other", "differ", "are one"])
def test_prompts_of_a_call_whose_rooms(fleet: Fleet, shared: str) -> None:
    prompts = [prompt(length, seed=81 + len(shared)) for length in (100, 130)]
    room = fleet.room()
    rooms = {"follow each other": room, "differ": [room, room + 1000], "are one": [room, room]}[shared]
    works(fleet, "d32", sampled(fleet, prompts, rooms), prompts)


def test_a_room_may_be_used_again(fleet: Fleet) -> None:
    room = fleet.room()
    for seed, n in ((91, 2), (92, 3), (91, 2)):
        tokens = prompt(110, seed=seed)
        works(fleet, "d32", sampled(fleet, tokens, room, n), [tokens])


@pytest.mark.parametrize("where", ["p16", "d32"], ids=["is prefilled", "is decoded"])
def test_a_client_that_leaves_while_its_prompt(fleet: Fleet, where: str) -> None:
    room = fleet.room()
    body = sampled(fleet, prompt(3000, seed=ord(where[0])), room, max_new_tokens=3000)
    connections = [fleet[name].begin(body) for name in ("p16", "d32")]
    held = "num_used_tokens" if where == "p16" else "num_running_reqs"
    wait_for(lambda: fleet[where].held()[held], 30)
    for connection in connections:
        connection.close()
    assert_idle(fleet, "p16", "d32", timeout_s=60)
    tokens = prompt(90, seed=111)
    works(fleet, "d32", sampled(fleet, tokens, room), [tokens])


OTHERS: list[dict[str, Any]] = [{"top_p": 5}, {"n": 1}, {"n": N + 1}]


@pytest.mark.parametrize("name", ["p16", "d32"])
@pytest.mark.parametrize("other", OTHERS, ids=["bad", "one", "one more"])
def test_a_side_that_is_told_something_else(fleet: Fleet, name: str, other: dict[str, Any]) -> None:
    """What the other side waits for never comes: it is given up, and nothing is held."""
    tokens, room = prompt(120, seed=121), fleet.room()
    bodies = {each: sampled(fleet, tokens, room, **(other if each == name else {})) for each in ("p16", "d32")}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda each: fleet[each].generate(bodies[each]), bodies))
    assert {200} != {status for status, _ in answers}, answers
    assert_idle(fleet, "p16", "d32", timeout_s=60)
    works(fleet, "d32", sampled(fleet, tokens, room), [tokens])
