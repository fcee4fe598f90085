"""Slots that stay in doubt: other slots take their place, and what is written to them late goes nowhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from kvbridge_proto.status import SlotCounts

from kvbridge.agent.metrics import Metrics
from kvbridge.agent.rebuild import Patience, Rebuilder
from kvbridge.device.driver import CudaError
from kvbridge.errors import FabricError
from kvbridge.exchange.slots import SlotPool

from .disturbed import pair_of, stands_still
from .test_abandon import SCALE

HALF, LESS = SlotCounts(free=2, lent=0, landed=0, quarantined=2), SlotCounts(free=3, lent=0, landed=0, quarantined=1)


def test_an_agent_that_stands_still_costs_others_their_slots_for_a_while_only(tmp_path: Path) -> None:
    scale = replace(SCALE, more={"silence_s": "1", "rebuild_s": "1"})
    with pair_of(tmp_path, scale) as pair:
        for seed in (1, 2):  # the second time it is the new slots that are left behind
            stands_still(pair, seed)


def test_patience_begins_when_half_are_quarantined_and_ends_in_a_quiet_moment() -> None:
    patience = Patience(10.0)
    assert not patience.is_over(HALF, 100.0)
    assert not patience.is_over(HALF, 109.9)
    assert patience.is_over(HALF, 110.0)
    for busy in ("lent", "landed"):
        assert not patience.is_over(SlotCounts(**{"free": 1, "lent": 0, "landed": 0, "quarantined": 2, busy: 1}), 120.0)
    assert patience.is_over(HALF, 121.0)


def test_patience_begins_anew_once_fewer_are_quarantined() -> None:
    patience = Patience(10.0)
    for counts, now in ((HALF, 0.0), (LESS, 9.0), (HALF, 11.0), (HALF, 20.9)):
        assert not patience.is_over(counts, now)
    assert patience.is_over(HALF, 21.0)


@pytest.mark.parametrize("quarantined", [4, 3])
def test_patience_with_most_of_them(quarantined: int) -> None:
    patience = Patience(1.0)
    counts = SlotCounts(free=4 - quarantined, lent=0, landed=0, quarantined=quarantined)
    assert not patience.is_over(counts, 0.0) and patience.is_over(counts, 1.0)


def test_a_rebuild_that_finds_no_memory_leaves_all_as_it_was_and_is_tried_again_later() -> None:
    slots, tried = SlotPool(2), [0]
    slots.lend(2, "t")
    slots.doubt("t")
    now = [0.0]

    class Full:
        async def prepare_docks(self) -> None:
            tried[0] += 1
            full = CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
            raise (full, OSError("no memory"), FabricError("rebuild_refused", ""))[tried[0] % 3]

    async def story() -> None:
        rebuilder = Rebuilder(slots, None, Full(), Metrics(), 1.0, lambda: now[0])  # type: ignore[arg-type]
        for seconds in (0.0, 1.0, 1.5, 11.5, 12.0, 22.0):
            now[0] = seconds
            await rebuilder.look()

    asyncio.run(story())
    assert tried == [3] and slots.counts().quarantined == 2
