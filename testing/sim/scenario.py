"""What happens in one run, made from a seed: engines, requests, faults. Requests and faults can be left out singly.

The run draws its delays from the same seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

from kvbridge.options import Verify

FaultKind = Literal[
    "kill agent",
    "stop agent",
    "freeze agent",
    "freeze loop",
    "freeze data plane",
    "stall agent",
    "preempt",
    "kill engine",
    "freeze engine",
    "lose engine",
    "cut",
    "half-open",
    "partition",
    "drop",
    "duplicate",
    "reorder",
    "slow writes",
    "hang writes",
    "fail writes",
    "fail halfway",
    "spoil",
    "repeat notice",
    "forge notice",
    "rescale",
    "detach",
    "hang up",
]

BETWEEN_AGENTS: tuple[FaultKind, ...] = (
    "cut",
    "half-open",
    "partition",
    "slow writes",
    "slow writes",
    "hang writes",
    "fail writes",
)
OF_AGENTS: tuple[FaultKind, ...] = (
    "kill agent",
    "stop agent",
    "freeze agent",
    "freeze loop",
    "freeze data plane",
    "preempt",
    "forge notice",
    "forge notice",
)
OF_ENGINES: tuple[FaultKind, ...] = ("kill engine", "freeze engine", "lose engine", "rescale", "detach", "hang up")
OF_NETWORK: tuple[FaultKind, ...] = ("spoil", "repeat notice")
OF_MESSAGES: tuple[FaultKind, ...] = ("drop", "duplicate", "reorder")
STALLS_END_S = 19.0  # when a stalled agent goes on, after all other faults
PULLED = 1 << 20  # in seeds with this bit agents pull from each other's engines
COMPILED = 1 << 21  # in seeds with this bit agents must compile their kernels first
DRAFTED = 1 << 22  # in seeds with this bit decode engines have a layer of a draft model, and prefill engines none
STATED = 1 << 23  # in seeds with this bit engines have a layer with a recurrent state, and none of a draft model
MUTUAL = 1 << 24  # in seeds with this bit half of the requests go back, from decode to prefill engines
SHARED = (
    1 << 25
)  # in seeds with this bit requests are moved, share a fetch, and read what engines keep, several at once
KINDS = PULLED | COMPILED | DRAFTED | STATED | MUTUAL | SHARED
LAST = 900  # first number of the last requests
MEANWHILE = 950  # first number of the requests made while an agent is stalled


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A prompt that one engine computes and another wants."""

    number: int
    prefill: str
    decode: str
    sender: str  # the agent that the decode engine is told to ask
    at: float
    want_at: float
    tokens: int
    first_token: int
    piece_tokens: int
    piece_s: float
    deadline_s: float
    hold_s: float
    is_fenced: bool
    withdraw_s: float | None
    abandon_s: float | None
    twin: int = 0  # the request with which this one shares prompt and rendezvous
    queued_s: float = 0.0  # how long it waits in the decode engine's queue
    offered_from: int = 0  # the first token that is offered
    is_kept: bool = False  # other engines are told of it
    reads: int = 0  # the request whose kept offer it wants: nothing is offered for this one
    joins: int = 0  # the request of its decode engine whose fetch it shares, if that is under way
    goes_on: int = 0  # the request that `prefill` had fetched and goes on with: what it offers is in the same blocks
    begins_as: int = 0  # the request whose prompt it begins with

    @property
    def prompt(self) -> int:
        return self.begins_as or self.twin or self.number

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def rendezvous(self) -> str:
        return f"rendezvous-{self.twin or self.reads or self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong. `seconds` later it ends, if it lasts at all."""

    at: float
    kind: FaultKind
    who: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that is decided before the run. Engines are named P0, D0 and so on, agents after their ranks."""

    seed: int
    prefills: tuple[int, ...]  # number of ranks of each prefill engine
    decodes: tuple[int, ...]
    slots: int
    local: int
    digest: str
    has_fences: bool
    is_impatient: bool  # engines wait only READERS_S for blocks that they take back
    write_timeout_s: float
    requests: tuple[SimRequest, ...]
    faults: tuple[Fault, ...]
    block_tokens: tuple[int, int] = (2, 4)
    addresses: int = 1  # of each agent; requests name any of them
    salt: int = 0  # another salt makes other delays
    is_pulled: bool = False  # agents pull from each other's engines
    is_compiled: bool = False  # the first move of a kind waits until its kernels are compiled
    verify: Verify = "never"
    drafts: int = 0  # layers of a draft model in decode engines
    has_states: bool = False
    is_mutual: bool = False  # each engine computes some prompts and wants others
    blocks: int = 8  # of each engine

    def without(self, requests: frozenset[int] = frozenset(), faults: frozenset[Fault] = frozenset()) -> Scenario:
        return replace(
            self,
            requests=tuple(each for each in self.requests if each.number not in requests),
            faults=tuple(each for each in self.faults if each not in faults),
        )

    def last(self) -> tuple[SimRequest, ...]:
        """One more request between each pair of engines, made after all faults have ended."""
        return self._of_each_to_each(LAST, tuple(self.engines))

    def meanwhile(self) -> tuple[SimRequest, ...]:
        """The same while an agent is stalled, between engines other than its own. None if no agent is stalled."""
        stalled = {name for fault in self.faults if fault.kind == "stall agent" for name in fault.who}
        well = tuple(name for name, agents in self.engines.items() if stalled.isdisjoint(agents))
        return self._of_each_to_each(MEANWHILE, well) if stalled else ()

    def _of_each_to_each(self, first: int, engines: tuple[str, ...]) -> tuple[SimRequest, ...]:
        ways = ("PD", "DP") if self.is_mutual else ("PD",)
        asked = {(each.prefill, each.decode) for each in self.requests}
        pairs = [(p, d) for p in engines for d in engines if p[0] + d[0] in ways or (p, d) in asked]
        return tuple(
            SimRequest(
                number=first + i,
                prefill=p,
                decode=d,
                sender=f"{p[0].lower()}{p[1:]}0",
                at=0.0,
                want_at=0.0,
                tokens=3,
                first_token=0,
                piece_tokens=8,
                piece_s=0.0,
                deadline_s=2.0,
                hold_s=2.0,
                is_fenced=self.has_fences,
                withdraw_s=None,
                abandon_s=None,
            )
            for i, (p, d) in enumerate(pairs)
        )

    @property
    def engines(self) -> dict[str, list[str]]:
        """The agents of each engine's ranks."""
        found = {f"P{i}": [f"p{i}{rank}" for rank in range(size)] for i, size in enumerate(self.prefills)}
        found |= {f"D{i}": [f"d{i}{rank}" for rank in range(size)] for i, size in enumerate(self.decodes)}
        return found


