"""One run: processes, engines and a hostile network under one clock, and the oracle that watches them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvbridge_proto.common import Blocks
from kvbridge_proto.peer import (
    BlockTables,
    Body,
    Cancel,
    Check,
    Checked,
    Claim,
    Drained,
    Failing,
    Goodbye,
    Grant,
    Hello,
    Hold,
    Keeps,
    Notice,
    Ping,
    Pong,
    Ready,
    Refuse,
    Renew,
    Settled,
    SlotLease,
    Welcome,
)
from kvbridge_proto.pool import Pool

from kvbridge.options import AgentConfig
from kvbridge.state_machines import SlotState

from .check import look_for_leaks
from .engine import Both, Decode, HeldBlocks, Prefill, SimEngine, SimRank, prefix_of
from .fabric import DataNetwork
from .faults import FAULTS_END_S, Faults
from .links import PING_S, SimLink
from .loop import Clock
from .matter import SimBlocks
from .process import Process
from .scenario import LAST, MEANWHILE, OF_MESSAGES, STALLS_END_S, FaultKind, Scenario, SimRequest

T = TypeVar("T")

CONNECT_S = 1.0
SILENCE_S = 1.0
LOOK_S = 0.25
SILENCING: tuple[FaultKind, ...] = ("half-open", "partition", "freeze agent", "freeze loop", "stall agent")
LOST_S = PING_S + 3 * SILENCE_S  # after this, both ends of a link agree whether it is up
REBUILD_S = (86400.0, 3.0, 0.5)  # how long slots may be in quarantine, by seed
# Seconds after FAULTS_END_S. Requests made after MEANWHILE_S must succeed, unless they need a stalled agent. Those made
# after LAST_S must all succeed. After REST_S everybody has come to rest.
MEANWHILE_S = 8.0
LAST_S = 18.0
REST_S = 24.0
SLACK_S = 1.5
KNOWN_S = 0.5  # making a session and refusing a claim take less
LONGEST_PULL_S = 1.2
LONGEST_COMPILE_S, CALM_COMPILE_S = 0.6, 0.1
NOTHING_FETCHED = "nothing to go on with"


class Foul(Exception):
    """Something happened that must never happen. The text says what."""


@dataclass(slots=True)
class ScenarioOutcome:
    """How a run ended. `failure` is empty if all was well. `story` is empty unless it was asked for."""

    failure: str = ""
    events: int = 0
    ends: dict[str, tuple[str, str]] = field(default_factory=dict)  # request -> how it ended on either side
    faults: list[FaultKind] = field(default_factory=list)  # those that happened
    story: list[str] = field(default_factory=list)


class World:
    """Everything in one run."""

    def __init__(self, scenario: Scenario, is_told: bool = False) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.data = DataNetwork(self)
        self.has_fences = scenario.has_fences
        self.processes: dict[str, Process] = {}
        self.by_incarnation: dict[str, Process] = {}
        self.engines: dict[str, SimEngine] = {}
        self.outcome = ScenarioOutcome()
        self.story: list[str] | None = [] if is_told else None
        self._random = random.Random((scenario.seed << 8) + scenario.salt)
        self.forged: set[Notice] = set()
        self.landed: set[tuple[str, str, int]] = set()
        self.held_up: list[SimLink] = []  # with messages under way that cannot go on
        self.faults = Faults(self)
        self._ends: dict[int, dict[bool, str]] = {request.number: {} for request in scenario.requests}
        self._reading: set[int] = set()  # requests that have begun to read what is kept
        self._said_at: dict[tuple[bool, int], float] = {}  # when a request ended on a side
        self._mismatches = 0
        self._differences: Counter[str] = Counter()
        self._bases = 0
        self._wasted = 0
        self._config = AgentConfig(
            drain_s=1.0,
            connect_s=CONNECT_S,
            silence_s=SILENCE_S,
            write_timeout_s=scenario.write_timeout_s,
            verify=scenario.verify,
            routes=("pull", "nixl") if scenario.is_pulled else ("nixl",),
            rebuild_s=REBUILD_S[scenario.seed % len(REBUILD_S)],
        )

    # The run:

    def run(self) -> ScenarioOutcome:
        try:
            self.begin()
            self.clock.run(FAULTS_END_S)
            self.faults.calm()
            self.clock.run(FAULTS_END_S + MEANWHILE_S)
            self._ask(self.scenario.meanwhile())
            self.clock.run(FAULTS_END_S + LAST_S)
            self._ask(self.scenario.last())
            self.clock.run(FAULTS_END_S + REST_S)
            if not self.outcome.failure:
                look_for_leaks(self)
        except Foul:
            pass
        finally:
            self.end()
        self.outcome.events = self.clock.happened
        self.outcome.ends = {f"r{n}": (e.get(True, "?"), e.get(False, "?")) for n, e in self._ends.items()}
        self.outcome.story = self.story or []
        return self.outcome

    def end(self) -> None:
        """Kill everybody, so that nothing is left to garbage collection."""
        for process in self.processes.values():
            if not process.is_dead:
                process.die()

    def begin(self) -> None:
        scenario = self.scenario
        for agents in scenario.engines.values():
            for agent in agents:
                self.start(agent)
        for name, agents in scenario.engines.items():
            kind, tokens, drafts = (Prefill, 0, 0) if name[0] == "P" else (Decode, 1, scenario.drafts)
            kind = Both if scenario.is_mutual else kind
            self.engines[name] = kind(
                self, name, agents, scenario.blocks, scenario.block_tokens[tokens], drafts, scenario.has_states
            )
        numbers = {request.number for request in scenario.requests}
        for request in scenario.requests:
            if request.goes_on and request.goes_on not in numbers:
                self.ended(True, request, NOTHING_FETCHED)
            elif not (request.goes_on or request.reads):
                self.clock.at(0.01 + request.at, partial(self._request, request, request.prefill))
            self.clock.at(0.01 + request.want_at, partial(self._request, request, request.decode))
        for fault in scenario.faults:
            self.clock.at(0.01 + fault.at, partial(self.faults.happen, fault))
        kinds = {fault.kind for fault in scenario.faults}
        self._is_disordered = not kinds.isdisjoint(OF_MESSAGES)
        self._look_until = FAULTS_END_S + (LOST_S if self._is_disordered else SILENCE_S)
        if "stall agent" in kinds:
            self._look_until = STALLS_END_S + SILENCE_S
        if self._is_disordered or not kinds.isdisjoint(SILENCING):
            self.clock.after(LOOK_S, self._look)

    def start(self, name: str) -> None:
        scenario = self.scenario
        process = Process(self, name, self._config, scenario.slots, scenario.local, scenario.digest)
        self.processes[name] = self.by_incarnation[process.incarnation] = process
        self.say(name, f"starts, incarnation {process.incarnation}")

    def _request(self, request: SimRequest, name: str) -> None:
        engine = self.engines[name]
        if request.reads:
            if request.number in self._reading:
                return
            self._reading.add(request.number)
        if engine.is_dead:
            self.ended(name == request.prefill, request, "no engine")
        else:
            engine.waiting[request.name] = request
            engine.later(0.0, lambda: engine.begin(request))

    def _look(self) -> None:
        """Let each agent give up links on which it heard nothing for long enough."""
        for process in self.processes.values():
            if not process.is_dead:
                for link in list(process.links.open):
                    link.look(SILENCE_S)
                    if self._is_disordered:
                        link.ping()
        if self.clock.now < self._look_until:
            self.clock.after(LOOK_S, self._look)

    def _ask(self, requests: tuple[SimRequest, ...]) -> None:
        """Make those requests whose engines are not lost. All of them must be answered."""
        for request in requests:
            if not {request.prefill, request.decode} & self.faults.gone:
                self._ends[request.number] = {}
                self._request(request, request.prefill)
                self._request(request, request.decode)

    # What the parts of the world ask:

    def blocks_of(self, pool: Pool) -> SimBlocks:
        engine = self.engines[pool.engine.id.partition("/")[0]]
        rank = engine.ranks[pool.shard.tp_rank]
        if rank.blocks.pool is not pool:  # the engine has died since it sent this pool
            return SimBlocks(pool.engine.id, pool, lambda text: None)
        return rank.blocks

    def address_of(self, agent: str, number: int = 0) -> str:
        """An address of the agent, its own if `number` is 0."""
        return f"tcp://{agent}:{1 + number % self.scenario.addresses}"

    def at_address(self, address: str) -> Process | None:
        """The process that accepts connections at this address."""
        process = self.process_at(address)
        return None if process is None or process.is_dead or process.loop.is_frozen else process

    def process_at(self, address: str) -> Process | None:
        """The last process that was there."""
        return self.processes.get(address.removeprefix("tcp://").partition(":")[0])

    def owner(self, fabric: str) -> Process | None:
        """The process that has the fabric of this name."""
        return self.by_incarnation.get(fabric.partition(".")[0])

    def is_blocked(self, one: str, other: str) -> bool:
        return bool(self.faults.blocked) and self.faults.blocked.get((one, other), 0) > 0

    def disorder(self, one: str, other: str) -> tuple[FaultKind, ...]:
        return self.faults.disorder.get((one, other), ()) if self.faults.disorder else ()

    def is_cut_off(self, one: str, other: str) -> bool:
        return self.is_blocked(one, other) or self.is_blocked(other, one)

    def next_base(self) -> int:
        self._bases += 1
        return self._bases << 32

    def waste(self) -> int:
        """A cell's number that belongs to no row."""
        self._wasted += 1
        return -self._wasted - 1

    # Chance:

    def entropy(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: tuple[T, ...]) -> T:
        return self._random.choice(options)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def jitter(self) -> float:
        return self._random.random() * 3e-4

    def quick(self) -> float:
        """How long a message or a write takes: mostly almost nothing."""
        random = self._random.random
        return random() * 5e-4 if random() < 0.93 else random() * 0.08

    def gather_s(self) -> float:
        random = self._random.random
        return random() * 5e-4 if random() < 0.9 else random() * 0.1

    def pull_s(self) -> float:
        """How long a read of another engine's blocks takes. Until faults end, sometimes longer than its lease."""
        is_slow = self.clock.now < FAULTS_END_S and self.chance(0.15)
        return self.uniform(0.02, LONGEST_PULL_S) if is_slow else self.gather_s()

    def compile_s(self) -> float:
        """How long new kernels take to compile. Until faults end, sometimes longer than a move may wait."""
        if not self.scenario.is_compiled:
            return 0.0
        return self.uniform(0.0, LONGEST_COMPILE_S if self.clock.now < FAULTS_END_S else CALM_COMPILE_S)

    # What is watched:

    def foul(self, text: str) -> None:
        self.say("foul", text)
        if not self.outcome.failure:
            self.outcome.failure = text
            self.clock.stop()  # wherever this exception ends
            raise Foul(text)

    def say(self, who: str, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.clock.now:9.4f}  {who:8} {text}")

    def on_message(self, sender: Process, receiver: Process, body: Body) -> None:
        if self.story is not None and not isinstance(body, Ping | Pong):
            self.say(sender.name, f"-> {receiver.name}: {_brief(body)}")

    def on_write(self, sender: Process, target: Process, slot: int, notice: Notice) -> None:
        """Check that whoever writes a slot holds its lease."""
        self.say(sender.name, f"=> {target.name}: writes {slot}@{notice.generation} of {notice.transfer}")
        lent = target.slots._slots[slot]
        is_out = lent.state in (SlotState.LENT, SlotState.QUARANTINED)
        if not is_out or lent.generation != notice.generation or lent.transfer != notice.transfer:
            what = f"{lent.state.name.lower()}, {slot}@{lent.generation} of {lent.transfer or 'nobody'}"
            self.foul(f"{target.name}: a slot that is {what} was written for {slot}@{notice.generation}")

    def on_landed(self, process: Process, notice: Notice) -> None:
        """A notice counted. Check that it was not forged, and was the first of its chunk."""
        key = process.incarnation, notice.transfer, notice.chunk
        if notice in self.forged:
            self.foul(f"{process.name}: a forged notice counted: {notice}")
        if key in self.landed:
            self.foul(f"{process.name}: chunk {notice.chunk} of {notice.transfer} landed twice")
        self.landed.add(key)

    def on_mismatch(self, request: str) -> None:
        """A digest was wrong. Check that something had spoiled a slot."""
        self._mismatches += 1
        if self._mismatches > self.data.wrongs:
            self.foul(f"{request}: a digest was wrong, and nothing had spoiled its slot")

    def on_difference(self, role: str) -> None:
        """A side found that a pulled chunk differs from its peer's. Check that something had spoiled it."""
        self._differences[role] += 1
        if self._differences[role] > self.data.wrongs:
            self.foul(f"a {role} found other rows than its peer, and nothing had spoiled what was read")

    def ended(self, is_prefill: bool, request: SimRequest, how: str) -> None:
        """A request is over on one side. Check that it ends only once there."""
        self.say(request.prefill if is_prefill else request.decode, f"{request.name}: {how}")
        self._said_at[is_prefill, request.number] = self.clock.now
        ends = self._ends[request.number]
        if is_prefill in ends:
            self.foul(f"{request.name} ended twice on one side: {ends[is_prefill]}, then {how}")
        ends[is_prefill] = how
        after = None if is_prefill or how == "done" else self.goes_on(request)
        if after is not None:
            self.ended(True, after, NOTHING_FETCHED)
        if request.number >= LAST and not is_prefill and how != "done":
            when = "while another agent stood still" if request.number >= MEANWHILE else "when all was well again"
            self.foul(f"{request.name}, {when}: {how}")

    def heard_kept(self, engine: SimEngine, rendezvous: str, prefixes: tuple[bytes, ...]) -> None:
        """An engine was told that another keeps something. Check that some request of another engine is kept so."""
        kept = [each for each in self.scenario.requests if each.rendezvous == rendezvous and each.is_kept]
        if not any(each.prefill != engine.name and prefixes in ((), (prefix_of(each),)) for each in kept):
            self.foul(f"{engine.name}: was told that {rendezvous} is kept, with {prefixes}")
        for each in self.scenario.requests if prefixes else ():
            if each.reads and each.rendezvous == rendezvous and each.decode == engine.name:
                self._request(each, engine.name)

    def goes_on(self, request: SimRequest) -> SimRequest | None:
        """The request that begins in the blocks of this one, and has not ended."""
        found = (each for each in self.scenario.requests if each.goes_on == request.number)
        return next((each for each in found if True not in self._ends[each.number]), None)

    def unended(self) -> list[str]:
        readers = {request.number for request in self.scenario.requests if request.reads}
        return [
            f"r{number} never ended at its {'prefilling' if side else 'decoding'} engine"
            for number, ends in self._ends.items()
            for side in (True, False)
            if side not in ends and not (side and number in readers)
        ]

    def answered(self, engine: SimEngine, rank: SimRank, held: HeldBlocks) -> None:
        """A want was answered. Check that this was before its deadline, if everybody was well."""
        late = self.clock.now - held.said_at - held.request.deadline_s
        troubled = max(self.faults.troubled.get(rank.agent, 0.0), self.faults.troubled.get(engine.name, 0.0))
        if late > SLACK_S and troubled < held.said_at:
            self.foul(f"{held.request.name}: answered {late:.2f} s after its deadline")

    def is_offered(self, request: SimRequest) -> bool:
        """Whether all of a prompt is offered now, by the agents of all ranks."""
        engine = self.engines[request.prefill]
        held, agents = engine.held.get(request.name), [self.processes[rank.agent] for rank in engine.ranks]
        if held is None or not held.is_ended:
            return False
        return all(not each.is_dead and held.number in each.sending.offers for each in agents)

    def given_up(self, held: HeldBlocks) -> None:
        """A want ended because the agent of its offer is gone. Check that it is."""
        if self.is_offered(held.request):
            self.foul(f"{held.request.name}: given up as gone, and it is offered")

    def waited(self, held: HeldBlocks) -> None:
        """A want waited until its deadline. Check that its offer had not ended long before, if there were no faults.

        An offer that ends answers one want. If there was another under its rendezvous id, it may be that one.
        """
        request = held.request
        ended_at = self._said_at.get((True, request.reads or request.number))
        others = [each for each in self.scenario.requests if each.rendezvous == request.rendezvous and each != request]
        if ended_at is None or self.scenario.faults or any(self._has_wanted(each) for each in others):
            return
        how = self._ends[request.reads or request.number][True]
        if "withdrawn" in how or "expired" in how:
            known_s = self.clock.now - max(ended_at, held.said_at)
            # A want that pulls also waits for its own reads to end, the second after the first.
            if known_s > KNOWN_S + 2 * LONGEST_PULL_S * self.scenario.is_pulled:
                self.foul(f"{request.name}: waited {known_s:.2f} s for an offer that had ended: {how}")

    def _has_wanted(self, request: SimRequest) -> bool:
        return False in self._ends[request.number] or request.name in self.engines[request.decode].held


