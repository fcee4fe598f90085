"""Many small transfers between two real agents, while faults hit the agents, their engines and the network between.

In every round about a thousand requests are carried, and one fault happens, chosen by the seed: a process is killed or
frozen for longer than any limit, connections are cut, or requests are abandoned. One of the two agents (with even seeds
the receiver's) is never killed. Its resident memory, descriptors and slots are watched. With seeds 2, 3, 6, 7 and so on
agents use CURVE, each with its own key. After `--seconds` no new round begins.

Each run is added to soak.json. `lost` counts requests that never ended. `unanswered` counts those that an engine had to
give up although its agent was neither stopped nor killed in that round. `corrupted` counts elements that are not their
owner's. The oracle of tests/system/faults checks every element of both engines' memory whenever a request or block
ends. Any of these fails the run. So do memory, slots or descriptors that are not given back (`failure`).
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import machine
from bench.scenario import Bench
from tests.system.faults.processes import Held
from tests.system.faults.proxy import Proxy
from tests.system.faults.world import QUIET_S, ROLES, UCX_KEEPS, Role, Side, World, is_owed

ROUND = 4000
STOP_S = 2.5
ROUND_S = 120.0
WARM = 0.2  # the share of rounds that warm up: what is allocated once is allocated then
ENDS = 3  # memory at the begin, and at the end, is the median of this many rounds
ROUNDS = 2 * ENDS + 1  # after the warm-up, the fewest rounds from which growth can be told
GROWTH = 1.05
FAULTS = ("none", "kill agent", "kill engine", "stop agent", "stop engine", "cut", "reset", "half-open", "abandon")
NO_FAULTS = ("none", "abandon")  # these hit no process and no connection
SLOTS = {"receive_slots": "64", "send_slots": "32", "log_level": "error"}


@dataclass(frozen=True, slots=True)
class Rest:
    """What an agent holds while nothing is under way. `slots`: those free to be lent, and those free to gather into."""

    held: Held
    slots: tuple[int, int]

    @property
    def descriptors(self) -> int:
        return self.held.fds + self.held.over


class Soak:
    def __init__(self, seed: int, world: World, proxy: Proxy) -> None:
        self.chance, self.world, self.proxy = random.Random(seed), world, proxy
        self.survivor: Role = ROLES[(seed + 1) % 2]
        self.ends: Counter[str] = Counter()  # of wants, by code; "" is done
        self.faults: Counter[str] = Counter()
        self.lost = 0
        self.unanswered: list[str] = []
        self.corrupted: list[str] = []
        self.resident: list[int] = []
        self.first: Rest | None = None
        self.last: Rest | None = None

    @property
    def transfers(self) -> int:
        return self.ends.total()

    def meet(self) -> None:
        self.world.begin(ROUND, abandon=0.05)
        self._drained()
        self._serves()
        self.world.is_clean()
        self.world.knows_its_peers()
        self.first = self._rests()

    def end(self) -> None:
        """Check that the survivor holds no more than at first. UCX closes a dead peer's descriptors with a delay."""
        assert self.first is not None
        end, side = time.monotonic() + QUIET_S, self.world.sides[self.survivor]
        most = may_keep(side.survived)
        while True:
            self.last = self._rests()
            if self.last.held.is_within(self.first.held, most) and self.last.slots == self.first.slots:
                break
            told = f"at first {self.first}, at the end {self.last}, after {side.survived} deaths of the other agent"
            assert time.monotonic() < end, f"the {self.survivor}'s agent holds more or has fewer slots: {told}"
            time.sleep(0.2)
        if grown := growth(self.resident):
            assert grown[1] <= grown[0] * GROWTH, f"resident memory of the {self.survivor}'s agent grew: {grown}"

    def _rests(self) -> Rest:
        return Rest(Held.by(self.world.sides[self.survivor].agent.pid), self.world.free_slots()[self.survivor])

    def round(self) -> None:
        """One fault under load, then load alone, in which nothing may fail."""
        world, fault = self.world, self.chance.choice(FAULTS)
        self.faults[fault] += 1
        world.calm()
        before = self._audited()["receiver"]
        world.begin(ROUND, abandon=0.3 if fault == "abandon" else 0.01)
        time.sleep(self.chance.uniform(0.05, 1.5))
        if self._spoil(fault) == "receiver":
            before = {"begun": 0, "ends": {}}  # the killed engine's counts are gone
        time.sleep(0.5)
        for side in world.sides.values():
            side.engine.tell("forget")  # else one side would wait for what the other has not begun
        self._count(before)
        self._serves()
        world.is_clean()
        before = self._audited()["receiver"]
        world.begin(ROUND, abandon=0.01)
        self._count(before)
        world.is_clean()
        self.resident.append(resident_bytes(world.sides[self.survivor].agent.pid))

    def _count(self, before: dict[str, Any]) -> None:
        now = self._drained()
        ended = Counter(now["ends"]) - Counter(before["ends"])
        self.ends += ended
        self.lost += now["begun"] - before["begun"] - ended.total()

    def _serves(self) -> None:
        """Wait until a hundred requests in a row succeed, by the engines' counts."""
        end = time.monotonic() + 30.0
        while not all(self.world.is_attached(side) for side in self.world.sides.values()):
            assert time.monotonic() < end, "an engine does not come back"
            time.sleep(0.05)
        while True:
            before = Counter(self._audited()["receiver"]["ends"])
            self.world.begin(100)
            ended = Counter(self._drained()["ends"]) - before
            self.ends += ended
            if ended == Counter({"": 100}):
                break
            assert time.monotonic() < end, f"requests do not succeed again: {ended}"
        for side in self.world.sides.values():
            side.rendezvous_ids.clear()
            side.ends.clear()

    def _spoil(self, fault: str) -> str:
        """Make a fault happen. Returns the role whose engine was killed, if any."""
        world = self.world
        what, _, whom = fault.partition(" ")
        role = self.chance.choice(ROLES)
        if fault == "kill agent":
            role = ROLES[1 - ROLES.index(self.survivor)]
        side = world.sides[role]
        process = side.agent if whom == "agent" else side.engine
        if whom == "agent":
            world.hurts(side)
        if what == "kill":
            process.kill()
            if whom == "agent":
                world.restarts_agent(side)
            else:
                side.engine.close()
                side.start_engine()
                return role
        elif what == "stop":
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOP_S)
            process.send_signal(signal.SIGCONT)
        elif what in ("cut", "reset"):
            self.proxy.cut(is_reset=what == "reset")
        elif what == "half-open":
            self.proxy.is_swallowing = True
            time.sleep(STOP_S)
            self.proxy.heal()
        return ""

    def _audited(self) -> dict[Role, dict[str, Any]]:
        found: dict[Role, dict[str, Any]] = {}
        for role, side in self.world.sides.items():
            side.engine.tell("audit")
            found[role] = side.engine.wait_for("audited", 30.0)
        return found

    def _drained(self) -> dict[str, Any]:
        """How wants ended, once all have ended."""
        end = time.monotonic() + ROUND_S
        while True:
            audited = self._audited()
            for side in self.world.sides.values():
                self._listen(side)
            if not any(each["open"] or each["waiting"] for each in audited.values()):
                return audited["receiver"]
            assert time.monotonic() < end, f"requests do not end: {audited}"
            time.sleep(0.05)

    def _listen(self, side: Side) -> None:
        said = side.engine.said
        self.corrupted += [each["what"] for each in said if each["event"] == "wrong"]
        self.unanswered += [f"{side.role}: {each['what']}" for each in said if is_owed(each, side)]
        said[:] = [each for each in said if each["event"] not in ("ended", "over", "late")]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def may_keep(deaths: int) -> int:
    """How many descriptors of ended connections UCX may keep open after so many deaths of the other agent.

    UCX_KEEPS after one death. After 67 deaths of the receiver's agent it kept 3 in all, after 113 of the sender's 1.
    """
    return UCX_KEEPS + deaths // 4 if deaths else 0


