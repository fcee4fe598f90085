"""A prompt that is aborted where it is decoded, or whose agent is killed, while its rows go to the other engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from testing.kept import Kept
from testing.waiting import wait_for
from tests.system.cross.fleet import SEEDS, TOKENS, Cross
from tests.system.engines.halfway import BACK_S, STANDS, go_on, start_agents, wait_standing
from tests.system.sglang.fleet import Answer, answer_of, assert_idle, assert_same_tokens, prompt
from tests.system.sglang.test_faults import failed

ends = pytest.mark.parametrize("ends", ["abort", "sender", "receiver"])


@dataclass(frozen=True)
class Pair:
    """Of engines each way, whose tokens are those of SGLang alone. Each has one agent."""

    cross: Cross
    to_sglang: tuple[str, str]
    to_vllm: tuple[str, str]

    def logs(self) -> list[tuple[str, str]]:
        return self.cross.logs()


class Interrupted:
    """Tests of a module's fixture `pair`."""

    @ends
    def test_rows_are_on_their_way_to_sglang(self, pair: Pair, ends: str) -> None:
        """It ends in an error, or as it would have: with what was read under a lease."""
        cross, (sender, receiver) = pair.cross, pair.to_sglang
        cross.vllm.start(sender)
        cross.sglang.start(receiver)
        start_agents(cross.sglang, receiver, STANDS)
        tokens = prompt(200, seed=next(SEEDS))
        _, body = cross.for_sglang(sender, tokens)
        begun = cross.sglang[receiver].begin(body | {"rid": f"halfway-{ends}"})
        _interrupt(
            ends, cross.vllm, sender, cross.sglang, receiver, lambda: cross.sglang[receiver].abort(f"halfway-{ends}")
        )
        answer = cross.sglang[receiver].ended(begun)
        assert ends == "sender" or failed(answer), answer
        if not failed(answer):
            assert_same_tokens(cross.sglang.alone(tokens), answer_of(answer[1]))

        def is_carried() -> bool:
            _, body = cross.for_sglang(sender, prompt(50, seed=next(SEEDS)))
            return not failed(cross.sglang[receiver].generate(body))

        wait_for(is_carried, BACK_S)
        tokens = prompt(200, seed=next(SEEDS))
        assert_same_tokens(cross.sglang.alone(tokens), cross.to_sglang(sender, receiver, tokens)[0])
        _assert_idle(cross, sender, receiver)

    @ends
    def test_rows_are_on_their_way_to_vllm(self, pair: Pair, ends: str) -> None:
        """vLLM computes what does not come."""
        cross, (sender, receiver) = pair.cross, pair.to_vllm
        cross.sglang.start(sender)
        cross.vllm.start(receiver)
        start_agents(cross.vllm, receiver, STANDS)
        tokens, request = prompt(200, seed=next(SEEDS)), cross.vllm.name("halfway")
        begun, params = cross.for_vllm(sender, tokens)
        cross.vllm[receiver].submit(request, tokens, TOKENS, params)
        _interrupt(ends, cross.sglang, sender, cross.vllm, receiver, lambda: cross.vllm[receiver].abort(request))
        if ends != "abort":
            answer = cross.vllm[receiver].result(request)
            assert ends == "sender" or answer.cached == 0, answer
            assert_same_tokens(cross.sglang.alone(tokens), Answer(answer.tokens, (), answer.cached, None))
        cross.sglang[sender].ended(begun)

        def is_carried() -> bool:
            tokens = prompt(50, seed=next(SEEDS))
            begun, params = cross.for_vllm(sender, tokens)
            answer = cross.vllm[receiver].run(cross.vllm.name("again"), tokens, TOKENS, params)
            return cross.sglang[sender].ended(begun)[0] == 200 and answer.cached == len(tokens) - 1

        wait_for(is_carried, BACK_S)
        tokens = prompt(200, seed=next(SEEDS))
        found, cached, _, _ = cross.to_vllm(sender, receiver, tokens)
        assert cached == len(tokens) - 1
        assert_same_tokens(cross.sglang.alone(tokens), Answer(tuple(found), (), 0, None))
        _assert_idle(cross, receiver, sender)


def _interrupt(
    ends: str, ours: Kept[Any], sender: str, theirs: Kept[Any], receiver: str, abort: Callable[[], None]
) -> None:
    """The receiver's agent stands still, about to read. Afterwards agents are there again."""
    wait_standing(theirs, receiver)
    if ends == "receiver":
        theirs.agents[receiver][0].process.kill()
        start_agents(theirs, receiver)
        return
    if ends == "abort":
        abort()
    else:
        ours.agents[sender][0].process.kill()
    go_on(theirs, receiver)
    if ends == "sender":
        start_agents(ours, sender)


def _assert_idle(cross: Cross, of_vllm: str, of_sglang: str) -> None:
    assert_idle(cross.sglang, of_sglang)
    cross.vllm[of_vllm].wait_empty(BACK_S)
