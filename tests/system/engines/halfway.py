"""A request whose agents stand still in its middle, so that it can be aborted there, or they can be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvbridge.failpoints import VARIABLE
from testing.waiting import wait_for
from tests.system.engines.engine_process import Rows
from tests.system.engines.fleet import Fleet, prompt
from tests.system.sglang.rows import assert_carried

BACK_S = 60.0  # for an engine to attach to another agent, and for requests to travel again
Check = Callable[[Rows, Rows], None]


def start_agents(fleet: Fleet, name: str, armed: str = "") -> None:
    """Others beside this engine, which will fail as told; they are waited for."""
    for each in fleet.agents[name]:
        each.stop()
    os.environ[VARIABLE] = armed
    try:
        fleet.start_agents(name)
    finally:
        del os.environ[VARIABLE]
    for each in fleet.agents[name]:
        wait_for(lambda each=each: each.status.engine is not None, BACK_S)


def travels(fleet: Fleet, sender: str, receiver: str, seed: int, check: Check = assert_carried) -> None:
    """Nothing is held, and the next request goes from one engine to the other, row for row."""
    for name in (sender, receiver):
        fleet[name].wait_empty(BACK_S)
    end = time.monotonic() + BACK_S
    while True:
        tokens = prompt(200, seed=seed)
        answer, ours, theirs = fleet.crossed(sender, receiver, tokens)
        if answer.cached == len(tokens) - 1:
            check(ours, theirs)
            break
        assert time.monotonic() < end, "requests do not travel again"
        seed += 1
    for name in (sender, receiver):
        fleet[name].wait_empty(BACK_S)


def about_to_read(fleet: Fleet, sender: str, receiver: str, tokens: list[int]) -> tuple[str, str]:
    """The prefill's name and that of a request whose agents stand still, about to read its rows."""
    start_agents(fleet, receiver, "receiver.read_begun=stop")
    request, prefilled = fleet.prefill(sender, tokens)
    wanted = fleet.name(f"d-{receiver}")
    fleet[receiver].submit(wanted, tokens, 12, prefilled.params)
    for each in fleet.agents[receiver]:
        stat = Path(f"/proc/{each.process.pid}/stat")
        wait_for(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "T", BACK_S)
    return request, wanted


def go_on(fleet: Fleet, name: str) -> None:
    for each in fleet.agents[name]:
        os.kill(each.process.pid, signal.SIGCONT)
