"""Which transfers get the slots that are free. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.peer import Lease

from .intake import Intake
from .slots import SlotPool


def lend_in_turn(slots: SlotPool, flowing: Sequence[Intake]) -> dict[str, tuple[Lease, ...]]:
    """Lend free slots to transfers whose chunks are ready, one each in turn. By transfer."""
    granted: dict[str, tuple[Lease, ...]] = {}
    while slots.free:
        hungry = [intake for intake in flowing if _hunger(slots, intake) > 0]
        if not hungry:
            break
        for intake in hungry:
            if lent := slots.lend(1, intake.transfer):
                granted[intake.transfer] = granted.get(intake.transfer, ()) + lent
    return granted


def _hunger(slots: SlotPool, intake: Intake) -> int:
    """How many chunks are ready and have no slot."""
    return intake.ready - len(intake.landed) - slots.lent_to(intake.transfer)
