"""What the scheduler's and the workers' halves of the connector tell each other, in each step and at start-up."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge_proto.engine import KeptBy, ToAgent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

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
