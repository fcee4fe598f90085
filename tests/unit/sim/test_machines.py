"""Random walks through both exchange machines, and through the slots alone, beside a model that is obviously right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvbridge_proto.peer import SlotLease

from kvbridge.exchange.slots import SlotPool
from tests.unit.sim.model import begin

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Transfers(RuleBasedStateMachine):
    """Three wants that share two slots; whatever may happen next, happens."""

    def __init__(self) -> None:
        super().__init__()
        budget = {kind: 2 for kind in ("cut", "restart", "abandon", "withdraw", "repeat", "fails", "late")}
        self.state = begin(3, 12, slots=2, local=2, budget=budget)

    @rule(choice=st.integers(0, 1000))
    def goes_on(self, choice: int) -> None:
        if moves := self.state.moves():
            self.state.make(moves[choice % len(moves)])

    @invariant()
    def slots_add_up(self) -> None:
        pool = self.state.receiving.slots
        counts = pool.counts()
        assert counts.free + counts.lent + counts.quarantined == len(pool)
        assert counts.free == pool.free and len(set(pool._free)) == pool.free
        assert self.state.receive_orders.scattering == len(self.state.scatters)

    def teardown(self) -> None:
        self.state.check_rest()


class Slots(RuleBasedStateMachine):
    """The pool beside a dictionary of what is out: slot -> (generation, transfer, how)."""

    COUNT = 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(self.COUNT)
        self.out: dict[int, tuple[int, str, str]] = {}
        self.last = dict.fromkeys(range(self.COUNT), 0)

    @rule(count=st.integers(0, 4), transfer=st.sampled_from("ab"))
    def lend(self, count: int, transfer: str) -> None:
        leases = self.pool.lend(count, transfer)
        assert len(leases) == min(count, self.COUNT - len(self.out))
        for lease in leases:
            assert lease.slot not in self.out and lease.generation == self.last[lease.slot] + 1
            self.last[lease.slot] = lease.generation
            self.out[lease.slot] = lease.generation, transfer, "lent"

    @rule(slot=st.integers(0, COUNT - 1), generation=st.integers(0, 6), transfer=st.sampled_from("ab"))
    def land(self, slot: int, generation: int, transfer: str) -> None:
        if (held := self.out.get(slot)) is not None and held[:2] == (generation, transfer):
            del self.out[slot]
        self.pool.land([SlotLease(slot, generation)], transfer)

    @rule(transfer=st.sampled_from("ab"))
    def doubt(self, transfer: str) -> None:
        doubted = [slot for slot, held in self.out.items() if held[1] == transfer and held[2] == "lent"]
        assert self.pool.doubt(transfer) == len(doubted)
        for slot in doubted:
            self.out[slot] = (*self.out[slot][:2], "quarantined")

    @rule(transfer=st.sampled_from("ab"))
    def drain(self, transfer: str) -> None:
        drained = [slot for slot, held in self.out.items() if held[1] == transfer]
        assert self.pool.drain(transfer) == len(drained)
        for slot in drained:
            del self.out[slot]

    @rule()
    def rebuilt(self) -> None:
        kept = {slot: held for slot, held in self.out.items() if held[2] != "quarantined"}
        assert self.pool.rebuilt() == len(self.out) - len(kept)
        self.out = kept

    @invariant()
    def counts_agree(self) -> None:
        ways = [held[2] for held in self.out.values()]
        counts = self.pool.counts()
        found = counts.lent, counts.quarantined, counts.free
        assert found == (ways.count("lent"), ways.count("quarantined"), self.COUNT - len(ways))
        assert self.pool.lent == counts.lent


TestTransfers = Transfers.TestCase
TestTransfers.settings = SETTINGS
TestSlots = Slots.TestCase
TestSlots.settings = SETTINGS
