"""An agent holds its lock for as long as it can write to others: whoever takes it takes that agent for dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbridge.agent.daemon import Agent
from kvbridge.agent.mover import Mover
from kvbridge.config import AgentConfig
from kvbridge.errors import OperatorError
from kvbridge.transport.lock import Lock


def test_the_lock_is_taken_before_the_fabric_is_there_and_kept_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, heard = tmp_path / "a.sock", []
    start, stop = Mover.start, Mover.stop

    def is_held() -> bool:
        try:
            Lock(socket, "f" * 16).close()
        except OperatorError as error:
            return error.code == "socket_in_use"
        return False

    async def started(self: Mover) -> None:
        heard.append(is_held())
        await start(self)

    async def stopped(self: Mover) -> None:
        await stop(self)
        heard.append(is_held())

    monkeypatch.setattr(Mover, "start", started)
    monkeypatch.setattr(Mover, "stop", stopped)
    config = AgentConfig(socket=str(socket), listen="tcp://127.0.0.1:0", slot_bytes=1 << 16, metrics="")
    boots = []
    for _ in range(2):
        agent = Agent(config)
        boots.append(agent.boot)

        async def story(agent: Agent = agent) -> None:
            asyncio.get_running_loop().call_later(0.2, agent.stop)
            await agent.run()

        asyncio.run(story())
    assert heard == [True] * 4 and not is_held()
    assert agent.before == {boots[0]}
