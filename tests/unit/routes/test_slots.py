"""The pool of slots, on random walks beside a dictionary of what is out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kvbridge_proto.peer import SlotLease

from kvbridge.routes.slots.receive_slots import ReceiveSlots

pytestmark = pytest.mark.proves("G2", "G5")

SETTINGS = settings(max_examples=60, stateful_step_count=60, derandomize=True, database=None)


class Slots(RuleBasedStateMachine):
    """What is out: slot -> (generation, transfer, how)."""

    COUNT = 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReceiveSlots(self.COUNT)
        self.out: dict[int, tuple[int, str, str]] = {}
        self.last = dict.fromkeys(range(self.COUNT), 0)

    @rule(count=st.integers(0, 4), transfer=st.sampled_from("ab"))
    def lend(self, count: int, transfer: str) -> None:
        leases = self.pool.lend(count, transfer, transfer.upper())
        held, free = sum(each[1] == transfer for each in self.out.values()), self.COUNT - len(self.out)
        while count and free and (held == 0 or held < 2 * free):
            count, held, free = count - 1, held + 1, free - 1
        assert len(leases) == self.COUNT - len(self.out) - free
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
    def quarantine(self, transfer: str) -> None:
        quarantined = [slot for slot, held in self.out.items() if held[1] == transfer and held[2] == "lent"]
        assert self.pool.quarantine(transfer) == len(quarantined)
        for slot in quarantined:
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


def test_a_slot_is_free_again_only_by_its_own_lease_or_by_proof_and_no_generation_repeats() -> None:
    run_state_machine_as_test(Slots, settings=SETTINGS)
