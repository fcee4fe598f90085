"""What the scheduler knows of the workers' agents, and when it asks the workers again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbridge_proto.common import Rank
from kvbridge_proto.engine import Directory

from .step import AgentAddress, RankKey

# Workers report only in steps, and an idle engine makes none: after this long their last word on their agents is old.
KNOWN_S = 1.0
GONE_KNOWN_S = 0.02  # the same where an agent was missing: it may be back, and the link attaches without a step
ROLL_CALL_S = 1.0  # how long a request waits for a new report
# An answer that another engine keeps may be heard of milliseconds before its next turn comes to an idle engine.
KEPT_KNOWN_S = 0.005


@dataclass(slots=True)
class RollCall:
    """`ranks` have an agent each. `is_all`: all of them are here; if one has none, we neither offer nor want."""

    ranks: int
    clock: Callable[[], float]
    agents: dict[RankKey, AgentAddress] = field(default_factory=dict)
    is_all: bool = False
    has_workers: bool = False  # whether any has ever reported: vLLM's tests of the scheduler have none
    has_heard_kept: bool = False
    _known_at: float = field(init=False)  # when the workers' last report was known to hold
    _asked_at: float | None = None  # when they were asked to report again
    _was_answered: bool = False  # since the last step: what waited for the answer need not ask again

    def __post_init__(self) -> None:
        self._known_at = self.clock()

    @property
    def first(self) -> AgentAddress:
        return self.agents.get((0, 0), AgentAddress())

    def update(self, changed: dict[RankKey, AgentAddress]) -> bool:
        """What workers report, at the start or later. Whether this changes anything."""
        self.has_workers = True
        before, self.agents = self.agents, self.agents | changed
        self.is_all = len(self.agents) == self.ranks and all(agent.address for agent in self.agents.values())
        return self.agents != before

    def directory(self) -> Directory:
        agents = sorted(self.agents.items(), key=lambda each: each[0])
        return Directory(ranks=tuple(Rank(tp_rank=tp, pp_rank=pp, address=agent.address) for (pp, tp), agent in agents))

    def begin_if_due(self) -> bool:
        """Begin to ask if the last report is old. Whether the next step is to ask the workers, who are asked once."""
        now = self.clock()
        known_s = KEPT_KNOWN_S if self.has_heard_kept and not self._was_answered else KNOWN_S
        if is_due := self._asked_at is None and now - self._known_at > (known_s if self.is_all else GONE_KNOWN_S):
            self._asked_at = now
        if self._asked_at is not None and now - self._asked_at >= ROLL_CALL_S:
            self._asked_at, self._known_at = None, now
        return is_due

    @property
    def is_asking(self) -> bool:
        """Whether requests wait for the workers' report.

        So the first request after a rest is waiting, not running, after its first `schedule()`, and costs one empty
        step. It must wait. An engine at rest makes no steps, so an agent may meanwhile have died, come back or been
        replaced. What the workers report of a step reaches us after its requests have finished
        (`update_connector_output` follows `request_finished`), which is too late for a prompt of one step: its answer
        would name an agent that is gone, or none. And a want said to no agent is a failed receive, which vLLM's policy
        may turn into a failed request. A request within KNOWN_S of the last step does not wait, nor one of a scheduler
        to which no worker ever spoke.
        """
        return self.has_workers and self._asked_at is not None

    def step_begins(self) -> None:
        self._was_answered = False

    def step_is_over(self) -> None:
        """If the workers said nothing of an agent in it, nothing has changed."""
        if self._asked_at is None:
            self._known_at = self.clock()

    def answered(self) -> None:
        """All workers have reported."""
        self._was_answered |= self._asked_at is not None
        self._asked_at, self._known_at = None, self.clock()
