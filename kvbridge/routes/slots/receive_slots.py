"""Who may write which slot of our staging, and when a slot may be used again. Pure.

A slot that may still be written is never lent to anybody else: it is quarantined until there is proof that no write
of its lease can land any more. No timer is a proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from kvbridge_proto.peer import SlotLease
from kvbridge_proto.status import SlotCounts

from ...exchange.containers import Shares
from ...state_machines import SLOT_TABLE, SlotEvent, SlotState


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    generation: int = 0
    transfer: str = ""
    peer: Hashable = None  # who writes


class ReceiveSlots:
    """The slots of one staging area that remote agents write. There may be none until `make` is called."""

    def __init__(self, count: int) -> None:
        self._slots: list[_Slot] = []
        self._free: deque[int] = deque()
        self.make(count)
        self._of_transfer: dict[str, set[int]] = {}
        self._shares = Shares()
        self.turn = 0  # leases granted so far
        self.lent = 0

    def __len__(self) -> int:
        return len(self._slots)

    def make(self, count: int) -> None:
        """Create the slots. May be called with a count above zero only once."""
        assert not self._slots, f"slots: {len(self._slots)} were made before"
        self._slots = [_Slot() for _ in range(count)]
        self._free = deque(range(count))

    @property
    def free(self) -> int:
        return len(self._free)

    def counts(self) -> SlotCounts:
        free, lent = self.free, self.lent
        return SlotCounts(free=free, lent=lent, landed=0, quarantined=max(0, len(self._slots) - free - lent))

    def quarantined(self, of: Collection[str] | None = None) -> frozenset[tuple[int, int]]:
        """Slot and generation of each lease that may still be used to write, by all transfers or these."""
        return frozenset(
            (index, slot.generation)
            for index, slot in enumerate(self._slots)
            if slot.state is SlotState.QUARANTINED and (of is None or slot.transfer in of)
        )

    def may_lend(self, peer: Hashable) -> bool:
        """Whether there is a slot for this peer, within its share."""
        return self._shares.may_take(peer, self.free)

    def lend(self, count: int, transfer: str, peer: Hashable) -> tuple[SlotLease, ...]:
        """Up to `count` leases, each under a new generation, within the share of `peer`, who writes."""
        leases: list[SlotLease] = []
        while len(leases) < count and self.may_lend(peer):
            index = self._free.popleft()
            slot = self._slots[index]
            slot.state = SLOT_TABLE[slot.state, SlotEvent.LEND]
            slot.generation += 1
            slot.transfer, slot.peer = transfer, peer
            self._shares.take(peer)
            self.turn += 1
            self.lent += 1
            self._of_transfer.setdefault(transfer, set()).add(index)
            leases.append(SlotLease(index, slot.generation))
        return tuple(leases)

    def land(self, leases: Iterable[SlotLease], transfer: str) -> None:
        """The data plane has finished with these leases. A lease whose slot has moved on to another is ignored."""
        for lease in leases:
            slot = self._slots[lease.slot]
            if (slot.generation, slot.transfer) == (lease.generation, transfer):
                self._step(lease.slot, SlotEvent.LAND)

    def quarantine(self, transfer: str) -> int:
        """The transfer ended: quarantine the slots still lent to it. Returns how many."""
        return self._step_all(transfer, (SlotState.LENT,), SlotEvent.QUARANTINE)

    def drain(self, transfer: str) -> int:
        """The sender has proven that it will not write for this transfer again. Returns how many slots became free."""
        return self._step_all(transfer, (SlotState.LENT, SlotState.QUARANTINED), SlotEvent.DRAIN)

    def rebuilt(self) -> int:
        """The indexes name new memory from now on. What they named, with the writes into it, is left behind.

        Returns how many slots became free.
        """
        quarantined = [i for i, slot in enumerate(self._slots) if slot.state is SlotState.QUARANTINED]
        for index in quarantined:
            self._step(index, SlotEvent.REBUILD)
        return len(quarantined)

    def has_out(self, transfer: str) -> bool:
        """Whether this transfer may still write any slot."""
        return transfer in self._of_transfer

    def lent_to(self, transfer: str) -> int:
        return sum(1 for i in self._of_transfer.get(transfer, ()) if self._slots[i].state is SlotState.LENT)

    def _step_all(self, transfer: str, states: tuple[SlotState, ...], event: SlotEvent) -> int:
        indexes = [i for i in self._of_transfer.get(transfer, ()) if self._slots[i].state in states]
        for index in indexes:
            self._step(index, event)
        return len(indexes)

    def _step(self, index: int, event: SlotEvent) -> None:
        slot = self._slots[index]
        was_lent = slot.state is SlotState.LENT
        slot.state = SLOT_TABLE[slot.state, event]
        self.lent -= was_lent
        if slot.state is SlotState.FREE:
            self._free.append(index)
            self._shares.give_back(slot.peer)
            held = self._of_transfer[slot.transfer]
            held.discard(index)
            if not held:
                del self._of_transfer[slot.transfer]
            slot.transfer, slot.peer = "", None
