"""vLLM's real scheduler whose weights change: what was computed with others is neither offered nor used."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvbridge_proto.engine import Abandon, Computed, Done, Offer, Release, Released, Want, Weights
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from testing.serving import serving
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.world import World
from tests.support.pages import run_block

pytestmark = pytest.mark.vllm


def name_weights(world: World, version: str) -> None:
    """As vLLM's /update_weight_version and finish_weight_update do, in the engine core."""
    core: Any = SimpleNamespace(scheduler=world.scheduler)
    EngineCore.set_weight_version(core, version)


def why_computed(world: World) -> list[str]:
    world.run()
    world.step()
    return [each.reason for each in world.agent.take(Computed)]


def prefilled(world: World, **more: Any) -> dict[str, Any]:
    """What the prefill side answers to a proxy."""
    world.prefill(40, **more)
    params: dict[str, Any] = world.step().outputs[0].kv_transfer_params
    return params


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cache_reset_succeeds_at_once_while_prompts_are_held_and_gives_them_up(
    world: World, agent: FakeAgent, is_running: bool
) -> None:
    """vLLM's own reset failed until `hold_s` was over, and with `reset_running_requests` it raised."""
    prefilled(world)
    offer = agent.one(Offer)
    pool = world.scheduler.kv_cache_manager.block_pool
    assert world.free_blocks == 99 - 3
    assert world.scheduler.reset_prefix_cache(reset_running_requests=is_running, reset_connector=True) is True
    assert world.free_blocks == 99 - 3, "the agent may still read them"
    assert not any(block.block_hash for block in pool.blocks)
    world.step()
    assert agent.one(Weights).version == ""
    agent.say(Released(number=offer.number, request=offer.request, code="other_weights"))
    world.finish()


def test_a_reset_fails_while_a_request_runs_even_if_it_shares_held_blocks(world: World, agent: FakeAgent) -> None:
    prompt = list(range(48))
    prefilled(world, prompt=prompt)
    world.request(prompt=[*prompt, 1, 2], max_tokens=8)
    world.steps(2)
    assert world.scheduler.reset_prefix_cache() is False
    with pytest.raises(AttributeError):
        del world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks  # nothing of ours is left in it


def test_a_reset_that_preempts_what_runs_succeeds_though_it_shares_held_blocks(world: World) -> None:
    """A common beginning of prompts. vLLM raises, which ends the engine, if a block is used after it has preempted."""
    prompt = list(range(48))
    prefilled(world, prompt=prompt)
    world.request(prompt=[*prompt, 1, 2], max_tokens=8)
    world.steps(2)
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True) is True


@pytest.mark.proves("G10")
def test_after_a_reset_nothing_is_offered_or_fetched_until_the_weights_are_named(
    world: World, agent: FakeAgent
) -> None:
    world.scheduler.reset_prefix_cache()
    params = prefilled(world)
    assert params["remote_weights"] == "", "the decode side learns the true reason"
    assert not agent.take(Offer) and world.free_blocks == 99
    world.decode(40)
    assert why_computed(world) == ["other_weights"] and not agent.take(Want)
    name_weights(world, "step-7")
    world.step()
    assert [each.version for each in agent.take(Weights)] == ["", "step-7"]
    assert [each.tokens for each in agent.take(Offer)] == [0], "whoever waits for it learns that nothing comes"
    assert prefilled(world)["remote_weights"] == "step-7"
    assert agent.one(Offer).is_last
    world.decode(40, remote_weights="step-7")
    world.step()
    assert agent.one(Want)


@pytest.mark.parametrize("theirs", ["", "step-6"])
def test_a_prompt_of_other_weights_is_computed_here_and_counted(world: World, agent: FakeAgent, theirs: str) -> None:
    """Whichever side was reset, and whichever was named first."""
    world.decode(40, remote_weights=theirs)
    assert why_computed(world) == ["other_weights"] and not agent.take(Want)
    world.finish()


def test_prompts_of_other_weights_are_logged_once_for_each_update_here(
    world: World, vllms_log: pytest.LogCaptureFixture
) -> None:
    """While engines are updated one after the other, each prompt is one."""

    def logged() -> int:
        return sum("computed here" in each.getMessage() for each in vllms_log.records if each.levelno >= logging.INFO)

    vllms_log.set_level(logging.DEBUG, "vllm.kvbridge.scheduler")
    for theirs in ("1", "1", "2"):
        world.decode(40, remote_weights=theirs)
    assert logged() == 1
    name_weights(world, "3")
    for _ in range(2):
        world.decode(40, remote_weights="2")
    assert logged() == 2
    world.finish()


