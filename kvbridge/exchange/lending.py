"""Which transfers get the slots that are free: who has waited longest for one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.peer import Grant, Lease

from .actions import Action, Send
from .intake import Intake
from .slots import SlotPool


def lend_early(slots: SlotPool, intake: Intake) -> tuple[Lease, ...]:
    """Slots for a transfer that is being claimed: saves the round trip of asking once chunks are ready."""
    plenty = slots.free - len(slots) // 2  # half stays for those that are ready for sure
    return _lend(slots, min(max(plenty, 0), intake.plan.chunks), intake)


def grants(slots: SlotPool, flowing: Sequence[Intake]) -> list[Action]:
    """Lend free slots to transfers whose chunks are ready, one each in turn from call to call; what to tell whom."""
    lent: dict[str, tuple[Lease, ...]] = {}
    while slots.free:
        hungry = sorted((each for each in flowing if _hunger(slots, each) > 0), key=lambda intake: intake.turn)
        if not hungry:
            break
        for intake in hungry:
            if leases := _lend(slots, 1, intake):
                lent[intake.transfer] = lent.get(intake.transfer, ()) + leases
    addresses = {intake.transfer: intake.address for intake in flowing}
    return [Send(addresses[transfer], Grant(transfer=transfer, leases=leases)) for transfer, leases in lent.items()]


def _lend(slots: SlotPool, count: int, intake: Intake) -> tuple[Lease, ...]:
    if leases := slots.lend(count, intake.transfer):
        intake.turn = slots.turn
    return leases


def _hunger(slots: SlotPool, intake: Intake) -> int:
    """How many chunks are ready and have no slot."""
    return intake.ready - len(intake.landed) - slots.lent_to(intake.transfer)
