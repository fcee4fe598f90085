"""Every failpoint, in every process that passes it, killed there and stopped there: one story told of each.

The process is started again with the failpoint armed, requests flow until it fires, and the others must bear it: what
must hold is the oracle of `world.py`. Then it goes on or comes back, and requests succeed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    for side in world.sides.values():
        side.stuck_s = 0.0
        side.ends.clear()
    _restart(world, victim, case.what, case.armed)
    if case.action == "fail":
        return _fails(world, victim, case)
    process = _until_fired(world, victim, case)
    told = ""
    if case.action == "kill":
        told = _dies(world, victim, case)
    else:
        world.wakes(process, STOP_S)
    world.finish()
    world.serves()
    world.is_clean()
    world.holds_no_more([role for role in ROLES if role != case.role or case.what == "engine"])
    return told


def _restart(world: World, side: Side, what: What, armed: str) -> None:
    """Another incarnation of this process; it may die as soon as it attaches."""
    if what == "engine":
        side.engine.close()
        side.start_engine(armed)
    else:
        side.agent.end()
        side.start_agent(armed)
        world.base.pop(side.role, None)  # another process holds what it holds
        world.deaths += 1


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
        victim.start_agent()
        world.base.pop(victim.role, None)
        world.deaths += 1
        return ""
    took = world.unmaps(victim, victim.job.name)
    victim.engine.close()
    victim.start_engine()
    world.finish()
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
    if "attach" not in case.name:
        assert "failpoint" in codes, f"nobody was told of the failure: {sorted(set(codes))}"
    world.serves()
    world.is_clean()
    world.holds_no_more([role for role in ROLES if role != case.role])
    return ""
