"""What a claim must be before a sender serves it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.common import MAX_RANKS
from kvbridge_proto.peer import Claim, Refuse, SlotLease

from ..errors import PeerError
from ..geometry.plan import Plan
from .actions import Send
from .outgoing import OutgoingTransfer
from .session import AttachedEngine, Session

MOST_LEASES = 4096  # unused, of one receiver: as many slots as an agent can have


def planned(claim: Claim, session: Session, engine: AttachedEngine) -> Plan:
    """What its receiver takes, which must be what it says. Raises KVBridgeError."""
    epochs = (
        ("sender_epoch", engine.epoch, claim.sender_epoch),
        ("receiver_epoch", session.peer_epoch, claim.receiver_epoch),
    )
    for name, ours, theirs in epochs:
        if ours != theirs:
            raise PeerError("stale_epoch", f"{name}: ours {ours}, theirs {theirs}")
    if claim.receiver >= claim.receivers or claim.receivers > MAX_RANKS:
        raise PeerError("bad_receiver", f"receiver: {claim.receiver} of {claim.receivers} ranks, at most {MAX_RANKS}")
    plan = session.planner.plan(claim.takes, claim.first_token, claim.end_token, session.slot_bytes)
    if plan.digest != claim.plan:
        raise PeerError("plan_mismatch", f"plan: ours {plan.digest}, theirs {claim.plan}")
    return plan


def surplus(out: OutgoingTransfer, leases: Sequence[SlotLease], unused: int) -> str:
    """Why these are more slots than a receiver can have or has a use for; we keep them. It has lent `unused`
    already."""
    if not leases:
        return ""
    if (lent := out.lent + len(leases)) > out.plan.chunks:
        return f"leases: {lent} for {out.plan.chunks} chunks"
    unused += len(leases)
    return f"leases: {unused} unused, at most {MOST_LEASES}" if unused > MOST_LEASES else ""


def refused(incarnation: str, claim: Claim, code: str, reason: str) -> Send:
    """What its receiver hears of a claim that is not served."""
    return Send(incarnation, Refuse(code=code, reasons=(reason[:1024],), about=claim.transfer))
