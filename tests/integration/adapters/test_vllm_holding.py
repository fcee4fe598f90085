"""Prompts that wait to be fetched, with vLLM's real scheduler: neither side forgets the other's wait."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvbridge_proto.engine import Expect, Offer, Reclaim, Released, Want
from vllm.v1.core.sched.interface import PauseState

from kvbridge.adapters.vllm import pressure
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.world import World

pytestmark = [pytest.mark.vllm, pytest.mark.proves("G17")]
BLOCKS = 12  # one of them is vLLM's null block


@pytest.fixture
def world(hooks: str, tmp_path: Path) -> World:
    return World(tmp_path, hooks=hooks, blocks=BLOCKS).ready()


@pytest.fixture(autouse=True)
def ask_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "RECLAIM_AGAIN_S", 0.0)


def filled(world: World) -> list[Offer]:
    """Two prompts that nobody fetches hold 8 of 11 blocks."""
    for _ in range(2):
        world.prefill(60)
        world.step()
    return world.agent.take(Offer)


def test_asks_for_blocks_while_a_prompt_that_came_has_none(world: World, agent: FakeAgent) -> None:
    held = filled(world)
    world.steps(3)
    assert not agent.take(Reclaim), "nobody lacks a block"
    world.prefill(60)
    world.step()
    assert agent.take(Reclaim)[-1].blocks == 4 - 3
    assert not agent.take(Offer)
    agent.say(Released(number=held[0].number, request="r", code="reclaimed"))
    world.steps(2)
    assert agent.one(Offer).is_last
    agent.take(Reclaim)
    world.steps(3)
    assert not agent.take(Reclaim), "it has what it needs"


def test_a_running_request_waits_for_held_blocks_before_others_are_preempted(world: World, agent: FakeAgent) -> None:
    if world.hooks == "0.26":
        pytest.skip("vLLM 0.26 asks no connector before it preempts")
    held = filled(world)
    running = world.request(47, max_tokens=8)  # has 3 blocks; its second token needs a fourth
    world.steps(4)
    assert agent.take(Reclaim)[-1].blocks == 1
    agent.say(Released(number=held[0].number, request="r", code="reclaimed"))
    world.steps(4)
    assert running.num_preemptions == 0
    assert running.num_output_tokens > 2


def test_a_request_that_queues_says_what_it_will_want(world: World, agent: FakeAgent) -> None:
    filled(world)
    request = world.decode(60, remote_request_id="theirs")
    world.step()
    expected = agent.one(Expect)
    assert expected.sender == "tcp://10.0.0.1:7700"
    world.abort(request)
    world.step()
    want = agent.one(Want)
    assert (want.number, want.rendezvous, want.end_token) == (expected.number, expected.rendezvous, 0), "it ends it"


def test_a_request_that_queues_in_a_paused_engine_says_what_it_will_want(world: World, agent: FakeAgent) -> None:
    """vLLM makes steps then only if it is asked for one."""
    world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    world.decode(60)
    assert world.run() == []
    expected = agent.one(Expect)
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    world.steps(2)
    assert agent.one(Want).number == expected.number


def test_a_request_that_does_not_queue_says_only_what_it_wants(world: World, agent: FakeAgent) -> None:
    world.decode(60)
    world.steps(3)
    assert agent.one(Want) and not agent.take(Expect)


def test_an_engine_that_takes_long_steps_is_not_idle(world: World, agent: FakeAgent) -> None:
    world.request(20, max_tokens=30)
    world.steps(3)

    def compute() -> None:
        world.clock.now += 5

    world.on_forward = compute
    for _ in range(3):
        world.step()
        request = world.decode(20)
        world.step()
        assert agent.take(Want), "the workers were asked once more whether they have agents"
        world.abort(request)