# What a story tells of each message.
TOLD: dict[type[Body], tuple[str, ...]] = {
    Claim: ("transfer", "rendezvous", "first_token", "end_token", "leases"),
    Grant: ("transfer", "leases"),
    Ready: ("transfer", "chunks"),
    BlockTables: ("transfer", "tokens", "is_last", "renewal", "blocks"),
    Renew: ("transfer", "number"),
    Check: ("transfer", "digests"),
    Checked: ("transfer", "digests"),
    Cancel: ("transfer", "code"),
    Drained: ("transfer", "code"),
    Failing: ("transfer", "code"),
    Hold: ("rendezvous_ids",),
    Keeps: ("rendezvous",),
    Settled: ("transfer",),
    Refuse: ("about", "code", "reasons"),
    Goodbye: ("reason",),
    Hello: ("epoch",),
    Welcome: ("epoch",),
}


def _brief(body: Body) -> str:
    """A message for people."""
    fields = TOLD.get(type(body), ())
    return f"{type(body).__name__} " + " ".join(f"{field}={_short(getattr(body, field))}" for field in fields)


def _short(value: object) -> str:
    match value:
        case tuple():
            return "[" + ", ".join(_short(each) for each in value) + "]"
        case SlotLease():
            return f"{value.slot}@{value.generation}"
        case Blocks():
            return f"group {value.group} from {value.first}: {' '.join(map(str, value.ids))}"
    return str(value)[:60]
