"""What the sender keeps: its engine's offers, and where they wait for claims. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvbridge_proto.peer import Claim

from ..state_machines import OfferState
from .containers import Recent
from .transfer import Known, OpenOffer

AWAITED_S = 15.0  # a waiting receiver repeats its Hold three times within this
MOST_AWAITED = 16384
MOST_ENDED = 16384  # as many as may be open
ENDED_S = 300.0  # a want is sent when its engine has blocks for it, and then waits a minute (vLLM's `deadline_s`)


def call_of(rendezvous: str) -> str:
    """The call that this rendezvous id names, without the prompt's digest."""
    return rendezvous.rpartition("/")[0]


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

    A receiver may say that it waits under an id before anything is offered there.
    """

    def __init__(self) -> None:
        self._offers: dict[str, list[OpenOffer]] = {}
        # By rendezvous id and the receiver's incarnation: how many of its requests wait, and when it said so.
        self._awaited: dict[str, dict[str, tuple[int, float]]] = {}
        self._ended: dict[str, list[EndedOffer]] = {}
        self._by_age: OrderedDict[EndedOffer, None] = OrderedDict()
        # By rendezvous id: how the last offer ended, with (code, reason) if it did early.
        self._last: OrderedDict[str, tuple[Known, tuple[str, str] | None]] = OrderedDict()
        self._met: Recent[tuple[str, str]] = Recent(MOST_ENDED)  # (rendezvous id, want) of claims that had their offer
        # Calls that ended early: (code, reason), and until when that is remembered. Oldest first.
        self._ended_calls: OrderedDict[str, tuple[tuple[str, str], float]] = OrderedDict()

    def enter(self, offered: OpenOffer) -> None:
        """Add an open offer. Unclaimed ended offers under the same id are forgotten: later claims are for this one.

        A call of that name that ended was another one.
        """
        self._ended_calls.pop(call_of(offered.rendezvous), None)
        self._offers.setdefault(offered.rendezvous, []).append(offered)
        self._last.pop(offered.rendezvous, None)
        for ended in [each for each in self._ended.get(offered.rendezvous, ()) if each.want is None]:
            self._forget(ended)

    def leave(self, offered: OpenOffer) -> None:
        """Remove a released offer."""
        offers = self._offers[offered.rendezvous]
        offers.remove(offered)
        if not offers:
            del self._offers[offered.rendezvous]
        self._last[offered.rendezvous] = offered.ended_as
        if len(self._last) > MOST_ENDED:
            self._last.popitem(last=False)

    def open_in(self, rendezvous: str) -> list[OpenOffer]:
        """Open offers, oldest first."""
        return [each for each in self._offers.get(rendezvous, ()) if each.state is OfferState.OPEN]

    def await_in(self, rendezvous: str, incarnation: str, count: int, now: float) -> list[OpenOffer]:
        """Record that `count` requests of a receiver wait under this id. Returns the offers awaited by any receiver."""
        receivers = self._awaited.pop(rendezvous, {})
        recent = {receiver: entry for receiver, entry in receivers.items() if now - entry[1] <= AWAITED_S}
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

    def end_call(self, call: str, why: tuple[str, str], now: float) -> None:
        """Nothing more is offered for this call. `why` is (code, reason)."""
        self._ended_calls.pop(call, None)
        self._ended_calls[call] = why, now + ENDED_S
        self.forget_old(now)

    def is_all_offered(self, claim: Claim) -> bool:
        """Whether every offer for this claim was made before: its receiver says so, or our engine did."""
        return claim.is_offered or call_of(claim.rendezvous) in self._ended_calls

    def forget_old(self, now: float) -> None:
        while self._ended_calls and (
            len(self._ended_calls) > MOST_ENDED or next(iter(self._ended_calls.values()))[1] <= now
        ):
            self._ended_calls.popitem(last=False)
        while self._by_age:
            oldest = next(iter(self._by_age))
            if oldest.until > now and len(self._by_age) <= MOST_ENDED:
                return
            self._forget(oldest)

    def forget_ended(self) -> None:
        self._ended.clear()
        self._by_age.clear()
        self._last.clear()
        self._met.clear()
        self._ended_calls.clear()

    def why_none(self, claim: Claim) -> tuple[str, str] | None:
        """Why there is no offer for this claim, as (code, reason). None if there is one, or one may still come.

        Everything that our engine had sent when the claim came has been read.
        """
        if not self.is_all_offered(claim) or self.offer_for(claim) is not None:
            return None
        ended_as, _ = self._ended_calls.get(call_of(claim.rendezvous), (None, 0.0))
        known, over = self._last.get(claim.rendezvous, (Known.NOTHING, ended_as))
        if claim.rendezvous in self._offers:
            known, over = Known.TAKEN, None
        return over or (known.code, known.reason)

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
        unclaimed: OpenOffer | EndedOffer | None = None
        for offered in self._offers.get(claim.rendezvous, ()):
            if offered.state is OfferState.OPEN:
                if offered.want == claim.want:
                    return offered
                if offered.want is None and unclaimed is None:
                    unclaimed = offered
        for ended in self._ended.get(claim.rendezvous, ()):
            if claim.receiver not in ended.heard:
                if ended.want == claim.want:
                    return ended
                if ended.want is None and unclaimed is None:
                    unclaimed = ended
        return unclaimed

    def meet(self, claim: Claim) -> None:
        """Record that this claim has its offer, an ended one or an open one."""
        self._met.add((claim.rendezvous, claim.want))

    def is_served(self, claim: Claim) -> bool:
        """Whether its want had its offer before, and that one has nothing more for it.

        A receiver whose session ends cannot know whether a claim without rows was heard, and sends it again. By then
        another prompt may be offered under the same id.
        """
        if (claim.rendezvous, claim.want) not in self._met:
            return False
        found = self.offer_for(claim)
        return found is None or found.want != claim.want

    def refuse(self, ended: EndedOffer, claim: Claim) -> tuple[str, str]:
        """Record that this claim is refused, and return (code, reason). Forget the offer once all have heard."""
        ended.want, ended.receivers = claim.want, ended.receivers or claim.receivers
        ended.heard.add(claim.receiver)
        if len(ended.heard) >= ended.receivers:
            self._forget(ended)
        return ended.why
