"""What tests with a `world` take of it, vLLM's log, and what SGLang needs to be imported without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.adapters.fake_agent import FakeAgent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hooks" in metafunc.fixturenames:
        from tests.integration.adapters.world import HOOKS

        metafunc.parametrize("hooks", HOOKS)


@pytest.fixture
def world(hooks: str, tmp_path: Path) -> Any:
    """An engine of vLLM's scheduler and one rank beside an agent, once for each version's hooks."""
    from tests.integration.adapters.world import World

    return World(tmp_path, hooks=hooks).ready()


@pytest.fixture
def agent(world: Any) -> FakeAgent:
    """The one beside a world's only rank."""
    return world.agent


@pytest.fixture
def vllms_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


@pytest.fixture(scope="session")
def sglang() -> Iterator[None]:
    from kvbridge.adapters.sglang.on_cpu import ENVIRONMENT, stand_in

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        stand_in()
        yield
