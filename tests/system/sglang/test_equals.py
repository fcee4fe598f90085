"""Real SGLang prefill servers whose agents meet each other: what one has computed of a prompt, the other fetches.

Each answer must be the one that a server alone gives.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from demo.model import HEAD_WIDTH, KV_HEADS, LAYERS
from testing.kept import SYSTEM, TRIES, AllMeet, kept
from testing.waiting import wait_for
from tests.system.sglang.fleet import Answer, Fleet, answer_of, assert_idle, assert_same_tokens, prompt
from tests.system.sglang.server import Server, ServerConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
ANSWER = 12  # tokens
KEPT = SYSTEM // PREFIX_TOKENS * PREFIX_TOKENS
ROW_BYTES = LAYERS * KV_HEADS * 2 * HEAD_WIDTH * 4  # of one token, in fp32
KEEPS = {"KVBRIDGE_ENGINE_RETURN_S": "600"}
SMALL = ServerConfig("prefill", max_total_tokens=4096, environment=KEEPS)
OTHERS = {"p16-keeps": SMALL, "p64-keeps": replace(SMALL, page_size=64)}
DECODES = "d16"


class Equals(AllMeet[Server], Fleet):
    """Two prefill servers that keep their prompts, a decode server, and one alone."""

    def answers(self, sender: str, tokens: list[int]) -> int:
        """Through this prefill server, as one alone does; returns how many of its tokens that had not to compute."""
        given, (status, taken) = self.both(sender, DECODES, self.body(sender, tokens, self.room(), ANSWER))
        assert status == 200 and given[0] == 200, (taken, given)
        answer: Answer = answer_of(taken)
        assert_same_tokens(self.alone(tokens, ANSWER), answer)
        return answer_of(given[1]).cached

    def fetching(self, holder: str, other: str) -> tuple[list[int], int]:
        """One server computes a prompt; the other gets one that begins so, until word of the first came in time."""
        for _ in range(TRIES):
            first, second = self.users(2)
            self.answers(holder, first)
            before = self.moved_bytes(other)
            if cached := self.answers(other, second):
                assert self.moved_bytes(other) - before == cached * ROW_BYTES
                return second, cached
        raise AssertionError(f"{other} never fetched what {holder} has")


fleet = kept(Equals, others=OTHERS, start=("p16-keeps", "p64-keeps", DECODES, "alone"))


@pytest.mark.parametrize(("holder", "other"), [("p16-keeps", "p64-keeps"), ("p64-keeps", "p16-keeps")])
def test_a_prefill_server_computes_only_what_no_other_has(fleet: Equals, holder: str, other: str) -> None:
    said, cached = fleet.fetching(holder, other)
    assert cached == KEPT, "of a system prompt whole prefixes are fetched"
    assert fleet.answers(holder, said) >= SYSTEM - SYSTEM % OTHERS[holder].page_size, "it has that itself"


def test_behind_the_proxy_it_does_not_matter_which_server_gets_a_prompt(fleet: Equals) -> None:
    """Requests go to either in turn. Neither the client nor the proxy need to know who has what."""
    senders = list(OTHERS)
    with fleet.proxy(senders, DECODES) as ask:
        before = moved = sum(map(fleet.moved_bytes, senders))
        for _ in range(TRIES):
            for said in fleet.users(2):
                assert_same_tokens(fleet.alone(said, ANSWER), ask(said, ANSWER))
            if (moved := sum(map(fleet.moved_bytes, senders))) > before:
                break
    assert moved - before == KEPT * ROW_BYTES


def test_prompts_get_the_pages_of_what_is_kept(fleet: Equals) -> None:
    """One that needs more than is left: it would wait for as long as prompts are kept."""
    fleet.fetching("p16-keeps", "p64-keeps")
    for seed in range(4):  # half of the pool is kept
        fleet.answers("p16-keeps", prompt(1000, seed=seed))
    (agent,) = fleet.agents["p16-keeps"]
    wait_for(lambda: len(agent.status.offers) == 2)
    fleet.answers("p16-keeps", prompt(3500, seed=11))
    assert fleet["p16-keeps"].ask("/flush_cache", {})[0] == 200
    assert fleet["p64-keeps"].ask("/flush_cache", {})[0] == 200
    assert_idle(fleet, "p16-keeps", "p64-keeps", DECODES)


def test_if_the_holders_agent_is_killed_the_prompt_is_computed(fleet: Equals) -> None:
    fleet.fetching("p16-keeps", "p64-keeps")  # they know each other
    first, second = fleet.users(2)
    fleet.answers("p16-keeps", first)
    fleet.agents["p16-keeps"][0].kill()
    assert fleet.answers("p64-keeps", second) in (0, KEPT)
    fleet.start_agents("p16-keeps")
    wait_for(lambda: fleet.agents["p16-keeps"][0].status.engine is not None)
    assert fleet.fetching("p16-keeps", "p64-keeps")[1] == KEPT, "and again once it is back"
