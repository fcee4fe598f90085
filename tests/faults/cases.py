"""Every failpoint, in every process that passes it, killed there and stopped there: one story told of each.

The process is started again with the failpoint armed, requests flow until it fires, and the others must bear it: what
must hold is the oracle of `world.py`. Then it goes on or comes back, and requests succeed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbridge.failpoints import PLACES

from .processes import Agent, Engine
from .world import ROLES, Role, Side, World

What = Literal["agent", "engine"]

STOP_S = 3.0  # longer than any limit in force
FIRES_S = 8.0
# Passed once in the life of a process or a session; others in the middle of the load.
ONCE = ("attach", "leaving", "hello", "probed", "welcome", "detach")
LATER = 3
REFUSES = "agent.attaching"  # failing there is said to the engine that attaches, not to a request
LEAVES = ("agent.leaving", "engine.detach_sent")
ABANDONS = ("cancel", "drained", "abandon")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    role: Role
    what: What
    action: Literal["kill", "stop", "fail"]

    @property
    def id(self) -> str:
        return f"{self.action} the {self.role}'s {self.what} at {self.name}"

    @property
    def armed(self) -> str:
        nth = 1 if any(word in self.name for word in ONCE) else LATER
        return f"{self.name}={self.action}@{nth}"

    @property
    def mark(self) -> bytes:
        """What the process leaves in its log when it fires."""
        return f"failpoint {self.name}: {self.action}\n".encode()

    @property
    def abandon(self) -> float:
        return 0.6 if any(word in self.name for word in ABANDONS) else 0.2


def all_cases() -> Iterator[Case]:
    for name, place in PLACES.items():
        which, what = place.process.split()
        assert what in ("agent", "engine")
        for role in ROLES if which == "either" else [role for role in ROLES if role == which]:
            for action in ("kill", "stop"):
                yield Case(name, role, what, action)  # type: ignore[arg-type]
            if place.error is not None:
                yield Case(name, role, what, "fail")  # type: ignore[arg-type]


def tell(world: World, case: Case) -> str:
    """The story of one case; in words what was measured. AssertionError if anything does not hold."""
    victim = world.sides[case.role]
    world.calm()
    if case.what == "agent" and case.action != "fail":
        world.hurts(victim)
    since = _log(victim, case.what).stat().st_size
    if case.what == "agent":
        world.restarts_agent(victim, case.armed)
    else:
        _restart_engine(victim, case.armed)
    told = _fails(world, victim, case) if case.action == "fail" else _bears(world, victim, case)
    assert case.mark in _log(victim, case.what).read_bytes()[since:], f"{case.name} did not fire"
    world.serves()
    world.is_clean()
    world.holds_no_more()
    late = [f"{side.role}'s engine missed {len(side.late)} answers" for side in world.sides.values() if side.late]
    return ", ".join([told, *late] if told else late)


def _log(side: Side, what: What) -> Path:
    return side.agent.log if what == "agent" else side.engine.log


def _restart_engine(side: Side, armed: str = "") -> None:
    """Another incarnation; it may die as soon as it attaches."""
    side.engine.close()
    side.start_engine(armed)


def _bears(world: World, victim: Side, case: Case) -> str:
    """It dies, or stands still and goes on."""
    process = _until_fired(world, victim, case)
    told = ""
    if case.action == "kill":
        told = _dies(world, victim, case)
    else:
        world.wakes(process, STOP_S)
    world.finish()
    return told


def _until_fired(world: World, victim: Side, case: Case) -> Agent | Engine:
    """Have requests flow until the failpoint fires."""
    process: Agent | Engine = victim.agent if case.what == "agent" else victim.engine
    end, is_asked = time.monotonic() + FIRES_S, False
    while not _has_fired(process, case):
        assert time.monotonic() < end, f"{case.name} was not passed in {FIRES_S} s:\n{victim.agent.tail()}"
        for side in world.sides.values():
            if not side.engine.is_dead():
                side.hear(0.01)
        if world.is_attached(victim) and not any(side.rooms for side in world.sides.values()):
            if case.name in LEAVES and is_asked:
                victim.engine.tell("detach")
            world.begin(abandon=case.abandon)
            is_asked = True
    return process


def _has_fired(process: Agent | Engine, case: Case) -> bool:
    if case.action == "kill":
        return process.is_dead()
    assert not process.is_dead(), "it died instead of standing still"
    return process.is_stopped(0.02)


def _dies(world: World, victim: Side, case: Case) -> str:
    """What must follow at once, and the next incarnation."""
    if case.what == "agent":
        world.finish()  # both engines are told, by the other agent and by the end of their connection
        world.restarts_agent(victim)
        return ""
    took = world.unmaps(victim, victim.job.name)
    _restart_engine(victim)
    return f"unmapped in {took * 1e3:.0f} ms"


def _fails(world: World, victim: Side, case: Case) -> str:
    """It goes on with its failure: some request fails by that name, or attaching is refused and tried again."""
    world.wait_attached()
    codes: list[str] = []
    for _ in range(4):
        world.begin(abandon=0.0)
        world.finish()
        codes += [str(each["code"]) for side in world.sides.values() for each in side.ends.values()]
        if "failpoint" in codes:
            break
    if case.name == REFUSES:
        assert any("refused by the agent: failpoint" in why for why in victim.overs), f"not refused: {victim.overs}"
    else:
        assert "failpoint" in codes, f"nobody was told of the failure: {sorted(set(codes))}"
    return ""
