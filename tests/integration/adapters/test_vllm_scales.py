"""Scales that the first forward pass computes are sent before the first rows that use them are offered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvbridge_proto.engine import Adopt, Decline, Done, Offer, Rescale, Rescaled, Scales, Want
from msgspec.structs import replace

from kvbridge.adapters.engine.memory import Memory
from tests.integration.adapters.small import memory_of
from tests.integration.adapters.world import World

pytestmark = pytest.mark.vllm


def fp8_world(folder: Path, layer: SimpleNamespace, **more: Any) -> World:
    """An engine of this one layer of fp8, and the agent beside it."""
    memory = memory_of()
    plane = memory.pool.planes[0]
    codec = replace(plane.codec, name="fp8_e4m3", element_bytes=1, width=8, scales=(1.0,))
    pool = replace(memory.pool, planes=(replace(plane, codec=codec, name="layer"),))
    world = World(folder, **more)
    world.memory_of, world.layers = lambda rank, tp: Memory(pool, memory.storages), {"layer": layer}
    return world.ready()


def calibrated(folder: Path) -> World:
    """The layer takes its scale from the first forward, as by `Attention.calc_kv_scales` of vLLM 0.26."""
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, calculate_kv_scales=True)

    def forward() -> None:
        layer._k_scale_float, layer.calculate_kv_scales = 0.25, False

    return fp8_world(folder, layer, on_forward=forward)


def test_fetches_nothing_before_it_knows_its_scales(tmp_path: Path) -> None:
    world = calibrated(tmp_path)
    world.decode(40)
    world.run()
    assert [want.end_token for want in world.agent.take(Want)] == [0], "the other side need not hold it"
    world.decode(40)
    world.steps(3)
    assert [want.end_token for want in world.agent.take(Want)] == [39]


def test_scales_of_the_first_forward_come_before_its_offer(tmp_path: Path) -> None:
    world = calibrated(tmp_path)
    assert world.agent.take(Rescale) == []
    world.prefill(40)
    world.step()
    told = [message for message in world.agent.heard if isinstance(message, Rescale | Offer)]
    assert [type(message) for message in told] == [Rescale, Offer]
    assert told[0] == Rescale(revision=1, scales=(Scales(0, "k", (0.25,)),))
    world.agent.take(Rescale)
    world.prefill(40)
    world.steps(3)
    assert world.agent.take(Rescale) == []


class Adopting:
    """A World of one fp8 layer that would take the scales of its sender, and the agent beside it."""

    def __init__(self, folder: Path, backend: str = "CPU_ATTN") -> None:
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(1.0),
            _k_scale_cpu=torch.tensor(1.0),
            _k_scale_float=1.0,
            attn_backend=SimpleNamespace(get_name=lambda: backend),
        )
        self.world = fp8_world(folder, self.layer, extra={"kvbridge_scales": "adopt"})
        self.scheduled: list[int] = []  # tokens in each step
        self.world.on_forward = lambda: self.scheduled.append(self.world.scheduled.total_num_scheduled_tokens)
        (self.agent,) = self.world.agents

    @property
    def scales(self) -> tuple[float, float, float]:
        return self.layer._k_scale.item(), self.layer._k_scale_cpu.item(), self.layer._k_scale_float

    def ask(self, *scales: float, revision: int = 1) -> Rescale | Decline:
        self.agent.say(Adopt(revision=revision, scales=(Scales(0, "k", scales),)))
        self.world.step()
        (answer,) = [*self.agent.take(Rescale), *self.agent.take(Decline)]
        return answer


def test_takes_the_scales_of_its_sender_before_anything_is_there(tmp_path: Path) -> None:
    engine = Adopting(tmp_path)
    assert engine.agent.attaches[0].policy == "adopt"
    engine.world.decode(40)
    engine.world.step()
    assert engine.ask(0.375, revision=3) == Rescale(revision=3, scales=(Scales(0, "k", (0.375,)),))
    assert engine.scales == (0.375, 0.375, 0.375)
    engine.agent.say(Rescaled(revision=3, epoch=2))
    engine.agent.say(Done(number=engine.agent.one(Want).number, request="r", moved_bytes=1, seconds=0.1))
    engine.world.finish()
    assert max(engine.scheduled) == 1  # all the others came


@pytest.mark.parametrize("after", ["computing", "receiving", "nothing, but this step computes"])
def test_keeps_its_own_once_rows_are_there(tmp_path: Path, after: str) -> None:
    engine = Adopting(tmp_path)
    engine.world.decode(40) if after == "receiving" else engine.world.request(40)
    if not after.startswith("nothing"):
        engine.world.step()
    if after == "receiving":
        engine.agent.say(Done(number=engine.agent.one(Want).number, request="r", moved_bytes=1, seconds=0.1))
    answer = engine.ask(0.375)
    assert isinstance(answer, Decline) and "computed or received" in answer.reason
    assert engine.scales == (1.0, 1.0, 1.0)


def test_takes_one_senders_scales_only(tmp_path: Path) -> None:
    engine = Adopting(tmp_path)
    engine.ask(0.375)
    answer = engine.ask(0.5, revision=2)
    assert isinstance(answer, Decline) and "taken before" in answer.reason
    assert engine.scales == (0.375, 0.375, 0.375)


@pytest.mark.parametrize(
    ("backend", "scales", "text"),
    [("FLASHINFER", (0.5,), "FLASHINFER keeps"), ("FLASH_ATTN", (0.5, 0.25), "one for each head")],
)
def test_says_what_it_cannot_take(tmp_path: Path, backend: str, scales: tuple[float, ...], text: str) -> None:
    engine = Adopting(tmp_path, backend)
    answer = engine.ask(*scales)
    assert isinstance(answer, Decline) and text in answer.reason
    assert engine.scales == (1.0, 1.0, 1.0)


def test_rows_that_came_under_the_scales_from_before_are_not_used(tmp_path: Path) -> None:
    """Of another sender, done before the agent has heard that the scales are others."""
    engine = Adopting(tmp_path)
    engine.world.decode(40)
    engine.world.step()
    number = engine.agent.one(Want).number
    engine.ask(0.375)
    engine.agent.say(Done(number=number, request="r", moved_bytes=1, seconds=0.1))
    engine.agent.say(Rescaled(revision=1, epoch=2))
    engine.world.steps(2)
    assert 40 in engine.scheduled  # all of the prompt was computed here
    engine.world.finish()
