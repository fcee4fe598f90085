"""An agent dies or freezes in the middle of a real engine's request, at a named place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from testing.kept import kept
from testing.waiting import wait_for
from tests.system.engines.fleet import Fleet, prompt
from tests.system.engines.halfway import Pairs, start_agents, travels

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.proves("G20")]

DEADLINE_S = 5


fleet = kept(Fleet, options={"kvbridge_deadline_s": DEADLINE_S}, routes="nixl", start=("small", "large", "alone"))


def rearm(fleet: Fleet, name: str, armed: str) -> int:
    """Have another agent beside this engine, which will fail as told; its pid."""
    start_agents(fleet, name, armed)
    assert "FAILPOINTS ARE ON" in fleet.agents[name][0].text()
    return fleet.agents[name][0].process.pid


def request_travels(fleet: Fleet, seed: int) -> None:
    pair = ("small", "large")
    travels(Pairs(fleet, pair, pair, is_like_alone=True), *pair, seed)


def fetched_while(fleet: Fleet, pid: int, tokens: list[int], state: str) -> str:
    """Prefill, then decode; the decoding request's name, once that process is in that state."""
    _, prefilled = fleet.prefill("small", tokens)
    wanted = fleet.name("d-large")
    fleet["large"].submit(wanted, tokens, 12, prefilled.params)
    wait_for(lambda: state_of(pid) == state, 20, lambda: f"the agent is in state {state_of(pid)}", 0.01)
    return wanted


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_receivers_agent_is_killed_while_it_scatters(fleet: Fleet) -> None:
    tokens = prompt(900, seed=80)
    pid = rearm(fleet, "large", "receiver.scatter_begun=kill")
    wanted = fetched_while(fleet, pid, tokens, "Z")
    answer = fleet["large"].result(wanted)
    assert answer.cached == 0 and list(answer.tokens) == fleet.alone(tokens, 12)
    fleet["small"].wait_empty()
    start_agents(fleet, "large")
    request_travels(fleet, seed=81)


def test_the_senders_agent_stands_still_while_it_writes(fleet: Fleet) -> None:
    """It goes on after the want has failed: what it writes then counts for nothing."""
    tokens = prompt(900, seed=90)
    pid = rearm(fleet, "small", "sender.write_begun=stop")
    wanted = fetched_while(fleet, pid, tokens, "T")
    answer = fleet["large"].result(wanted)
    assert answer.cached == 0 and list(answer.tokens) == fleet.alone(tokens, 12)
    os.kill(pid, signal.SIGCONT)
    fleet["small"].wait_empty()
    request_travels(fleet, seed=91)
    assert fleet.agents["small"][0].process.poll() is None
    slots = fleet.agents["large"][0].status.receive_slots
    assert not slots.lent and not slots.quarantined, slots


@pytest.mark.parametrize(("name", "place"), [("small", "sender.gather_begun"), ("large", "receiver.scatter_begun")])
def test_an_engine_is_killed_while_its_agent_is_about_to_touch_its_blocks(fleet: Fleet, name: str, place: str) -> None:
    """The agent stands still at that very moment; it lets go of the dead engine's memory and serves the next one."""
    tokens = prompt(900, seed=len(place))
    pid = rearm(fleet, name, f"{place}=stop")
    wanted = fetched_while(fleet, pid, tokens, "T")
    fleet.kill(name)
    os.kill(pid, signal.SIGCONT)
    (survivor,) = fleet.agents[name]
    if name == "small":
        assert list(fleet["large"].result(wanted).tokens) == fleet.alone(tokens, 12)
    else:
        fleet["small"].wait_empty()
    wait_for(lambda: survivor.status.engine is None, 5)
    fleet.start(name)
    request_travels(fleet, seed=len(place) + 1)
    assert survivor.process.pid == pid and survivor.process.poll() is None
    for (agent,) in (fleet.agents[each] for each in ("small", "large")):
        wait_for(
            lambda agent=agent: not (agent.status.receive_slots.quarantined or agent.status.send_slots.quarantined)
        )
