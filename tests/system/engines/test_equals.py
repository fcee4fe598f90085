"""Real engines whose agents meet each other: what one has computed of a prompt, the others fetch, whatever their roles.

Each answer must be the one that an engine alone gives.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from testing.kept import kept
from tests.system.engines.engine_process import Result
from tests.system.engines.fleet import Fleet, prompt
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SYSTEM, USER, ANSWER = 1000, 40, 12  # tokens
KEPT = SYSTEM // PREFIX_TOKENS * PREFIX_TOKENS
FETCHED = {name: KEPT // block * block for name, block in (("small", 32), ("large", 128), ("private", 128))}
TRIES = 200


class Equals(Fleet):
    """Two prefill engines (small, large), a decode engine (private), and one alone."""

    def __init__(self, folder: Path, stack: ExitStack, **more: Any) -> None:
        self._listed = folder / "agents"
        self._listed.touch()
        self.agent_options = {**Fleet.agent_options, "meet": f"file://{self._listed}"}
        super().__init__(folder, stack, **more)
        self._seeds = iter(range(100, 1_000_000))

    def start_agents(self, name: str) -> None:
        super().start_agents(name)
        addresses = [each.address for agents in self.agents.values() for each in agents]
        self._listed.write_text("".join(f"{address}\n" for address in addresses))

    def users(self, count: int) -> list[list[int]]:
        """Prompts with one new system prompt."""
        system = prompt(SYSTEM, seed=next(self._seeds))
        return [system + prompt(USER, seed=next(self._seeds)) for _ in range(count)]

    def fetching(self, holder: str, other: str) -> tuple[list[int], Result, str]:
        """One engine computes a prompt; the other gets one that begins so, until word of the first came in time."""
        for _ in range(TRIES):
            first, second = self.users(2)
            self.prefill(holder, first)
            self.step(other)
            before = self.moved_bytes(other)
            request, prefilled = self.prefill(other, second)
            if prefilled.cached:
                assert self.moved_bytes(other) > before
                return second, prefilled, request
        raise AssertionError(f"{other} never fetched what {holder} has")

    def step(self, name: str) -> None:
        """An engine hears what others keep in its steps."""
        self[name].run(self.name("step"), prompt(8, seed=next(self._seeds)), 1)


fleet = kept(
    Equals, dtype="float32", options={"kvbridge_return_s": 120.0}, start=("small", "large", "private", "alone")
)


@pytest.mark.parametrize(("holder", "other"), [("small", "large"), ("large", "small")])
def test_a_prefill_engine_computes_only_what_no_other_has(fleet: Equals, holder: str, other: str) -> None:
    said, prefilled, request = fleet.fetching(holder, other)
    assert prefilled.cached == FETCHED[other], "of a system prompt, whole prefixes and blocks are fetched"
    ours = fleet.rows(other, request, 0, FETCHED[other])
    answer = fleet["private"].run(fleet.name("d"), said, ANSWER, prefilled.params)
    assert answer.cached == len(said) - 1, "the prompt did not travel, it was computed again"
    assert list(answer.tokens) == fleet.alone(said, ANSWER)
    again, _ = fleet.prefill(holder, said)  # it has the system prompt in its own cache
    assert_carried(fleet.rows(holder, again, 0, FETCHED[other]), ours)


def test_a_decode_engine_that_computes_a_prompt_itself_fetches_what_prefill_has(fleet: Equals) -> None:
    for _ in range(TRIES):
        first, said = fleet.users(2)
        fleet.prefill("small", first)
        fleet.step("private")
        answer = fleet["private"].run(fleet.name("u"), said, ANSWER)
        if answer.cached:
            break
    assert answer.cached == FETCHED["private"]
    assert list(answer.tokens) == fleet.alone(said, ANSWER)


def test_if_the_holders_agent_is_killed_the_prompt_is_computed(fleet: Equals) -> None:
    fleet.fetching("small", "large")  # they know each other
    first, second = fleet.users(2)
    fleet.prefill("small", first)
    fleet.agents["small"][0].kill()
    _, prefilled = fleet.prefill("large", second)
    assert prefilled.cached in (0, FETCHED["large"])
    answer = fleet["private"].run(fleet.name("d"), second, ANSWER, prefilled.params)
    assert list(answer.tokens) == fleet.alone(second, ANSWER)
    fleet.start_agents("small")
    _, prefilled, _ = fleet.fetching("small", "large")  # and again once it is back
    assert prefilled.cached == FETCHED["large"]
