"""On a GPU a step returns before it is computed. So messages carry a fence count, for which the agent waits."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvbridge_proto.engine import Offer, Want

from kvbridge.device.fence import EngineFence
from tests.integration.adapters.fake_agent import FakeAgent
from tests.integration.adapters.world import World

pytestmark = pytest.mark.vllm


class Ordered:
    """A fence and a forward that write down in which order the connector came to them."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fence = EngineFence("cpu")
        self.fd = self.fence.fd

    @property
    def upcoming(self) -> int:
        return self.fence.upcoming

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


@pytest.fixture
def world(hooks: str, tmp_path: Path, ordered: Ordered) -> World:
    return World(tmp_path, hooks=hooks, fence_of=lambda _: ordered, on_forward=ordered.forward).ready()


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
