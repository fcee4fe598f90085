"""Random walks through both exchange machines."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.sim.model import State

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=60,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Transfers(RuleBasedStateMachine):
    """Three wants that share two slots; whatever may happen next, happens."""

    def __init__(self) -> None:
        super().__init__()
        budget = {kind: 2 for kind in ("cut", "restart", "abandon", "withdraw", "repeat", "fails", "late")}
        self.state = State(3, 12, slots=2, local=2, budget=budget)

    @rule(choice=st.integers(0, 1000))
    def goes_on(self, choice: int) -> None:
        if moves := self.state.moves():
            self.state.make(moves[choice % len(moves)])

    @invariant()
    def slots_add_up(self) -> None:
        node = self.state.receiver
        pool = node.slots
        counts = pool.counts()
        assert counts.free + counts.lent + counts.quarantined == len(pool)
        assert counts.free == pool.free and len(set(pool._free)) == pool.free
        assert node.receive_orders.scattering == len(self.state.under_way("scatter"))

    def teardown(self) -> None:
        self.state.check_rest()


TestTransfers = Transfers.TestCase
TestTransfers.settings = SETTINGS
