"""What tests with a `world` take of it, and vLLM's log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.integration.adapters.fake_agent import FakeAgent


@pytest.fixture
def agent(world: Any) -> FakeAgent:
    """The one beside a world's only rank."""
    (agent,) = world.agents
    return agent


@pytest.fixture
def vllms_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog
