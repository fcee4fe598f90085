"""Which transfers get the slots that are free. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.peer import Grant, Lease

from .actions import Action, Send
from .intake import Intake
from .slots import SlotPool


def grants(slots: SlotPool, flowing: Sequence[Intake]) -> list[Action]:
    """Lend free slots to transfers whose chunks are ready, one each in turn; what to tell whom."""
    lent: dict[str, tuple[Lease, ...]] = {}
    while slots.free:
        hungry = [intake for intake in flowing if _hunger(slots, intake) > 0]
        if not hungry:
            break
        for intake in hungry:
            if leases := slots.lend(1, intake.transfer):
                lent[intake.transfer] = lent.get(intake.transfer, ()) + leases
    addresses = {intake.transfer: intake.address for intake in flowing}
    return [Send(addresses[transfer], Grant(transfer=transfer, leases=leases)) for transfer, leases in lent.items()]


def _hunger(slots: SlotPool, intake: Intake) -> int:
    """How many chunks are ready and have no slot."""
    return intake.ready - len(intake.landed) - slots.lent_to(intake.transfer)
