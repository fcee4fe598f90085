"""Which transfers get the slots that are free: who has waited longest for one. Pure."""

from __future__ import annotations

from kvbridge_proto.peer import Grant, SlotLease

from .actions import Action, Send
from .incoming import IncomingState, IncomingTransfer
from .orders import Lend
from .slots import SlotPool
from .turns import Turns


def lend_early(slots: SlotPool, incoming: IncomingTransfer) -> tuple[SlotLease, ...]:
    """Slots for a transfer that is being claimed: saves the round trip of asking once chunks are ready."""
    plenty = slots.free - len(slots) // 2  # half stays for those that are ready for sure
    return _lend(slots, min(max(plenty, 0), incoming.plan.chunks), incoming)


def queue(slots: SlotPool, hungry: Turns[IncomingTransfer], incoming: IncomingTransfer) -> None:
    """It waits for a slot if it can use one."""
    if incoming.state is IncomingState.CLAIMED and _hunger(slots, incoming) > 0:
        hungry.add(incoming.transfer, incoming.turn, incoming)


def grants(slots: SlotPool, hungry: Turns[IncomingTransfer]) -> list[Action]:
    """Lend free slots to transfers whose chunks are ready, one each in turn from call to call; what to tell whom."""
    lent: dict[tuple[str, str], tuple[SlotLease, ...]] = {}
    while slots.free and (incoming := hungry.take()) is not None:
        whom = incoming.address, incoming.transfer
        lent[whom] = lent.get(whom, ()) + _lend(slots, 1, incoming)
        queue(slots, hungry, incoming)
    actions: list[Action] = []
    for (address, transfer), leases in lent.items():
        actions += [Lend(transfer, leases), Send(address, Grant(transfer=transfer, leases=leases))]
    return actions


def _lend(slots: SlotPool, count: int, incoming: IncomingTransfer) -> tuple[SlotLease, ...]:
    if leases := slots.lend(count, incoming.transfer):
        incoming.turn = slots.turn
    return leases


def _hunger(slots: SlotPool, incoming: IncomingTransfer) -> int:
    """How many chunks are ready and have no slot."""
    return incoming.ready - incoming.scattered - slots.lent_to(incoming.transfer)
