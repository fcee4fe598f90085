"""Sixteen agents, each with its engine, under traffic; one agent after the other is killed and started again.

Half of the engines prefill and half decode. Like a proxy, whoever asks for an answer asks another pair of engines if
the KV of a prompt does not come. The engines compare every element of their memory (testing/engine.py).
"""

from __future__ import annotations

import random
import select
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from kvbridge.failpoints import Way
from testing.engine import Job
from testing.nursery import HERE
from tests.system.faults.processes import Agent, free_address
from tests.system.faults.world import BACK_S, FEW, ROUTES, WIDTHS, Role, Side, World

DEADLINE_S = 2.0  # of a want, and for how long an offer is held; then another pair is asked
PACE_S = 0.3  # that the second half of a prompt takes to compute: so long rows are on their way
PROMPTS = 16  # that an engine has memory for
AWAY_S = 0.5  # for which an engine without an agent is asked only if all are
END_S = 180.0  # for everything to end and to be attached again: at a load of 40, two cores need minutes
LOOK_S = 1.0  # between looks of an engine at all its memory, each of which takes a while


@dataclass(slots=True)
class Asked:
    """A request for an answer: when it was due, whom it was asked last, under which rendezvous, and why again."""

    due: float
    prefill: Side
    decode: Side
    rendezvous: int = 0
    is_offered: bool = False
    codes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Carried:
    """What came of the traffic. `seconds` are of each request, from when it was due to its last row."""

    seconds: list[float] = field(default_factory=list)
    tries: Counter[int] = field(default_factory=Counter)  # how many requests were asked so many times
    codes: Counter[str] = field(default_factory=Counter)  # why they were asked again
    kills: int = 0
    late: list[str] = field(default_factory=list)  # answers that an engine had to ask its agent for


