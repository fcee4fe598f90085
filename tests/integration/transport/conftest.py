"""What every test of a socket needs: a loop of either kind, a path, who serves there."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import uvloop

from kvbridge.transport.local import LocalServer
from tests.integration.transport.ends import served


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function) and "loop" not in metafunc.fixturenames:
        metafunc.fixturenames.append("loop")
        metafunc.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture
def loop() -> object:
    """For a test that asks for it: asyncio's alone, because it takes long."""
    return asyncio.run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """In a folder as /tmp is, which an agent accepts and other users enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder) / "agent.sock"


@pytest.fixture
def server(path: Path) -> AbstractAsyncContextManager[LocalServer]:
    return served(path)
