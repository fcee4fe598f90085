"""Every failpoint, and each of the four processes killed and stopped while one of them is there: one story each.

The process that passes the failpoint is started with it armed, and requests flow until it fires. Either this process is
the victim. Or it freezes at the failpoint, the victim is killed or stopped, and it goes on before anybody has missed
the victim. The others must bear this: the oracle of world.py says what must hold. Then the victim goes on or comes
back, and requests succeed again.

Failpoints on the way of slots are passed by agents that only use slots, those on the way of pulls by agents that pull,
all others by both. At a failpoint of pulls, a stopped process stays frozen for longer than any lease, and the sender's
engine takes its blocks back and reuses them as soon as it may.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbridge_proto.engine import READERS_S

from kvbridge.failpoints import PLACES, Way
from kvbridge.routes.pull.halves import COUNTED_S
from tests.system.faults.processes import Agent, Engine
from tests.system.faults.world import LIMITS, ROLES, SLACK_S, Role, Side, World

What = Literal["agent", "engine"]
WHATS: tuple[What, ...] = ("agent", "engine")

STOP_S = 3.0  # longer than any limit in force
HOLD_S = 0.1  # far shorter than any: whoever is at the failpoint is not late by it
# At places of pulls: longer than a lease, and than an engine waits that has given its agent up; but short enough for
# sessions and requests to outlive the shorter one.
PULL_STOP_S, PULL_HOLD_S = 1.6, 1.2
assert COUNTED_S < READERS_S < PULL_HOLD_S < float(LIMITS["silence_s"]) < PULL_STOP_S
FIRES_S = 60.0
# Passed once in the life of a process or a session; others in the middle of the load.
ONCE = ("attach", "leaving", "memory", "hello", "probed", "welcome", "detach")
LATER = 3
REFUSES = "agent.attaching"  # failing there is said to the engine that attaches, not to a request
LEAVES = ("agent.leaving", "engine.detach_sent")
ABANDONS = ("cancel", "drained", "abandon")
WITHDRAWS = ("withdraw",)
PACED = ("renewal", "withdraw_heard")  # where the half of a prompt must be read long before the rest is computed
PACE_S = 0.3  # longer than half a lease, after which it is renewed


@dataclass(frozen=True, slots=True)
class Actor:
    """One of the four processes; whichever incarnation is there now."""

    role: Role
    what: What

    def __str__(self) -> str:
        return f"{self.role}'s {self.what}"

    def side(self, world: World) -> Side:
        return world.sides[self.role]

    def process(self, world: World) -> Agent | Engine:
        side = self.side(world)
        return side.agent if self.what == "agent" else side.engine

    def log(self, world: World) -> Path:
        return self.process(world).log

    def restart(self, world: World, armed: str = "") -> None:
        """Another incarnation; armed, it may die as soon as it attaches."""
        side = self.side(world)
        if self.what == "agent":
            world.restarts_agent(side, armed)
        else:
            side.engine.close()
            side.start_engine(armed)


ACTORS = tuple(Actor(role, what) for what in WHATS for role in ROLES)
SENDER_AGENT, SENDER_ENGINE = Actor("sender", "agent"), Actor("sender", "engine")


@dataclass(frozen=True, slots=True)
class Case:
    """At the failpoint `name`, which `passer` passes, this is done to `victim`."""

    name: str
    passer: Actor
    victim: Actor
    action: Literal["kill", "stop", "fail"]
    way: Way = "slots"

    @property
    def id(self) -> str:
        where = f"at {self.name}" if self.is_own else f"while the {self.passer} is at {self.name}"
        return f"{self.action} the {self.victim} {where}" + (" (pull)" if self.way == "pull" else "")

    @property
    def is_own(self) -> bool:
        return self.victim == self.passer

    @property
    def fires(self) -> str:
        """What the passer does to itself: its own fault, or it holds the moment."""
        return self.action if self.is_own else "stop"

    @property
    def armed(self) -> str:
        return f"{self.name}={self.fires}@{1 if self._is_any(ONCE) else LATER}"

    @property
    def mark(self) -> bytes:
        """What the passer leaves in its log when it fires."""
        return f"failpoint {self.name}: {self.fires}\n".encode()

    @property
    def is_of_pull(self) -> bool:
        """Whether a lease may be given where this is."""
        return PLACES[self.name].way == "pull"

    @property
    def hold_s(self) -> float:
        """How long the passer stands still there while another is hurt.

        Who is killed is missed at once, by the end of its connections; who is stopped leaves a lease to be outlived.
        """
        return PULL_HOLD_S if self.is_of_pull and self.action == "stop" else HOLD_S

    @property
    def stop_s(self) -> float:
        """How long the victim stands still, and in case of another one goes on to when the passer goes on."""
        return PULL_STOP_S if self.is_of_pull else STOP_S

    @property
    def stands_still(self) -> tuple[Actor, ...]:
        """Who does, for a while."""
        return tuple({self.passer, self.victim} if self.action == "stop" else {self.passer} - {self.victim})

    @property
    def load(self) -> dict[str, Any]:
        """What requests are like."""
        return {"abandon": self.abandon, "withdraw": self.withdraw, "pace_s": PACE_S if self._is_any(PACED) else 0.0}

    @property
    def abandon(self) -> float:
        return 0.6 if self._is_any(ABANDONS) else 0.2

    @property
    def withdraw(self) -> float:
        return 0.6 if self._is_any(WITHDRAWS) else 0.0

    def _is_any(self, words: tuple[str, ...]) -> bool:
        return any(word in self.name for word in words)


def all_cases() -> Iterator[Case]:
    for way in ("slots", "pull"):
        yield from _cases(way)


def _cases(way: Way) -> Iterator[Case]:
    for name, place in PLACES.items():
        if place.way not in (way, "any"):
            continue
        which, what = place.process.split()
        for passer in (actor for actor in ACTORS if actor.what == what and which in ("either", actor.role)):
            for victim in (passer, *(actor for actor in ACTORS if actor != passer)):
                yield Case(name, passer, victim, "kill", way)
                yield Case(name, passer, victim, "stop", way)
            if place.error is not None:
                yield Case(name, passer, passer, "fail", way)


def tell(world: World, case: Case) -> str:
    """The story of one case; in words what was measured. AssertionError if anything does not hold."""
    world.calm()
    log = case.passer.log(world)
    since = log.stat().st_size
    case.passer.restart(world, case.armed)
    if case.victim.what == "agent" and case.action != "fail":
        world.hurts(case.victim.side(world))
    if case.is_of_pull and SENDER_AGENT in case.stands_still:  # it will be given up
        world.hurts(world.sender)
    told = _fails(world, case) if case.action == "fail" else _bears(world, case)
    assert case.mark in log.read_bytes()[since:], f"{case.name} did not fire"
    world.serves()
    world.is_clean()
    world.holds_no_more()
    late = [f"{side.role}'s engine missed {len(side.late)} answers" for side in world.sides.values() if side.late]
    foreign = [
        f"{len(rendezvous_ids)} wants held foreign rows"
        for side in world.sides.values()
        if (rendezvous_ids := side.foreign)
    ]
    return ", ".join([*([told] if told else []), *late, *foreign])


def _bears(world: World, case: Case) -> str:
    """The victim dies, or stands still and goes on."""
    _until_fired(world, case)
    stopped = time.monotonic()
    if not case.is_own:
        _strikes(world, case)
    elif case.action == "stop" and case.is_of_pull:
        _takes_back(world, case)
    told = ""
    if case.action == "kill":
        told = _dies(world, case.victim)
    else:
        if not case.is_own:
            stopped = time.monotonic()  # the passer goes on now, the victim after as long again
        world.wakes(case.victim.process(world), case.stop_s, stopped)
    world.finish()
    return told


def _until_fired(world: World, case: Case) -> None:
    """Have requests flow until the failpoint fires."""
    passer, process = case.passer.side(world), case.passer.process(world)
    end, is_asked = time.monotonic() + FIRES_S, False
    while not _has_fired(process, case):
        assert time.monotonic() < end, f"{case.name} was not passed in {FIRES_S} s:\n{passer.agent.tail()}"
        for side in world.sides.values():
            if not side.engine.is_dead():
                side.hear(0.01)
        if world.is_attached(passer) and not world.is_busy():
            if case.name in LEAVES and is_asked:
                passer.engine.tell("detach")
            world.begin(**case.load)
            is_asked = True


def _has_fired(process: Agent | Engine, case: Case) -> bool:
    if case.fires == "kill":
        return process.is_dead()
    assert not process.is_dead(), "it died instead of standing still"
    return process.is_stopped(0.02)


def _strikes(world: World, case: Case) -> None:
    """Kill or stop the victim while the passer stands still at the failpoint, and have the passer go on."""
    victim = case.victim.process(world)
    if case.action == "kill":
        victim.kill()
    else:
        victim.send_signal(signal.SIGSTOP)
        assert victim.is_stopped(SLACK_S), f"the {case.victim} does not stand still"
    until = time.monotonic() + case.hold_s
    if case.is_of_pull:
        _takes_back(world, case)
    time.sleep(max(0.0, until - time.monotonic()))
    case.passer.process(world).send_signal(signal.SIGCONT)
    if not world.is_busy():  # as when it was attaching; those who live shall miss the victim
        world.begin(**case.load)


def _takes_back(world: World, case: Case) -> None:
    """The sender's engine wants its blocks while others stand still: it gives up an agent that does.

    Then it has used them again when this returns.
    """
    if case.victim == SENDER_ENGINE:
        return
    if SENDER_AGENT not in case.stands_still:
        world.sender.engine.tell("take_back")
        return
    world.sender.hear()
    engine = world.sender.engine
    engine.said = [each for each in engine.said if each["event"] != "reused"]  # of an agent that went before
    engine.tell("give_up")
    engine.wait_for("reused", READERS_S + SLACK_S)


def _dies(world: World, victim: Actor) -> str:
    """What must follow at once, and the next incarnation."""
    side, told = victim.side(world), ""
    if victim.what == "agent":
        world.finish()  # both engines are told, by the other agent and by the end of their connection
    else:
        told = f"unmapped in {world.unmaps(side.job.name) * 1e3:.0f} ms"
    victim.restart(world)
    return told


def _fails(world: World, case: Case) -> str:
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
        told = case.victim.side(world).engine.log.read_text()
        assert "refused by the agent: failpoint" in told, f"not refused: {told[-1000:]}"
    else:
        assert "failpoint" in codes, f"nobody was told of the failure: {sorted(set(codes))}"
    return ""


# Many cases, one after another:


class Runner:
    """One world at a time, dropped where a story fails. Survivors of one are in the next: what leaks, adds up."""

    def __init__(self) -> None:
        self._world: World | None = None

    def tell(self, case: Case, is_keyed: bool = False) -> str:
        world = self.world(is_keyed, case.way)
        try:
            return tell(world, case)
        except BaseException:
            self._world = None
            world.close()
            raise

    def world(self, is_keyed: bool = False, way: Way = "slots") -> World:
        if self._world is not None and (self._world.is_keyed, self._world.way) == (is_keyed, way):
            return self._world
        self._leave()
        folder = Path(tempfile.mkdtemp(prefix="kvbridge-faults-"))
        self._world = world = World(folder, is_keyed=is_keyed, way=way)
        try:
            world.meet()
        except BaseException:
            self._world = None
            world.close()
            raise
        return world

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(is_well=kind is None)

    def _leave(self, is_well: bool = True) -> None:
        """Another world will be needed, or none; of one that went wrong the logs stay."""
        world, self._world = self._world, None
        if world is not None:
            world.close()
            if is_well:
                shutil.rmtree(world.folder)
