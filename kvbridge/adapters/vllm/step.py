"""What the scheduler's and the workers' halves of the connector tell each other, in each step and at start-up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvbridge_proto.engine import KeptBy, ToAgent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

# vLLM steps about a thousand times a second while a request waits for its KV or its blocks are held. With tensor
# parallelism its processes spin in and between those steps: two ranks kept both cores of a machine busy and starved
# the agents (0.32.0). So when nothing was computed for some steps, workers wait a little for their agents: one rank
# then takes 6 % of a core instead of 14 %, two ranks take 1.2 cores instead of all. Where a prompt is being fetched and
# no batch is in flight, they wait from the first step on: vLLM sleeps 1 ms after every empty step, and its scheduler
# learns of rows one step after the worker does, so each step until they are there costs the first token 1.3 ms.
# A request that comes meanwhile waits for what is left of that: of two steps at most, with async scheduling.
EMPTY_STEP_REST_S = 0.004
REST_AFTER_STEPS = 6
LONG_REST_S = 0.010
LONG_AFTER_STEPS = 250  # about a second: nobody is in a hurry any more

RankKey = tuple[int, int]
"""(pipeline rank, tensor rank)."""


@dataclass
class ConnectorStep(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed when types are checked
    """Scheduler to every worker, once a step: messages for the agents, and which reports the scheduler waits for.

    `before` goes out before the forward pass, `after` once it has run or is enqueued. `awaited` maps wants, by number,
    to requests whose receive must be reported. `held` maps offers to requests whose blocks are kept until reported as
    sent. `joined` maps wants that no agent hears of to the one whose rows they get copies of; those that are `reported`
    nobody joins any more. `rest_s` is how long a worker may wait for its agent in this step, because the engine has had
    nothing to compute for some steps. `is_used` is true once anything was computed, in this step or before. In a roll
    call every worker says where its agent is, changed or not.
    """

    before: list[ToAgent] = field(default_factory=list)
    after: list[ToAgent] = field(default_factory=list)
    awaited: dict[int, str] = field(default_factory=dict)
    held: dict[int, str] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)
    rest_s: float = 0.0
    is_used: bool = False
    is_roll_call: bool = False


@dataclass
class AgentAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where one worker's agent is: its control address, and the name of our attachment to it. "" without an agent."""

    address: str = ""
    attachment: str = ""


@dataclass
class AgentAddresses(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to the scheduler: the agents that came, moved or went, by rank; and what is kept elsewhere."""

    addresses: dict[RankKey, AgentAddress]
    kept: tuple[KeptBy, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> AgentAddresses:
        assert isinstance(other, AgentAddresses)
        return AgentAddresses(self.addresses | other.addresses, self.kept + other.kept)


@dataclass(slots=True)
class Rest:
    """How long workers wait for their agents in steps that compute nothing.

    With data parallelism no replica rests (`is_allowed`): the others wait for it.
    """

    is_allowed: bool
    in_flight: deque[bool]  # whether each step computes that is not over (pipeline, async scheduling), oldest first
    empty_steps: int = 0
    is_used: bool = False  # a step has computed something

    def begins(self, is_computing: bool, is_fetching: bool) -> float:
        """Another step: how long its workers rest."""
        self.is_used |= is_computing
        self.empty_steps = 0 if is_computing else self.empty_steps + 1
        self.in_flight.append(is_computing)
        if not self.is_allowed or any(self.in_flight) or not (is_fetching or self.empty_steps > REST_AFTER_STEPS):
            return 0.0
        return LONG_REST_S if self.empty_steps > LONG_AFTER_STEPS else EMPTY_STEP_REST_S

    def step_is_over(self) -> None:
        if self.in_flight:
            self.in_flight.popleft()
