"""An agent holds its lock for as long as it can write to others: whoever gets the lock takes that agent for dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbridge.agent.daemon import Agent
from kvbridge.dataplane.data_plane import DataPlane
from kvbridge.errors import OperatorError
from kvbridge.options import AgentConfig
from kvbridge.transport.lock import Lock


async def test_the_lock_is_taken_before_the_fabric_is_there_and_kept_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, heard = tmp_path / "a.sock", []
    start, stop = DataPlane.start, DataPlane.stop

    def is_held() -> bool:
        try:
            Lock(socket, "f" * 16).close()
        except OperatorError as error:
            return error.code == "socket_in_use"
        return False

    async def started(self: DataPlane) -> None:
        heard.append(is_held())
        await start(self)

    async def stopped(self: DataPlane) -> None:
        await stop(self)
        heard.append(is_held())

    monkeypatch.setattr(DataPlane, "start", started)
    monkeypatch.setattr(DataPlane, "stop", stopped)
    agents = [await ended(socket) for _ in range(2)]
    assert heard == [True] * 4 and not is_held()
    assert agents[1].before == {agents[0].incarnation}


async def ended(socket: Path) -> Agent:
    """An agent that has served there for a moment and ended."""
    agent = Agent(AgentConfig(socket=str(socket), listen="tcp://127.0.0.1:0", slot_bytes=1 << 16, metrics=""))
    asyncio.get_running_loop().call_later(0.2, agent.stop)
    await agent.run()
    return agent
