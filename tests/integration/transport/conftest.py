"""What every test of a socket needs: a loop of either kind, a path."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.integration.transport.ears import Run


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    runner = asyncio.run if request.param == "asyncio" else uvloop.run

    def bounded(story: Coroutine[Any, Any, None]) -> None:
        runner(asyncio.wait_for(story, 60))

    return bounded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"
