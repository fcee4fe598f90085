"""Transfers under way, in the words of `kvbridge status`."""

from __future__ import annotations

from kvbridge_proto.status import TransferStatus

from ..exchange.inbound import Inbound
from ..exchange.outbound import Outbound

# What a status may say at most (status.py of the protocol).
MOST = 1 << 40
DAY_S = 86400.0


def transfers(inbound: Inbound, outbound: Outbound, now: float) -> tuple[TransferStatus, ...]:
    """One line per want and per outgoing transfer."""
    wants = [
        TransferStatus(
            role="sink",
            request=wanted.want.request,
            room=wanted.want.room,
            peer=wanted.want.source,
            state=wanted.state.name.lower(),
            chunks_done=sum(intake.scattered for intake in wanted.intakes.values()),
            chunks=min(MOST, sum(intake.plan.chunks for intake in wanted.intakes.values())),
            age_s=min(DAY_S, max(0.0, now - wanted.started)),
        )
        for wanted in inbound.wants.values()
    ]
    outlets = [
        TransferStatus(
            role="source",
            request=outlet.offered.request if outlet.offered else "",
            room=outlet.claim.room,
            peer=outlet.boot,
            state=outlet.state.name.lower(),
            chunks_done=outlet.shipped,
            chunks=min(MOST, outlet.plan.chunks),  # a claim may be of any number of tokens
            age_s=min(DAY_S, max(0.0, now - outlet.started)),
        )
        for outlet in outbound.outlets.values()
    ]
    return tuple(wants + outlets)
