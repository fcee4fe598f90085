"""Builds the parts of `kvbridge status`: transfers, offers and readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

from kvbridge_proto.common import DAY_S
from kvbridge_proto.pool import MOST_COUNT
from kvbridge_proto.status import OfferStatus, ReaderStatus, TransferStatus

from ..exchange.receiver import Receiver
from ..exchange.sender import Sender
from ..exchange.transfer import OpenOffer
from ..transport.door import Importer

# Limits of the status message (status.py of the protocol).
MOST_OFFERS_SHOWN = 1024  # the oldest; metrics count all


def transfers(receiving: Receiver, sending: Sender, now: float) -> tuple[TransferStatus, ...]:
    """One line per want and per outgoing transfer."""
    wants = [
        TransferStatus(
            role="receiver",
            request=wanted.want.request,
            rendezvous=wanted.want.rendezvous,
            peer=wanted.want.sender,
            state=wanted.state.name.lower(),
            chunks_done=sum(incoming.placed for incoming in wanted.incoming_transfers.values()),
            chunks=min(MOST_COUNT, sum(incoming.plan.chunks for incoming in wanted.incoming_transfers.values())),
            age_s=_age(wanted.started, now),
        )
        for wanted in receiving.wants.values()
    ]
    outgoing_transfers = [
        TransferStatus(
            role="sender",
            request=outgoing.offered.request if outgoing.offered else "",
            rendezvous=outgoing.claim.rendezvous,
            peer=outgoing.incarnation,
            state=outgoing.state.name.lower(),
            chunks_done=outgoing.chunks_done,
            chunks=min(MOST_COUNT, outgoing.plan.chunks),  # a claim may be of any number of tokens
            age_s=_age(outgoing.started, now),
        )
        for outgoing in sending.outgoing_transfers.values()
    ]
    return tuple(wants + outgoing_transfers)


def offers(sending: Sender, name_of: Callable[[str], str], now: float) -> tuple[OfferStatus, ...]:
    """One line per offer, the oldest first. `name_of` gives the name of an incarnation's agent."""
    unclaimed = {offered.number for offered in sending.unclaimed(now)}
    claimed_by = {
        out.offered.number: out.incarnation for out in sending.outgoing_transfers.values() if out.offered is not None
    }
    return tuple(
        OfferStatus(
            request=offered.request,
            rendezvous=offered.rendezvous,
            state=_state(offered, offered.number in unclaimed),
            peer=name_of(claimed_by.get(offered.number, sending.awaited_by(offered)))[:256],
            tokens=offered.tokens - offered.first_token,
            blocks=offered.blocks,
            age_s=_age(offered.began, now),
            left_s=_left(sending.held_until(offered), now),
        )
        for offered in islice(sending.offers.values(), MOST_OFFERS_SHOWN)
    )


def _age(since: float, now: float) -> float:
    return min(DAY_S, max(0.0, now - since))


def _left(until: float | None, now: float) -> float | None:
    """How long until then, rounded down to milliseconds: never more than there is."""
    return None if until is None else min(DAY_S, max(0.0, math.floor((until - now) * 1e3) / 1e3))


def _state(offered: OpenOffer, is_unclaimed: bool) -> str:
    if offered.over is not None:
        return "ending"
    if offered.want is not None:
        return "claimed"
    return "computing" if not offered.is_last else "unclaimed" if is_unclaimed else "awaited"


def readers(importers: Iterable[Importer], now: float) -> tuple[ReaderStatus, ...]:
    """One line per agent that has our engine's memory mapped, the longest first."""
    return tuple(
        ReaderStatus(
            agent=importer.agent,
            pid=importer.pid,
            uid=importer.uid,
            epoch=importer.epoch,
            age_s=_age(importer.since, now),
            over_s=None if importer.over_at is None else _age(importer.over_at, now),
        )
        for importer in importers
    )
