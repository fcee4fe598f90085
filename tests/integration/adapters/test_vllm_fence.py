"""On a GPU a step returns before it is computed. So messages carry a fence count, for which the agent waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvbridge_proto.engine import Directory, Done, Offer, Want

from kvbridge.device.fence import EngineFence
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.world import HOOKS, World

pytestmark = pytest.mark.vllm


class Ordered:
    """A fence and a forward that write down in which order the connector came to them."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fence = EngineFence("cpu")
        self.fd = self.fence.fd

    def mark(self) -> int:
        self.happened.append("mark")
        return self.fence.mark()

    def forward(self) -> None:
        self.happened.append("forward")

    def close(self) -> None:
        self.fence.close()


@pytest.fixture
def ordered() -> Ordered:
    return Ordered()


@pytest.fixture(params=HOOKS)
def world(request: pytest.FixtureRequest, tmp_path: Path, ordered: Ordered) -> World:
    return World(tmp_path, hooks=request.param, fence_of=lambda _: ordered, on_forward=ordered.forward).ready()


def test_an_offers_count_is_taken_behind_the_forward_that_writes_its_blocks(
    world: World, agent: FakeAgent, ordered: Ordered
) -> None:
    world.prefill(100)  # 64 tokens a step
    world.step()
    assert (agent.one(Offer).fence, ordered.happened) == (1, ["forward", "mark"])
    world.step()
    assert (agent.one(Offer).fence, ordered.happened) == (2, ["forward", "mark"] * 2)


def test_a_wants_count_is_taken_before_the_forward_which_writes_other_blocks(
    world: World, agent: FakeAgent, ordered: Ordered
) -> None:
    world.request(20)
    world.decode(40)
    world.step()
    assert (agent.one(Want).fence, ordered.happened) == (1, ["mark", "forward"])


def test_one_step_that_offers_and_wants_has_a_count_for_each(world: World, agent: FakeAgent, ordered: Ordered) -> None:
    world.prefill(20)
    world.decode(40)
    world.step()
    assert (agent.one(Want).fence, agent.one(Offer).fence) == (1, 2)
    assert ordered.happened == ["mark", "forward", "mark"]


def test_steps_without_a_transfer_cost_no_mark(world: World, agent: FakeAgent, ordered: Ordered) -> None:
    world.request(20)
    world.run()
    world.decode(1)  # says that it wants nothing: no block of it is written
    world.run()
    assert agent.one(Want).fence == 0
    assert "mark" not in ordered.happened


def test_memory_of_a_cpu_has_no_fence(tmp_path: Path) -> None:
    world = World(tmp_path).ready()
    (agent,) = world.agents
    assert agent.attaches[0].fence_fd is None
    agent.take(Directory)
    request: Any = world.decode(40)
    world.step()
    want = agent.one(Want)
    assert want.fence == 0
    agent.say(Done(request=want.request, moved_bytes=1, seconds=0.1))
    world.run()
    assert request.is_finished()
