"""What every test of a socket needs: the agents' loop, a path, who serves there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import uvloop

from kvbridge.transport.local import LocalServer
from tests.integration.transport.ends import served


@pytest.fixture(autouse=True)
def loop() -> object:
    """The loop that agents run."""
    return uvloop.run


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