def test_a_request_that_queues_at_a_reset_is_computed_here(world: World, agent: FakeAgent) -> None:
    world.decode(40)
    world.scheduler.reset_prefix_cache()
    world.step()
    assert agent.take(Abandon) and not agent.take(Want)
    assert why_computed(world) == ["other_weights"]
    world.finish()


@pytest.mark.proves("G10")
def test_rows_that_come_after_the_weights_have_changed_are_not_used(world: World, agent: FakeAgent) -> None:
    """The agent answered before it heard of the change."""
    request = world.decode(40)
    world.step()
    want = agent.one(Want)
    agent.say(Done(number=want.number, request=want.request, moved_bytes=1, seconds=0.1))
    name_weights(world, "step-7")
    assert why_computed(world) == ["other_weights"]
    assert request.num_computed_tokens >= 40
    world.finish()


@pytest.mark.proves("G10")
def test_a_prompt_that_was_computed_in_part_before_the_change_is_not_offered(world: World, agent: FakeAgent) -> None:
    world.prefill(150)  # 64 tokens a step
    world.step()
    offer = agent.one(Offer)
    name_weights(world, "step-7")
    world.step()
    agent.say(Released(number=offer.number, request=offer.request, code="other_weights"))
    output = world.step().outputs[0]
    assert output.kv_transfer_params["remote_weights"] == ""
    assert not agent.take(Offer)
    world.finish()


def test_a_pause_gives_up_what_nobody_fetches(world: World, agent: FakeAgent) -> None:
    """vLLM's /pause waits until no block is held."""
    prefilled(world)
    world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    world.step()
    assert agent.one(Release)
    offer = agent.one(Offer)
    agent.say(Released(number=offer.number, request=offer.request, code="reclaimed"))
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    world.finish()


def test_a_prompt_that_ends_while_vllm_pauses_is_not_held_for_hold_s(world: World, agent: FakeAgent) -> None:
    """`/pause?mode=wait` lets what runs end, and then waited for `hold_s`."""
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    world.prefill(100)  # 64 tokens a step
    world.step()
    world.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    world.step()
    assert world.scheduler.has_finished_requests() and not agent.take(Release)
    world.step()
    first, offer = agent.take(Offer)
    assert agent.one(Release) and offer.is_last
    agent.say(Released(number=offer.number, request=first.request, code="reclaimed"))
    world.finish()
    assert not world.scheduler.has_requests()
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    prefilled(world)
    world.step()
    assert not agent.take(Release)


def test_resets_may_be_said_to_keep_the_weights(hooks: str, tmp_path: Path) -> None:
    world = World(tmp_path, hooks=hooks, extra={"kvbridge_resets_keep_weights": True}).ready()
    prefilled(world)
    assert world.scheduler.reset_prefix_cache() is True
    world.step()
    assert world.agent.one(Release) and not world.agent.take(Weights)
    assert prefilled(world)["remote_weights"] == "default"


@pytest.mark.parametrize("prompt_logprobs", [0, 3])
def test_a_prompt_that_is_computed_whole_anyway_is_not_fetched_but_counted(
    world: World, agent: FakeAgent, prompt_logprobs: int
) -> None:
    """vLLM 0.26 answered with an unfilled tensor for the tokens that had come."""
    world.decode(40, prompt_logprobs=prompt_logprobs)
    world.request(40, prompt_logprobs=prompt_logprobs)
    assert why_computed(world) == ["reads_all", "reads_all"]
    declined = agent.one(Want)
    assert (declined.first_token, declined.end_token) == (0, 0), "the prefill side may free its blocks"
    world.finish()


def test_the_pages_commands_change_the_weights_through_vllms_own_routes() -> None:
    """Of a server that is not there: only what it is told."""
    fastapi: Any = pytest.importorskip("fastapi")
    from vllm.entrypoints.rl.online.api_router import router
    from vllm.entrypoints.serve.dev.rpc.api_router import router as dev_router

    told: list[Any] = []

    class Engine:
        def __getattr__(self, name: str) -> Any:
            async def call(*args: Any, **kwargs: Any) -> None:
                told.append((name, *args, *(kwargs[key] for key in ("mode", "method", "kwargs") if key in kwargs)))

            return call

    app = fastapi.FastAPI()
    app.state.engine_client = Engine()
    for each in (router, dev_router):
        app.include_router(each)
    with serving(app) as url:
        run_block("docs/operations.md", "# vLLM 0.32", {"ENGINE": url, "CHECKPOINT": "/models/7", "STEP": "7"})
    assert told == [
        ("pause_generation", "abort"),
        ("collective_rpc", "reload_weights", {"weights_path": "/models/7"}),
        ("update_weight_version", "7"),
        ("resume_generation",),
    ]
