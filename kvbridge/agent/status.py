"""Builds the parts of `kvbridge status`: transfers, offers and readers; and from it the page /status."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from itertools import islice

from kvbridge_proto.common import DAY_S
from kvbridge_proto.pool import MOST_COUNT
from kvbridge_proto.status import (
    HeldCounts,
    OfferStatus,
    PageEngine,
    PagePeer,
    PeerStatus,
    ReaderStatus,
    RefusalStatus,
    Status,
    StatusPage,
    TransferStatus,
    problems,
)
from msgspec import convert, structs

from ..exchange.receiver import Receiver
from ..exchange.sender import Sender
from ..exchange.transfer import OpenOffer
from ..transport.door import Importer
from .rates import Rates, Total

KEY_OF_ADDRESS = re.compile(r"#\S+")
KEY = re.compile(r"(?<!\S)\S{40}(?!\S)")  # Z85, as it stands in a reason
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
        out.offered.engines_number: out.incarnation
        for out in sending.outgoing_transfers.values()
        if out.offered is not None
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
        for offered in islice(sending.engines_offers, MOST_OFFERS_SHOWN)
    )


def peers(statuses: Iterable[PeerStatus], rates: Rates) -> tuple[PeerStatus, ...]:
    """One line per session, with what has been carried over those to receivers."""
    return tuple(_with_total(each, rates.to(each.incarnation)) for each in statuses)


def _with_total(status: PeerStatus, total: Total) -> PeerStatus:
    if not status.state.startswith("receiver"):
        return status
    size_bytes = min(MOST_COUNT, total.size_bytes)
    return structs.replace(status, carried=total.transfers, carried_bytes=size_bytes, carried_s=total.seconds)


def held(sending: Sender, now: float) -> HeldCounts:
    """Of all offers, also beyond those that are shown."""
    offers = sending.engines_offers
    return HeldCounts(offers=len(offers), unclaimed=len(sending.unclaimed(now)), tokens=offered_tokens(sending))


def offered_tokens(sending: Sender) -> int:
    """Of all open offers. Callable from any thread."""
    return min(MOST_COUNT, sum(offered.tokens - offered.first_token for offered in sending.engines_offers))


def _age(since: float, now: float) -> float:
    return min(DAY_S, max(0.0, now - since))


def _left(until: float | None, now: float) -> float | None:
    """How long until then, rounded down to milliseconds: never more than there is."""
    return None if until is None else min(DAY_S, max(0.0, math.floor((until - now) * 1e3) / 1e3))


def _state(offered: OpenOffer, is_unclaimed: bool) -> str:
    if offered.over is not None:
        return "ending"
    if offered.want is not None or offered.shares:
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


def page(status: Status) -> StatusPage:
    """What anybody who reaches the metrics port may know: no requests, no ids, no keys."""
    agent, engine = status.agent, status.engine
    return StatusPage(
        name=agent.name,
        address=_without_key(agent.address),
        version=agent.version,
        state=status.state,
        uptime_s=status.uptime_s,
        device=status.device,
        problems=problems(status),
        engine=None if engine is None else convert(engine, PageEngine, from_attributes=True),
        receive_slots=status.receive_slots,
        send_slots=status.send_slots,
        peers=tuple(map(_page_peer, status.peers)),
        refusals=tuple(map(_page_refusal, status.refusals)),
        transfers=len(status.transfers),
        held=status.held,
        fetched_tokens=status.prompts.fetched_tokens,
        computed_tokens=status.prompts.computed_tokens,
    )


def _page_peer(peer: PeerStatus) -> PagePeer:
    role, _, state = peer.state.partition(" ")
    changed = {"address": _without_key(peer.address), "role": role, "state": state, "route": peer.route_name}
    return convert(structs.asdict(peer) | changed, PagePeer)


def _page_refusal(refusal: RefusalStatus) -> RefusalStatus:
    return structs.replace(
        refusal, address=_without_key(refusal.address), reason=KEY.sub("KEY", _without_key(refusal.reason))
    )


def _without_key(text: str) -> str:
    return KEY_OF_ADDRESS.sub("", text)