def as_text(scenario: Scenario) -> str:
    """The scenario as JSON, to keep: this file may come to make another scenario of the same seed."""
    return msgspec.json.encode(scenario).decode()


def from_text(text: str) -> Scenario:
    return msgspec.json.decode(text, type=Scenario)


def make(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    prefills = tuple(rng.choice((1, 1, 2)) for _ in range(rng.choice((1, 1, 2))))
    decodes = tuple(rng.choice((1, 1, 2)) for _ in range(rng.choice((1, 1, 1, 2))))
    scenario = Scenario(
        seed=seed,
        prefills=prefills,
        decodes=decodes,
        slots=rng.choice((1, 2, 2, 3)),
        local=rng.choice((1, 2)),
        digest=rng.choice(("xxh3", "sum64")),
        has_fences=rng.random() < 0.4,
        is_impatient=rng.random() < 0.25,
        write_timeout_s=rng.choice((0.3, 1.0)),
        requests=(),
        faults=(),
        block_tokens=rng.choice(((2, 4), (4, 2), (2, 2))),
        addresses={13: 3, 29: 2}.get(seed % 32, 1),
    )
    requests = tuple(_request(rng, scenario, number) for number in range(1, rng.randint(1, 4) + 1))
    if scenario.addresses == 3:  # all addresses are dialled before any answers
        requests = tuple(replace(each, want_at=requests[0].want_at + each.number * 1e-4) for each in requests)
    queue = random.Random(f"queue {seed}")
    requests = tuple(
        replace(each, queued_s=queue.choice((0.02, 0.3, 2.0))) if queue.random() < 0.2 else each for each in requests
    )
    if seed % 16 == 7:
        requests = tuple(_behind_a_prefix(random.Random(f"prefix {seed} {each.number}"), each) for each in requests)
    scenario = replace(scenario, requests=requests)
    faults = [_fault(rng, scenario) for _ in range(rng.randint(0, 5))]
    if scenario.is_impatient:
        request = rng.choice(requests)
        faults.append(Fault(request.at, "preempt", (request.sender,), round(rng.uniform(1.0, 1.7), 4)))
    if seed & MUTUAL:
        back = random.Random(f"back {seed}")
        requests = tuple(_turned(back, scenario, each) if back.random() < 0.5 else each for each in scenario.requests)
        scenario = replace(scenario, requests=requests, is_mutual=True)
    has_states = bool(seed & STATED)
    drafts = int(bool(seed & DRAFTED) and not has_states)
    scenario = replace(scenario, is_compiled=bool(seed & COMPILED), drafts=drafts, has_states=has_states)
    if seed & SHARED:
        scenario, more = _shared(random.Random(f"shared {seed}"), scenario)
        faults += more
    if seed & PULLED:
        verify = random.Random(f"verify {seed}").choice(get_args(Verify))
        scenario = replace(scenario, is_pulled=True, verify=verify)
        faults += _stops(random.Random(f"stops {seed}"), scenario)
    if seed % 16 == 11:
        faults += _disorder(random.Random(f"disorder {seed}"), scenario)
    if seed % 16 == 14:
        scenario, fault = _halfway(random.Random(f"halfway {seed}"), scenario)
        faults.append(fault)
    if seed % 16 == 1 and seed % 3:
        scenario, faults = _stalled(random.Random(f"stall {seed}"), scenario, faults)
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _request(rng: random.Random, scenario: Scenario, number: int) -> SimRequest:
    prefill = rng.randrange(len(scenario.prefills))
    tokens = rng.randint(1, 8)
    at = round(rng.uniform(0.0, 2.0), 4)
    ours = scenario.block_tokens[1]
    return SimRequest(
        number=number,
        prefill=f"P{prefill}",
        decode=f"D{rng.randrange(len(scenario.decodes))}",
        sender=f"p{prefill}{rng.randrange(scenario.prefills[prefill])}",
        at=at,
        want_at=max(0.0, round(at + rng.choice((0.0, rng.uniform(-0.5, 0.5), rng.uniform(0.0, 0.02))), 4)),
        tokens=tokens,
        first_token=rng.choice((0, 0, 0, tokens // ours * ours)),
        piece_tokens=rng.choice((8, 8, 2, 3)),
        piece_s=rng.choice((0.001, 0.01, 0.2)),
        deadline_s=rng.choice((0.05, 0.5, 2.0, 2.0)),
        hold_s=rng.choice((0.1, 1.0, 3.0)),
        is_fenced=scenario.has_fences,
        withdraw_s=round(rng.expovariate(20.0), 5) if rng.random() < 0.2 else None,
        abandon_s=round(rng.expovariate(20.0), 5) if rng.random() < 0.2 else None,
        twin=1 if number > 1 and rng.random() < 0.1 else 0,
    )


def _turned(rng: random.Random, scenario: Scenario, request: SimRequest) -> SimRequest:
    """The request from its decode engine to its prefill engine: a twin goes the way of the one whose prompt it has."""
    sender = rng.choice(scenario.engines[request.decode])
    turned = replace(request, prefill=request.decode, decode=request.prefill, sender=sender, is_kept=rng.random() < 0.7)
    return replace(turned, twin=0)


def _shared(rng: random.Random, scenario: Scenario) -> tuple[Scenario, list[Fault]]:
    """Several read what an engine keeps, several share a fetch, answers move, and something goes wrong with these."""
    if len(scenario.decodes) == 1:
        scenario = replace(scenario, decodes=(*scenario.decodes, 1))
    scenario, requests = replace(scenario, is_mutual=True, blocks=20), list(scenario.requests)
    for at, request in enumerate(scenario.requests):
        plain = replace(request, first_token=0, offered_from=0, twin=0)
        first, form = 10 * request.number, rng.choice(("read", "joined", "moved", "moved", "as it is"))
        if form == "read":
            requests[at] = plain = replace(plain, is_kept=True)
            requests += [_reader(rng, scenario, plain, first + i) for i in range(rng.randint(2, 4))]
        elif form == "joined":
            requests[at] = plain
            requests += [_joining(rng, plain, first + i) for i in range(rng.randint(1, 3))]
        elif form == "moved" and not (scenario.has_states or scenario.drafts):  # neither is kept
            requests[at] = plain = replace(plain, tokens=rng.randint(1, 4), is_kept=False)
            requests += _moved(rng, scenario, plain, first)
    scenario = replace(scenario, requests=tuple(requests))
    return scenario, [_fault_of_any(rng, scenario) for _ in range(rng.randint(0, 3))]


def _reader(rng: random.Random, scenario: Scenario, kept: SimRequest, number: int) -> SimRequest:
    """It wants some of what is kept, once it is told or then."""
    tokens = kept.tokens if scenario.has_states else rng.randint(1, kept.tokens)
    decode = rng.choice([name for name in scenario.engines if name != kept.prefill])
    ours = scenario.block_tokens[decode[0] == "D"]
    return replace(
        kept,
        number=number,
        decode=decode,
        reads=kept.number,
        begins_as=kept.prompt,
        goes_on=0,
        is_kept=False,
        want_at=round(kept.at + rng.choice((0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 1.0))), 4),
        tokens=tokens,
        first_token=rng.choice((0, 0, tokens // ours * ours)),
        abandon_s=round(rng.expovariate(20.0), 5) if rng.random() < 0.2 else None,
    )


def _joining(rng: random.Random, request: SimRequest, number: int) -> SimRequest:
    """Another answer to the same prompt, at the same engine."""
    return replace(
        request,
        number=number,
        twin=request.number,
        joins=request.number,
        want_at=round(request.want_at + rng.choice((0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.3))), 4),
        queued_s=0.0,
        withdraw_s=None,
        abandon_s=round(rng.expovariate(20.0), 5) if rng.random() < 0.3 else None,
    )


def _moved(rng: random.Random, scenario: Scenario, request: SimRequest, number: int) -> list[SimRequest]:
    """Its decode engine goes on with it for a while, and keeps it. Another fetches that and offers it to a third."""
    to = rng.choice([name for name in scenario.engines if name != request.decode])
    kept = replace(
        request,
        number=number,
        prefill=request.decode,
        decode=to,
        sender=rng.choice(scenario.engines[request.decode]),
        want_at=round(request.want_at + rng.choice((0.01, rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.5))), 4),
        tokens=request.tokens + rng.randint(0, 3),
        piece_tokens=8,
        is_kept=True,
        withdraw_s=None,
        abandon_s=round(rng.expovariate(20.0), 5) if rng.random() < 0.2 else None,
        deadline_s=rng.choice((0.5, 2.0, 2.0)),
        queued_s=0.0,
        goes_on=request.number,
        begins_as=request.number,
    )
    third = rng.choice([name for name in scenario.engines if name != to])
    offered = replace(
        kept,
        number=number + 1,
        prefill=to,
        decode=third,
        sender=rng.choice(scenario.engines[to]),
        want_at=round(kept.want_at + rng.choice((0.01, rng.uniform(0.0, 0.5))), 4),
        tokens=kept.tokens + rng.randint(0, 1),
        piece_tokens=request.piece_tokens,
        is_kept=False,
        goes_on=kept.number,
    )
    readers = [_reader(rng, scenario, kept, number + 2 + i) for i in range(rng.choice((0, 0, 1, 2)))]
    return [kept, offered, *readers]


def _fault_of_any(rng: random.Random, scenario: Scenario) -> Fault:
    """Something goes wrong with a side of a request, or between its sides, whichever these are."""
    request = rng.choice(scenario.requests)
    sides = [request.prefill, request.decode]
    rng.shuffle(sides)
    at, seconds = _moment(rng, scenario), round(rng.choice((0.05, 0.5, 2.0)) * rng.uniform(0.5, 1.5), 4)
    kind = rng.choice((*BETWEEN_AGENTS, *OF_AGENTS, *OF_ENGINES, "kill agent", "kill engine"))
    agents = tuple(rng.choice(scenario.engines[side]) for side in sides)
    who = agents if kind in BETWEEN_AGENTS else agents[:1] if kind in OF_AGENTS else (sides[0],)
    return Fault(round(at, 5), kind, who, seconds)


def _behind_a_prefix(rng: random.Random, request: SimRequest) -> SimRequest:
    """Begin the want where the offer begins, or later. Sometimes begin it earlier: then it fails."""
    offered = rng.choice((0, rng.randint(1, request.tokens), rng.randint(1, request.tokens)))
    first = rng.choice((offered, offered, rng.randint(offered, request.tokens)))
    if offered and rng.random() < 0.1:
        first = rng.randrange(offered)
    return replace(request, offered_from=offered, first_token=first)


def _fault(rng: random.Random, scenario: Scenario) -> Fault:
    engines = scenario.engines
    at = round(_moment(rng, scenario), 5)
    seconds = round(rng.choice((0.01, 0.1, 0.5, 1.0, 2.5, 6.0)) * rng.uniform(0.5, 1.5), 4)
    kinds = rng.choice((BETWEEN_AGENTS, BETWEEN_AGENTS, OF_AGENTS, OF_AGENTS, OF_ENGINES, OF_NETWORK))
    kind = rng.choice(kinds)
    if kinds is BETWEEN_AGENTS:
        senders = [agent for name, agents in engines.items() if name[0] == "P" for agent in agents]
        receivers = [agent for name, agents in engines.items() if name[0] == "D" for agent in agents]
        pair = rng.choice(senders), rng.choice(receivers)
        return Fault(at, kind, pair if kind != "half-open" or rng.random() < 0.5 else pair[::-1], seconds)
    if kinds is OF_AGENTS:
        return Fault(at, kind, (rng.choice([agent for agents in engines.values() for agent in agents]),), seconds)
    if kinds is OF_ENGINES:
        return Fault(at, kind, (rng.choice(list(engines)),), seconds)
    return Fault(at, kind, ())


def _stops(rng: random.Random, scenario: Scenario) -> list[Fault]:
    """Agents freeze for about as long as a lease lasts, while their engines take back blocks that are being read."""
    faults = []
    for _ in range(rng.randint(0, 3)):
        request, at = rng.choice(scenario.requests), _moment(rng, scenario)
        agent = rng.choice(scenario.engines[rng.choice((request.prefill, request.decode))])
        kind: FaultKind = rng.choice(("freeze agent", "freeze loop", "freeze data plane", "preempt"))
        faults.append(Fault(round(at, 5), kind, (agent,), round(rng.uniform(0.05, 1.8), 4)))
    return faults


def _disorder(rng: random.Random, scenario: Scenario) -> list[Fault]:
    """Messages between the agents of a request are lost, come twice or overtake each other."""
    faults = []
    for _ in range(rng.randint(1, 3)):
        request, at = rng.choice(scenario.requests), _moment(rng, scenario) - rng.choice((0.0, 0.1))
        pair = rng.choice(scenario.engines[request.prefill]), rng.choice(scenario.engines[request.decode])
        who = pair if rng.random() < 0.5 else pair[::-1]
        seconds = rng.choice((0.1, 0.5, 3.0))
        faults.append(Fault(max(0.0, round(at, 5)), rng.choice(OF_MESSAGES), who, seconds))
    return faults


def _halfway(rng: random.Random, scenario: Scenario) -> tuple[Scenario, Fault]:
    """Writes of a request fail, and the rest of them lands when other waiting requests have the slot."""
    victim = rng.choice(scenario.requests)
    other = replace(
        victim, want_at=max(victim.at, victim.want_at), deadline_s=2.0, withdraw_s=None, abandon_s=None, twin=0
    )
    other = replace(other, is_kept=False, reads=0, joins=0, goes_on=0, begins_as=0)
    others = tuple(replace(other, number=5 + i) for i in range(rng.randint(1, 3)))
    pair = rng.choice(scenario.engines[victim.prefill]), rng.choice(scenario.engines[victim.decode])
    fault = Fault(other.want_at, "fail halfway", pair)
    return replace(scenario, slots=1, requests=(*scenario.requests, *others)), fault


def _stalled(rng: random.Random, scenario: Scenario, faults: list[Fault]) -> tuple[Scenario, list[Fault]]:
    """An agent of a request freezes until long after all other faults. A second engine of its kind goes on."""
    request = rng.choice(scenario.requests)
    side = rng.choice((request.prefill, request.decode))
    agent = rng.choice(scenario.engines[side])
    if side[0] == "P" and len(scenario.prefills) == 1:
        scenario = replace(scenario, prefills=(*scenario.prefills, 1))
    if side[0] == "D" and len(scenario.decodes) == 1:
        scenario = replace(scenario, decodes=(*scenario.decodes, 1))
    others = [fault for fault in faults if agent not in fault.who]
    at = round(_moment(rng, scenario), 5)
    return scenario, [*others, Fault(at, "stall agent", (agent,), round(STALLS_END_S - at, 5))]


def _moment(rng: random.Random, scenario: Scenario) -> float:
    """A moment, mostly soon after a request, when its chunks are under way."""
    if rng.random() < 0.25:
        return rng.uniform(0.0, 2.5)
    return rng.choice(scenario.requests).want_at + rng.expovariate(rng.choice((500.0, 50.0, 5.0)))