class Fleet:
    """Sides by role. Each agent but those of prefill engines meets all of these, as pods of a Service do."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        size: int = 16,
        way: Way = "pull",
        deadline_s: float = DEADLINE_S,
        seed: int = 1,
    ) -> None:
        self.chance, self._deadline_s = random.Random(seed), deadline_s
        self.carried = Carried()
        self._numbers = count(1)
        self._open: dict[int, Asked] = {}  # by rendezvous
        self._away: dict[int, float] = {}  # by engine's process: until when it counts as without an agent
        self.prefills = [self._start(folder, stack, "sender", number, way) for number in range(size // 2)]
        listed = folder / "prefills"
        listed.write_text("".join(f"{side.address}\n" for side in self.prefills))
        met = {"meet": f"file://{listed}"}
        self.decodes = [self._start(folder, stack, "receiver", number, way, met) for number in range(size // 2)]
        self.sides = [*self.prefills, *self.decodes]
        for side in self.sides:
            side.wait_attached()
        self.pids = [side.engine.pid for side in self.sides]

    def _start(
        self, folder: Path, stack: ExitStack, role: Role, number: int, way: Way, more: dict[str, str] | None = None
    ) -> Side:
        (own := folder / f"{role}-{number}").mkdir()
        told = Job(
            role=role,
            socket=str(own / f"{role}.sock"),
            name="",
            seed=100 * number,
            width=WIDTHS[way],
            prompts=PROMPTS,
            deadline_s=self._deadline_s,
            look_s=LOOK_S,
            may_be_foreign=way == "pull",
        )
        options = {**FEW, "routes": ROUTES[way], "listen": free_address(), **(more or {})}
        side = Side(HERE, own, role, options, told, is_hurt=True)  # any agent may be dead at any time
        side.start_agent()
        stack.callback(side.agent.end)
        side.start_engine()
        stack.callback(side.close)
        return side

    def run(self, seconds: float, rate: float, every_s: float) -> Carried:
        """Ask at `rate` a second, and kill an agent every `every_s`, for so long. Then wait until all have ended."""
        began = time.monotonic()
        ends, dues, kills = began + seconds, began, began + every_s
        victims: list[Side] = []
        while (now := time.monotonic()) < ends:
            while dues <= now:
                self._ask(Asked(dues, *self._pair()))
                dues += self.chance.expovariate(rate)
            if now >= kills:
                victims = victims or self.chance.sample(self.sides, len(self.sides))
                self._kill(victims.pop())
                kills += every_s
            self._hear(min(dues, kills, ends) - time.monotonic())
        while self._open:
            assert time.monotonic() < ends + END_S, (
                f"requests that do not end: {[each.codes for each in self._open.values()]}"
            )
            self._hear(0.1)
        self._rest()
        return self.carried

    def _kill(self, side: Side) -> None:
        """Without a word, and start another in its place."""
        side.agent.kill()
        side.agent = Agent(side.folder, side.role, {**side.options, "listen": side.address})
        self.carried.kills += 1

    def _pair(self) -> tuple[Side, Side]:
        """Of either kind the least busy engine with an agent."""
        busy = Counter(side.engine.pid for each in self._open.values() for side in (each.prefill, each.decode))
        now = time.monotonic()

        def least(sides: list[Side]) -> Side:
            order = self.chance.sample(sides, len(sides))
            return min(order, key=lambda side: (self._away.get(side.engine.pid, 0.0) > now, busy[side.engine.pid]))

        return least(self.prefills), least(self.decodes)

    def _ask(self, asked: Asked) -> None:
        asked.rendezvous, asked.is_offered = next(self._numbers), False
        self._open[asked.rendezvous] = asked
        asked.prefill.engine.tell("run", first=asked.rendezvous, count=1, is_announced=True, pace_s=PACE_S)

    def _hear(self, seconds: float) -> None:
        """Take what engines say within so long, and go on with their requests."""
        fds = {side.engine.stdout.fileno(): side for side in self.sides}
        ready, _, _ = select.select(list(fds), [], [], max(0.0, seconds))
        for side in map(fds.__getitem__, ready):
            side.hear()
            said, side.engine.said = side.engine.said, []
            for each in said:
                if each["event"] == "offered" and (asked := self._open.get(each["rendezvous"])) is not None:
                    asked.is_offered = True
                    run = {"first": asked.rendezvous, "count": 1, "sender": asked.prefill.address, "is_offered": True}
                    asked.decode.engine.tell("run", **run)
            ends = list(side.ends.values())
            side.ends.clear()
            for each in ends:
                self._ended(side, each)

    def _ended(self, side: Side, end: dict[str, Any]) -> None:
        """A prompt ended at an engine: the decode engine's word counts, or the prefill engine's if it offered none."""
        asked = self._open.get(end["rendezvous"])
        if asked is None or (side is asked.prefill and asked.is_offered):
            return
        del self._open[end["rendezvous"]]
        if side is asked.decode and not end["code"]:
            self.carried.seconds.append(time.monotonic() - asked.due)
            self.carried.tries[len(asked.codes) + 1] += 1
            return
        self.carried.codes[end["code"]] += 1
        asked.codes.append(end["code"])
        if end["code"] in ("no_agent", "agent_gone"):
            self._away[side.engine.pid] = time.monotonic() + AWAY_S
        asked.prefill, asked.decode = self._pair()
        self._ask(asked)

    def _rest(self) -> None:
        """All engines are those of the beginning, and every element of their memory is its owner's."""
        end = time.monotonic() + END_S
        for side in self.sides:
            side.agent.wait_serving()
            while not World.is_attached(side):
                assert time.monotonic() < end, f"not attached after {END_S} s:\n{side.agent.tail()}"
                time.sleep(0.05)
            side.engine.tell("audit")
            side.engine.wait_for("audited", BACK_S)
            side.hear()
            self.carried.late += side.late
            assert "Traceback" not in side.agent.log.read_text(errors="replace"), side.agent.tail(60)
        assert [side.engine.pid for side in self.sides] == self.pids
        assert not any(side.engine.is_dead() for side in self.sides)
