"""Where an engine's offers wait for the claims on them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvbridge_proto.peer import Claim

from ..states import OfferState
from .containers import Recent
from .outgoing import OpenOffer

AWAITED_S = 15.0  # a waiting receiver repeats its Hold three times within this
MOST_AWAITED = 16384
MOST_CUT_SHORT = 4096  # bound, in case engines never send the last part of an offer
MOST_ENDED = 16384  # as many as may be open
ENDED_S = 300.0  # a want is sent when its engine has blocks for it, and then waits a minute (vLLM's `deadline_s`)


@dataclass(slots=True, eq=False)
class EndedOffer:
    """An offer that ended before all claims on it came. Each late claim is refused once, with the reason.

    `want` is None if no claim had come; the first late claim sets it. `heard` are the receivers that had their answer.
    """

    rendezvous: str
    why: tuple[str, str]  # (code, reason)
    until: float
    want: str | None = None
    receivers: int = 0
    heard: set[int] = field(default_factory=set)


class Rendezvous:
    """Open offers by rendezvous id, oldest first, and ended ones for as long as a claim on them may still come.

    A receiver may say that it waits under an id before anything is offered there. `cut_short` names offers that ended
    before their engine had sent all of them. Later offers under such a name are ignored; their blocks may be reused at
    once.
    """

    def __init__(self) -> None:
        self._offers: dict[str, list[OpenOffer]] = {}
        # By rendezvous id and the receiver's incarnation: how many of its requests wait, and when it said so.
        self._awaited: dict[str, dict[str, tuple[int, float]]] = {}
        self._ended: dict[str, list[EndedOffer]] = {}
        self._by_age: OrderedDict[EndedOffer, None] = OrderedDict()
        self.cut_short: Recent[str] = Recent(MOST_CUT_SHORT)

    def enter(self, offered: OpenOffer) -> None:
        """Add an open offer. Unclaimed ended offers under the same id are forgotten: later claims are for this one."""
        self._offers.setdefault(offered.rendezvous, []).append(offered)
        for ended in [each for each in self._ended.get(offered.rendezvous, ()) if each.want is None]:
            self._forget(ended)

    def leave(self, offered: OpenOffer) -> None:
        """Remove a released offer."""
        offers = self._offers[offered.rendezvous]
        offers.remove(offered)
        if not offers:
            del self._offers[offered.rendezvous]
        if not offered.is_complete:
            self.cut_short.add(offered.request)

    def open_in(self, rendezvous: str) -> list[OpenOffer]:
        """Open offers, oldest first."""
        return [each for each in self._offers.get(rendezvous, ()) if each.state is OfferState.OPEN]

    def await_in(self, rendezvous: str, incarnation: str, count: int, now: float) -> list[OpenOffer]:
        """Record that `count` requests of a receiver wait under this id. Returns the offers awaited by any receiver."""
        receivers = self._awaited.pop(rendezvous, {})
        recent = {receiver: said for receiver, said in receivers.items() if now - said[1] <= AWAITED_S}
        before, _ = recent.pop(incarnation, (0, now))
        self._awaited[rendezvous] = recent | {incarnation: (max(before, count), now)}
        if len(self._awaited) > MOST_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        return self.open_in(rendezvous)[: self.awaited_in(rendezvous, now)]

    def awaited_in(self, rendezvous: str, now: float) -> int:
        """How many requests wait under this id. They wait for the oldest offers."""
        receivers = self._awaited.get(rendezvous, {})
        return sum(count for count, at in receivers.values() if now - at <= AWAITED_S)

    def awaiting(self, rendezvous: str) -> str:
        """The incarnation of the last receiver that said it waits there; "" if none."""
        return next(reversed(self._awaited.get(rendezvous, {})), "")

    def remember(self, ended: EndedOffer, now: float) -> None:
        """Keep an ended offer. Expired ones are dropped, and the oldest if there are too many."""
        self._ended.setdefault(ended.rendezvous, []).append(ended)
        self._by_age[ended] = None
        self.forget_old(now)

    def forget_old(self, now: float) -> None:
        while self._by_age:
            oldest = next(iter(self._by_age))
            if oldest.until > now and len(self._by_age) <= MOST_ENDED:
                return
            self._forget(oldest)

    def forget_ended(self) -> None:
        self._ended.clear()
        self._by_age.clear()

    def _forget(self, ended: EndedOffer) -> None:
        del self._by_age[ended]
        offers = self._ended[ended.rendezvous]
        offers.remove(ended)
        if not offers:
            del self._ended[ended.rendezvous]

    def offer_for(self, claim: Claim) -> OpenOffer | EndedOffer | None:
        """The offer that this claim gets. All claims of one want get the same one, even if it has ended meanwhile.

        A new want gets an open offer before an ended one. So it is refused for an earlier equal prompt only if no other
        offer is open.
        """
        offers = self.open_in(claim.rendezvous)
        ended = [each for each in self._ended.get(claim.rendezvous, ()) if claim.receiver not in each.heard]
        found: list[OpenOffer | EndedOffer] = [each for each in offers if each.want == claim.want]
        found += [each for each in ended if each.want == claim.want]
        found += [each for each in offers if each.want is None]
        found += [each for each in ended if each.want is None]
        return next(iter(found), None)

    def hear(self, ended: EndedOffer, claim: Claim) -> tuple[str, str]:
        """Record that this claim is refused, and return (code, reason). Forget the offer once all have heard."""
        ended.want, ended.receivers = claim.want, ended.receivers or claim.receivers
        ended.heard.add(claim.receiver)
        if len(ended.heard) >= ended.receivers:
            self._forget(ended)
        return ended.why
