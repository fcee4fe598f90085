"""If the data plane's thread is stuck, the agent ends itself: nothing else can unmap the engine's memory."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvbridge_proto.engine import Detach, Detached, Released

from kvbridge.dataplane.threads import EXIT_CODE, Watchdog
from testing.agents import AgentProcess, OracleEngine
from testing.oracle import Shape, build
from testing.pairs import Bench
from testing.waiting import wait_for
from tests.integration.agent.impatient_agent import STUCK_S
from tests.integration.routes.test_routes import Ended, ended

IMPATIENT = "tests.integration.agent.impatient_agent"
AT = "sender.gather_begun"
LONGER_S, SHORTER_S = 60.0, 1.0


def paused(
    folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, pause_s: float, **options: object
) -> OracleEngine:
    """A sender whose agent's data plane has just begun to stand still for so long, over its engine's memory."""
    monkeypatch.setenv("KVBRIDGE_FAILPOINTS", f"{AT}=pause:{pause_s}")
    bench = Bench(folder, stack, routes="nixl", p={"module": IMPATIENT, "drain_s": 0, **options})
    bench.offer("r", [5], 16)
    bench.want("r", [6], range(16))
    wait_for(lambda: f"failpoint {AT}" in bench.sender.agent.text())
    return bench.sender


def dies(sender: OracleEngine) -> None:
    sender.close()


def detaches(sender: OracleEngine) -> None:
    sender.client.send(Detach())


def is_told_to_stop(sender: OracleEngine) -> None:
    sender.agent.process.send_signal(signal.SIGTERM)


@pytest.mark.proves("G19")
@pytest.mark.parametrize("what", [dies, detaches, is_told_to_stop])
def test_an_agent_whose_data_plane_does_not_come_back_ends_itself(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, what: Callable[[OracleEngine], None]
) -> None:
    sender = paused(tmp_path, stack, monkeypatch, LONGER_S)
    began = time.monotonic()
    what(sender)
    assert sender.agent.process.wait(LONGER_S - 10) == EXIT_CODE
    assert time.monotonic() - began > STUCK_S - 0.5
    (line,) = [line for line in sender.agent.text().splitlines() if "code=data_plane_stuck" in line]
    assert "ERROR" in line and "failpoints.py" in line and "jobs.py" in line  # what it was doing
    if what is detaches:
        sender.wait_closed()  # and nothing said before that nobody touches its memory
        assert not [each for each in sender.heard if isinstance(each, Released | Detached)]


@pytest.mark.parametrize("what", [dies, detaches])
def test_one_that_comes_back_in_time_goes_on(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, what: Callable[[OracleEngine], None]
) -> None:
    sender = paused(tmp_path, stack, monkeypatch, SHORTER_S, module="kvbridge.cli")  # that waits for longer
    what(sender)
    is_whole(sender.agent)


def is_whole(running: AgentProcess) -> None:
    """Its engine is let go of, another comes, and it stops as told."""
    wait_for(lambda: running.status.engine is None and "engine left: epoch=1" in running.text(), why=running.text)
    with closing(OracleEngine(running, build(Shape("hnd")))) as engine:
        assert engine.attach().epoch == 2
    assert running.stop() == 0 and "data_plane_stuck" not in running.text()


async def test_time_in_which_the_whole_process_stood_still_does_not_count() -> None:
    watch, done = Watchdog(threading.current_thread(), 1.0, ended), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(watch.until(done))
    await asyncio.sleep(0.1)
    time.sleep(2.0)  # noqa: ASYNC251 - neither this loop nor the thread has a turn
    await asyncio.sleep(0.3)
    done.set_result("back")
    assert await waiting == "back"


async def test_who_beats_may_take_as_long_as_it_likes_and_who_stops_ends_the_process() -> None:
    watch, done = Watchdog(threading.current_thread(), 1.0, ended), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(watch.until(done))
    for _ in range(15):
        watch.beat()
        await asyncio.sleep(0.2)
    assert not waiting.done()
    with pytest.raises(Ended, match="no sign of life"):
        await waiting
