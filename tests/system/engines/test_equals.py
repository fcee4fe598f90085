"""Real engines whose agents meet each other: what one has computed of a prompt, the others fetch, whatever their roles.

Each answer must be the one that an engine alone gives.
"""

from __future__ import annotations

import pytest
from kvbridge_proto.common import PREFIX_TOKENS

from testing.kept import SYSTEM, TRIES, USER, AllMeet, kept
from testing.waiting import wait_for
from tests.system.engines.engine_process import EngineProcess, Result
from tests.system.engines.fleet import Fleet, name_weights, reweigh
from tests.system.engines.halfway import STANDS, are_standing, go_on, start_agents
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ANSWER = 12  # tokens
KEPT = SYSTEM // PREFIX_TOKENS * PREFIX_TOKENS
FETCHED = {name: KEPT // block * block for name, block in (("small", 32), ("large", 128), ("private", 128))}


class Equals(AllMeet[EngineProcess], Fleet):
    """Two prefill engines (small, large), a decode engine (private), and one alone."""

    def fetching(self, holder: str, other: str) -> tuple[list[int], Result, str]:
        """One engine computes a prompt, and the other fetches what one of another user begins with."""

        def tried(first: list[int], second: list[int]) -> tuple[list[int], Result, str] | None:
            self.prefill(holder, first)
            self.step(other)
            before = self.moved_bytes(other)
            request, prefilled = self.prefill(other, second)
            assert not prefilled.cached or self.moved_bytes(other) > before
            return (second, prefilled, request) if prefilled.cached else None

        return self.search(tried)

    def computing(self, holder: str) -> list[int]:
        """The same, if the other is the decode engine, which has no prefix cache: it fetches such a prompt again."""

        def tried(first: list[int], second: list[int]) -> list[int] | None:
            self.prefill(holder, first)
            self.step("private")
            answer = self["private"].run(self.name("u"), second, ANSWER)
            assert list(answer.tokens) == self.alone(second, ANSWER)
            assert answer.cached in (0, FETCHED["private"])
            return second if answer.cached else None

        return self.search(tried)

    def step(self, name: str) -> None:
        """An engine hears what others keep in its steps."""
        self[name].run(self.name("step"), self.new(8), 1)


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
    fleet.computing("small")


def test_a_decode_engine_goes_on_with_what_another_has_answered(fleet: Equals) -> None:
    """Prefill has the prompt, and the decode engine that answered it more."""
    for _ in range(TRIES):
        (said,) = fleet.users(1)
        _, prefilled = fleet.prefill("small", said)
        answer = fleet["large"].run(fleet.name("d"), said, 150, prefilled.params)
        assert answer.cached == len(said) - 1, "the prompt did not travel, it was computed again"
        said += [*answer.tokens, *fleet.new(USER)]
        fleet.step("private")
        again = fleet["private"].run(fleet.name("u"), said, ANSWER)
        assert list(again.tokens) == fleet.alone(said, ANSWER)
        if again.cached == (SYSTEM + USER + 149) // 128 * 128:
            return
    raise AssertionError("it never fetched the answer")


def test_answers_to_one_prompt_at_several_decode_engines_compute_it_once(fleet: Equals) -> None:
    """One takes what was offered, the other fetches what prefill or the first one keeps of it."""
    for _ in range(TRIES):
        (said,) = fleet.users(1)
        _, prefilled = fleet.prefill("small", said)
        fleet.step("private")
        answers = [fleet[name].run(fleet.name("d"), said, ANSWER, prefilled.params) for name in ("large", "private")]
        assert [list(answer.tokens) for answer in answers] == [fleet.alone(said, ANSWER)] * 2
        assert answers[0].cached == len(said) - 1
        if answers[1].cached:
            assert answers[1].cached == (len(said) - 1) // 128 * 128
            return
    raise AssertionError("the second never fetched it")


def test_if_the_holders_agent_is_killed_the_prompt_is_computed(fleet: Equals) -> None:
    fleet.fetching("small", "large")  # they know each other
    first, second = fleet.users(2)
    fleet.prefill("small", first)
    fleet.agents["small"][0].kill()
    _, prefilled = fleet.prefill("large", second)
    assert prefilled.cached in (0, FETCHED["large"])
    answer = fleet["private"].run(fleet.name("d"), second, ANSWER, prefilled.params)
    assert list(answer.tokens) == fleet.alone(second, ANSWER)
    start_agents(fleet, "small")
    _, prefilled, _ = fleet.fetching("small", "large")  # and again once it is back
    assert prefilled.cached == FETCHED["large"]


def test_if_the_holders_agent_is_killed_while_it_is_read_the_answer_is_the_same(fleet: Equals) -> None:
    said = fleet.computing("small")
    start_agents(fleet, "private", STANDS)
    for _ in range(TRIES):
        fleet.step("private")
        wanted = fleet.name("u")
        fleet["private"].submit(wanted, said, ANSWER)
        wait_for(lambda: are_standing(fleet, "private") or fleet["private"].take(0.05))
        if are_standing(fleet, "private"):
            break
    fleet.agents["small"][0].kill()
    go_on(fleet, "private")
    answer = fleet["private"].result(wanted)
    assert answer.cached in (0, FETCHED["private"])
    assert list(answer.tokens) == fleet.alone(said, ANSWER)
    start_agents(fleet, "small")
    start_agents(fleet, "private")
    fleet.computing("small")


def test_what_was_kept_under_other_weights_is_computed(fleet: Equals) -> None:
    """The last test here: this engine has other weights then."""
    said = fleet.computing("small")
    reweigh(fleet["small"])
    for version in ("", "B"):
        if version:
            name_weights(fleet["small"], version)
            fleet.prefill("small", said)
        for _ in range(8):  # by when word of it would have come
            fleet.step("private")
            answer = fleet["private"].run(fleet.name("u"), said, ANSWER)
            assert answer.cached == 0 and list(answer.tokens) == fleet.alone(said, ANSWER)
