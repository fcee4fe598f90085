"""Agents are asked to release prompts that nobody fetched exactly while other requests lack blocks. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbridge.adapters.vllm.block_tables import GroupTables, TableGroup
from kvbridge.adapters.vllm.pressure import EASE_PAUSE_S, EASES_WITHIN_S, RECLAIM_AGAIN_S, OfferedBlocks, Pressure

pytestmark = pytest.mark.proves("G17")

TABLES = GroupTables((TableGroup(16, "full", 0), TableGroup(32, "full", 0)))  # 3 blocks for 32 tokens


def limits(at_once: int = 16) -> SimpleNamespace:
    return SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=at_once)


def pressure(free: int, at_once: int = 16) -> Pressure:
    """What is done and not fetched holds blocks."""
    made = Pressure(TABLES, limits(at_once), kept := OfferedBlocks())
    made.free_blocks = lambda: free
    kept.hold("done", range(1, 11))
    return made


def test_asks_for_what_the_first_request_lacks_though_it_needs_several_steps() -> None:
    short = pressure(free=4)
    short.came("long", 320)
    short.came("behind it", 32)
    assert short.short_of(1.0) == 30 - 4


def test_asks_for_all_that_the_next_step_could_compute() -> None:
    short = pressure(free=1)
    for name in ("a", "b", "c"):
        short.came(name, 32)
    assert short.short_of(1.0) == 6 - 1


def test_who_has_blocks_or_is_over_lacks_none() -> None:
    short = pressure(free=2)
    for name in ("a", "b"):
        short.came(name, 32)
    short.has_blocks("a")
    short.ended("b")
    assert short.short_of(1.0) == 0
    short.preempted("a")
    assert short.short_of(1.0) == 1
    short.preempted("b")  # over, whatever is said of it
    assert short.short_of(2.0) == 1


def test_who_could_not_run_anyway_lacks_no_blocks() -> None:
    short = pressure(free=1, at_once=2)
    for name in ("running", "next", "later"):
        short.came(name, 16)
    short.has_blocks("running")
    assert short.short_of(1.0) == 2 - 1
    short.has_blocks("next")
    assert short.short_of(2.0) == 0


def test_asks_again_only_after_an_answer_could_have_come() -> None:
    short = pressure(free=0)
    short.came("a", 16)
    assert [short.short_of(at) for at in (1.0, 1.0 + RECLAIM_AGAIN_S / 2, 1.0 + 1.5 * RECLAIM_AGAIN_S)] == [2, 0, 2]


def test_what_is_freed_is_not_asked_for() -> None:
    short = pressure(free=0)
    short._kept.free("done")
    short.came("a", 16)
    assert short.short_of(1.0) == 0


def test_a_running_request_waits_a_moment_and_is_preempted_then() -> None:
    short = pressure(free=0)
    short._kept.free("done")
    assert not short.should_wait(1.0)  # nothing is held: nothing will come
    short._kept.hold("done", range(1, 11))
    assert short.should_wait(1.0)
    assert short.short_of(1.0) == 1
    assert short.should_wait(1.0 + EASES_WITHIN_S / 2)
    assert not short.should_wait(1.0 + 1.5 * EASES_WITHIN_S)
    assert not short.should_wait(1.0 + EASE_PAUSE_S)
    assert short.should_wait(1.0 + 2 * EASE_PAUSE_S)
