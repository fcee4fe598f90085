"""What an offer and a want wait for on a GPU, with streams that only record what they were told to wait for."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)


pytestmark = pytest.mark.sglang
FORWARDS, SCHEDULER, EVENT = "the forwards' stream", "the scheduler's stream", "a prefix's event"


@dataclass
class Stream:
    waits_for: list[str] = field(default_factory=list)

    def wait_stream(self, stream: str) -> None:
        self.waits_for.append(stream)

    def wait_event(self, event: str) -> None:
        self.waits_for.append(event)


@pytest.fixture
def manager(sglang: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from kvbridge.adapters.sglang.manager import KVBridgeManager

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SCHEDULER)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    manager = object.__new__(KVBridgeManager)
    manager.talk = SimpleNamespace(memory=SimpleNamespace(device=torch.device("cuda:0")), mark=lambda: 7)
    manager.pp_size = 1
    manager._fence_stream = Stream()
    manager._queue = SimpleNamespace(scheduler=SimpleNamespace(forward_stream=FORWARDS))
    return manager


def test_an_offer_does_not_wait_for_the_next_prompts_forward(manager: Any) -> None:
    assert manager.mark_computed(None) == 0
    assert manager._fence_stream.waits_for == []


def test_a_prefix_that_is_sent_early_waits_for_its_event_alone(manager: Any) -> None:
    assert manager.mark_computed(EVENT) == 7
    assert manager._fence_stream.waits_for == [EVENT]


def test_a_stage_of_a_pipeline_does_not_know_which_forwards_are_over(manager: Any) -> None:
    manager.pp_size = 2
    assert manager.mark_computed(EVENT) == 7
    assert manager._fence_stream.waits_for == [SCHEDULER, FORWARDS, EVENT]


def test_a_want_waits_for_steps_that_may_write_its_pages(manager: Any) -> None:
    assert manager.mark_free() == 7
    assert manager._fence_stream.waits_for == [SCHEDULER, FORWARDS]


def test_a_cpus_calls_return_when_their_work_is_done(manager: Any) -> None:
    manager.talk.memory.device = torch.device("cpu")
    assert (manager.mark_free(), manager.mark_computed(EVENT)) == (0, 0)