def growth(resident: list[int]) -> tuple[int, int] | None:
    """Bytes after the warm-up, and at the end. None if the rounds are too few."""
    warm = resident[int(len(resident) * WARM) :]
    if len(warm) < ROUNDS:
        return None
    return int(statistics.median(warm[:ENDS])), int(statistics.median(warm[-ENDS:]))


def run(transfers: int, seed: int, seconds: float) -> dict[str, Any]:
    folder, proxy = Path(tempfile.mkdtemp(prefix="kvbridge-soak-")), Proxy()
    job: dict[str, Any] = {"tokens": 16, "width": 8, "prompts": 64, "is_brief": True, "look_s": 1.0, "seed": seed}
    began, failure = time.monotonic(), ""
    world = World(folder, options=SLOTS, through=proxy.through, is_keyed=seed // 2 % 2 == 1, **job)
    soak = Soak(seed, world, proxy)
    try:
        soak.meet()
        while soak.transfers < transfers and time.monotonic() - began < seconds:
            soak.round()
            print(f"{soak.transfers} {time.monotonic() - began:.0f} s {soak.faults.total()} rounds", flush=True)
        soak.end()
    except AssertionError as error:
        failure = str(error)[:2000]
        soak.corrupted += [failure] if "numbers" in failure else []
    finally:
        world.close()
        proxy.close()
    if not failure:
        shutil.rmtree(folder)
    grown, rests = growth(soak.resident), [rest for rest in (soak.first, soak.last) if rest is not None]
    return {
        **machine(),
        "seed": seed,
        "keyed": world.is_keyed,
        "transfers": soak.transfers,
        "done": soak.ends[""],
        "failed": {code: n for code, n in soak.ends.items() if code},
        "lost": soak.lost,
        "unanswered": soak.unanswered[:8],
        "corrupted": len(soak.corrupted),
        "faults": dict(soak.faults),
        "seconds": round(time.monotonic() - began),
        "agent_that_lived_through": soak.survivor,
        "deaths_of_the_other_agent": world.sides[soak.survivor].survived,
        "resident_mib_after_warm_up_and_at_the_end": grown and [round(each / 2**20, 1) for each in grown],
        "descriptors_with_ended_sockets": [rest.descriptors for rest in rests],
        "ended_sockets": [rest.held.over for rest in rests],
        "free_slots_in_and_out": [rest.slots for rest in rests],
        "threads": [rest.held.threads for rest in rests],
        "shared_mappings": [rest.held.shared for rest in rests],
        "failure": failure,
    }


def totals(faults: list[dict[str, int]]) -> dict[str, int]:
    """How many faults hit processes and connections, and in how many rounds requests were abandoned."""
    return {
        "faults": sum(n for each in faults for fault, n in each.items() if fault not in NO_FAULTS),
        "abandon_rounds": sum(each.get("abandon", 0) for each in faults),
    }


def measure(bench: Bench, *, transfers: int = 100_000, seed: int = 1, seconds: float = 3600.0) -> None:
    found = run(transfers, seed, seconds)
    runs = [*bench.earlier(), found]
    total = {name: sum(each[name] for each in runs) for name in ("transfers", "done", "lost", "corrupted", "seconds")}
    bench.keep(total | totals([each["faults"] for each in runs]), runs)
    print(json.dumps(found, indent=1))
    for what in ("lost", "unanswered", "corrupted", "failure"):
        if found[what]:
            bench.problem(what, found[what])
