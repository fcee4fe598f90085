"""What a claim must be before a source serves it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge_proto.common import MAX_RANKS
from kvbridge_proto.peer import Claim, Refuse, SlotLease

from ..errors import PeerError
from ..geometry.plan import Plan
from .actions import Send
from .outgoing import OutgoingTransfer
from .session import AttachedEngine, Session

MOST_LEASES = 4096  # unused, of one sink: as many slots as an agent can have


def planned(claim: Claim, session: Session, home: AttachedEngine) -> Plan:
    """What its sink takes, which must be what it says. Raises KVBridgeError."""
    epochs = (("source_epoch", home.epoch, claim.source_epoch), ("sink_epoch", session.peer_epoch, claim.sink_epoch))
    for name, ours, theirs in epochs:
        if ours != theirs:
            raise PeerError("stale_epoch", f"{name}: ours {ours}, theirs {theirs}")
    if claim.sink >= claim.sinks or claim.sinks > MAX_RANKS:
        raise PeerError("bad_sink", f"sink: {claim.sink} of {claim.sinks} ranks, at most {MAX_RANKS}")
    plan = session.planner.plan(claim.takes, claim.first_token, claim.end_token, session.slot_bytes)
    if plan.digest != claim.plan:
        raise PeerError("plan_mismatch", f"plan: ours {plan.digest}, theirs {claim.plan}")
    return plan


def surplus(out: OutgoingTransfer, leases: Sequence[SlotLease], unused: int) -> str:
    """Why these are more slots than a sink can have or has a use for; we keep them. It has lent `unused` already."""
    if not leases:
        return ""
    if (lent := out.lent + len(leases)) > out.plan.chunks:
        return f"leases: {lent} for {out.plan.chunks} chunks"
    unused += len(leases)
    return f"leases: {unused} unused, at most {MOST_LEASES}" if unused > MOST_LEASES else ""


def refused(boot: str, claim: Claim, code: str, reason: str) -> Send:
    """What its sink hears of a claim that is not served."""
    return Send(boot, Refuse(code=code, reasons=(reason[:1024],), about=claim.transfer))
