"""The fence on a GPU: not reached while the stream works; once it is reached, the data is there."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import torch

from kvbridge.device.fence import EngineFence, FencePage
from tests.system.gpu.engine import Engine, pattern
from tests.system.gpu.test_attach import SIZES, attach

pytestmark = pytest.mark.gpu

LATE = 1_000_000_000  # about half a second at 1.98 GHz
SOON_S = 0.15
DEADLINE_S = 20.0


def seconds_until(page: FencePage, count: int) -> float:
    began = time.monotonic()
    while not page.reached(count):
        assert time.monotonic() - began < DEADLINE_S, f"count {count} was never reached"
    return time.monotonic() - began


@pytest.mark.proves("G15")
def test_data_of_an_engine_at_work_is_there_only_behind_its_fence() -> None:
    with Engine() as engine:
        handles = engine.export("torch", SIZES)
        engine.ask("fence_page")
        page = FencePage(engine.fds[-1])
        engine.ask("write", 1)
        with closing(attach(engine, handles)) as attached, attached.hold() as regions:
            memory = regions[1]
            assert isinstance(memory, torch.Tensor)
            old, new = pattern(SIZES[1], 2, "cuda"), pattern(SIZES[1], 21, "cuda")
            torch.cuda.synchronize()
            count = engine.ask("write_late", 20, LATE)
            assert count == 1 and not page.reached(count)
            assert torch.equal(memory, old), "the engine was not at work: this test shows nothing"
            assert not page.reached(count)
            assert seconds_until(page, count) > SOON_S
            assert torch.equal(memory, new)  # a kernel of ours reads what theirs wrote
        page.close()


def test_a_mark_on_another_stream_stands_for_the_first_stream_too() -> None:
    with Engine() as engine:
        engine.export("torch", SIZES)
        engine.ask("fence_page")
        page = FencePage(engine.fds[-1])
        assert engine.ask("write_late", 20, LATE) == 1
        assert engine.ask("mark_aside") == 2
        assert not page.reached(1) and not page.reached(2)
        assert seconds_until(page, 2) > SOON_S
        assert page.reached(1)
        page.close()


def test_a_dead_engines_fence_is_never_reached_and_holds_nothing_up() -> None:
    with Engine() as engine:
        engine.export("torch", SIZES)
        engine.ask("fence_page")
        page = FencePage(engine.fds[-1])
        count = engine.ask("write_late", 20, 20 * LATE)
        engine.kill()
        assert not page.reached(count)
        began = time.monotonic()
        assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
        print(f"our next kernel after the engine died: {(time.monotonic() - began) * 1e3:.1f} ms")
        assert not page.reached(count)
        page.close()


def test_counts_go_up_and_the_last_is_reached_when_the_engine_closes() -> None:
    fence = EngineFence("cuda:0")
    page = FencePage(fence.fd)
    began = time.monotonic()
    counts = [fence.mark() for _ in range(200)]
    cost_us = (time.monotonic() - began) / 200 * 1e6
    assert counts == list(range(1, 201))
    torch.cuda._sleep(LATE // 10)
    last = fence.mark()
    assert not page.reached(last)
    fence.close()
    assert page.reached(last) and not page.reached(last + 1)
    print(f"one mark: {cost_us:.1f} us")
    page.close()
