"""Scales that the first forward computes are told before the first rows under them are offered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvbridge_proto.engine import Offer, Refused, Rescale, Scales, Want
from msgspec.structs import replace

from kvbridge.adapters.vllm_pool import Memory

from .world import World, memory_of

pytestmark = pytest.mark.vllm


class Calibrated:
    """A World whose one layer takes its scale from the first forward."""

    def __init__(self, folder: Path, scale: float = 0.25) -> None:
        self.layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, calculate_kv_scales=True)
        self.scale = scale
        self.world = World(folder, on_forward=self.forward)
        memory = memory_of(0, 1)
        (plane,) = memory.pool.planes
        codec = replace(plane.codec, name="fp8_e4m3", element_bytes=1, width=8, scales=(1.0,))
        pool = replace(memory.pool, planes=(replace(plane, codec=codec, name="layer"),))
        self.world.start_agents()
        self.world.memory_of = lambda rank, tp: Memory(pool, memory.storages)
        self.world.layers = {"layer": self.layer}
        self.world.attach()
        self.world.clock.now += 1
        self.world.steps(3)

    def forward(self) -> None:
        """`Attention.calc_kv_scales` of vLLM 0.26."""
        self.layer._k_scale_float, self.layer.calculate_kv_scales = self.scale, False


def test_fetches_nothing_before_it_knows_its_scales(tmp_path: Path) -> None:
    world = Calibrated(tmp_path).world
    (agent,) = world.agents
    world.decode(40)
    world.run()
    assert agent.take(Want) == []
    world.decode(40)
    world.steps(3)
    assert len(agent.take(Want)) == 1


def test_scales_of_the_first_forward_come_before_its_offer(tmp_path: Path) -> None:
    world = Calibrated(tmp_path).world
    (agent,) = world.agents
    assert agent.take(Rescale) == []
    world.prefill(40)
    world.step()
    told = [message for message in agent.heard if isinstance(message, Rescale | Offer)]
    assert [type(message) for message in told] == [Rescale, Offer]
    assert told[0] == Rescale(revision=1, scales=(Scales(0, "k", (0.25,)),))
    agent.take(Rescale)
    world.prefill(40)
    world.steps(3)
    assert agent.take(Rescale) == []


def test_an_agent_that_comes_back_hears_of_them_first(tmp_path: Path) -> None:
    world = Calibrated(tmp_path).world
    (agent,) = world.agents
    world.prefill(40)
    world.steps(2)
    agent.heard.clear()
    agent.hang_up()
    for _ in range(6):
        world.clock.now += 10
        world.step()
    assert len(agent.attaches) == 2
    assert isinstance(agent.heard[0], Rescale)


def test_an_agent_that_refuses_them_gets_no_more_offers(tmp_path: Path) -> None:
    world = Calibrated(tmp_path, scale=0.0).world
    (agent,) = world.agents
    world.prefill(40)
    world.step()
    agent.say(Refused(code="bad_pool", reasons=("scales: 0.0",), about="rescale 1"))
    world.steps(3)
    agent.take(Offer)
    world.prefill(40)
    world.steps(3)
    assert agent.take(Offer) == [] and not world.workers[0].worker._link.is_attached
