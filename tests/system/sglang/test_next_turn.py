"""Chats between real SGLang servers: the decode server keeps its answers, and the next turn's prefill fetches them.

Each answer must be the one that a server alone gives.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from testing.kept import kept
from testing.waiting import wait_for
from tests.system.sglang.fleet import Answer, Fleet, answer_of, assert_idle, assert_same_tokens, prompt
from tests.system.sglang.server import ServerConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
ANSWER, SAYS = 90, 50  # tokens: of each answer, and of what the user says
TURNS = 8
KEEP_S = 600.0
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 4  # of one token, in fp32

KEEPS = {"KVBRIDGE_ENGINE_RETURN_S": str(KEEP_S)}
RESERVES = ("--num-reserved-decode-tokens", "16")  # so that requests are admitted that outgrow the pool
SMALL = ServerConfig("decode", max_total_tokens=3072, flags=RESERVES, environment=KEEPS)
OTHERS = {
    "d64-keeps": replace(SMALL, page_size=64),
    "d16-keeps-alone": replace(SMALL, keeps_prefixes=False),
}
fleet = kept(Fleet, others=OTHERS, start=("p16", "d64-keeps", "alone"))


def turn(fleet: Fleet, sender: str, receiver: str, said: list[int]) -> tuple[Answer, int]:
    """The answer, and how many tokens of the prompt prefill did not compute."""
    fleet.start(sender, receiver)
    given, (status, taken) = fleet.both(sender, receiver, fleet.body(sender, said, fleet.room(), ANSWER))
    assert status == 200 and given[0] == 200, (taken, given)
    return answer_of(taken), answer_of(given[1]).cached


def chat(fleet: Fleet, sender: str, receiver: str, turns: int, seed: int) -> list[tuple[int, int]]:
    """Of each turn: how many tokens its prompt has, and how many of them prefill did not compute."""
    said, found = prompt(100, seed=seed), []
    for number in range(turns):
        said += prompt(SAYS, seed=seed + 1000 * (number + 1))
        answer, cached = turn(fleet, sender, receiver, said)
        alone = fleet.alone(said, ANSWER)
        assert_same_tokens(alone, answer)
        found.append((len(said), cached))
        said += answer.tokens
        # By when a later prompt has gone the same way, the prefill server has heard what is kept.
        fleet.ask(sender, receiver, [prompt(20, seed=seed + 7 * number)], count=2)
    return found


def continued(prompt: int, receiver: str) -> tuple[int, int]:
    """What prefill need not compute after a prompt of so many tokens and its answer: what it has, and what it fetches.

    Whole pages of its own, and of the answer whole pages of the decode server, up to a multiple that is named.
    """
    kept, own = prompt + ANSWER - 1, prompt - prompt % 16
    for size in (OTHERS[receiver].page_size, PREFIX_TOKENS):
        kept -= kept % size
    return own, kept - own if kept - own >= PREFIX_TOKENS else 0


@pytest.mark.parametrize("receiver", ["d64-keeps", "d16-keeps-alone"])
def test_a_chat_computes_only_what_is_new(fleet: Fleet, receiver: str) -> None:
    turns = chat(fleet, "p16", receiver, TURNS, 11 + ("alone" in receiver))
    expected = [continued(before, receiver) for before, _ in turns[:-1]]
    assert [cached for _, cached in turns[1:]] == [own + fetched for own, fetched in expected], turns
    assert sum(fetched > 0 for _, fetched in expected) >= 3


@pytest.mark.parametrize("receiver", ["d64-keeps", "d16-keeps-alone"])
def test_requests_get_the_pages_of_kept_answers(fleet: Fleet, receiver: str) -> None:
    """Those that wait for pages, and those that decode, which SGLang would retract."""
    fleet.start("p16", receiver)
    assert fleet[receiver].ask("/flush_cache", {})[0] == 200
    (agent,) = fleet.agents[receiver]
    seed = 211 + ("alone" in receiver)
    # One that waits for pages; then two that outgrow the pool as they decode.
    for number, (sizes, count) in enumerate([((2500,), 12), ((1000, 1000), 260)]):
        said = prompt(500, seed=seed + 10 * number)
        answer, _ = turn(fleet, "p16", receiver, said)
        assert_same_tokens(fleet.alone(said, ANSWER), answer)
        wait_for(lambda: len(agent.status.offers) == 1)
        (kept,) = (each.rendezvous for each in agent.status.offers)
        prompts = [prompt(size, seed=seed + 100 * (i + 1) + number) for i, size in enumerate(sizes)]
        for said, (_, answer) in zip(prompts, fleet.ask("p16", receiver, prompts, count), strict=True):
            assert_same_tokens(fleet.alone(said, count), answer)
        wait_for(lambda kept=kept: kept not in {each.rendezvous for each in agent.status.offers})
        assert fleet[receiver].ask("/flush_cache", {})[0] == 200
    assert "Retract requests" not in fleet[receiver].text()
    assert_idle(fleet, "p16", receiver)


def test_a_chat_through_the_proxy(fleet: Fleet) -> None:
    """Neither the client nor the proxy need to know of it."""
    with fleet.proxy(["p16"], "d64-keeps") as ask:
        said, fetched, before = prompt(100, seed=91), 0, fleet.moved_bytes("p16")
        for number in range(3):
            answer = ask(said, ANSWER)
            assert_same_tokens(fleet.alone(said, ANSWER), answer)
            fetched += continued(len(said), "d64-keeps")[1] * (number < 2)
            said += [*answer.tokens, *prompt(SAYS, seed=92 + number)]
            fleet.ask("p16", "d64-keeps", [prompt(20, seed=95 + number)], count=2)
    assert fleet.moved_bytes("p16") - before == fetched * ROW_BYTES > 0
