"""Where an engine's offers wait for the claims on them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvbridge_proto.peer import Claim

from ..states import OfferState
from .containers import Recent
from .outgoing import OpenOffer

AWAITED_S = 15.0  # who waits says so three times meanwhile
MOST_AWAITED = 16384
MOST_CUT_SHORT = 4096  # should an engine never say its last word
MOST_ENDED = 16384  # as many as may be open
ENDED_S = 300.0  # a want comes when its engine has blocks for it, and waits for a minute (vLLM's `deadline_s`)


@dataclass(slots=True, eq=False)
class EndedOffer:
    """An offer that ended before all claims on it came. They come in vain: each hears why, once.

    `want` is None if none had come; then it is the first one's that does. `heard` are the receivers that had an answer.
    """

    rendezvous: str
    why: tuple[str, str]  # (code, reason)
    until: float
    want: str | None = None
    receivers: int = 0
    heard: set[int] = field(default_factory=set)


class Rendezvous:
    """Offers by rendezvous id, oldest first; those that ended, for as long as a claim on them may yet come.

    What is awaited in a rendezvous may have been said before anything was offered there. `cut_short` are the names of
    those that ended before their engine had said all of them. What it says of such a one later, its agent has no part
    in: the blocks may be anybody's by then.
    """

    def __init__(self) -> None:
        self._offers: dict[str, list[OpenOffer]] = {}
        self._awaited: dict[
            str, dict[str, tuple[int, float]]
        ] = {}  # by rendezvous, incarnation of a receiver: how many wait, said when
        self._ended: dict[str, list[EndedOffer]] = {}
        self._by_age: OrderedDict[EndedOffer, None] = OrderedDict()
        self.cut_short: Recent[str] = Recent(MOST_CUT_SHORT)

    def enter(self, offered: OpenOffer) -> None:
        """Whoever comes from now on comes for this one, and not for one that ended before."""
        self._offers.setdefault(offered.rendezvous, []).append(offered)
        for ended in [each for each in self._ended.get(offered.rendezvous, ()) if each.want is None]:
            self._forget(ended)

    def leave(self, offered: OpenOffer) -> None:
        """It is released."""
        rendezvous = self._offers[offered.rendezvous]
        rendezvous.remove(offered)
        if not rendezvous:
            del self._offers[offered.rendezvous]
        if not offered.is_told_out:
            self.cut_short.add(offered.request)

    def open_in(self, rendezvous: str) -> list[OpenOffer]:
        """Those that may be read, oldest first."""
        return [each for each in self._offers.get(rendezvous, ()) if each.state is OfferState.OPEN]

    def await_in(self, rendezvous: str, incarnation: str, count: int, now: float) -> list[OpenOffer]:
        """So many requests of a receiver wait for offers under this id. Which offers are awaited, by whomever."""
        receivers = self._awaited.pop(rendezvous, {})
        recent = {receiver: said for receiver, said in receivers.items() if now - said[1] <= AWAITED_S}
        before, _ = recent.pop(incarnation, (0, now))
        self._awaited[rendezvous] = recent | {incarnation: (max(before, count), now)}
        if len(self._awaited) > MOST_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        return self.open_in(rendezvous)[: self.awaited_in(rendezvous, now)]

    def awaited_in(self, rendezvous: str, now: float) -> int:
        """How many requests wait there: for the oldest offers."""
        receivers = self._awaited.get(rendezvous, {})
        return sum(count for count, at in receivers.values() if now - at <= AWAITED_S)

    def awaiting(self, rendezvous: str) -> str:
        """The incarnation of the receiver that said last that it waits there."""
        return next(reversed(self._awaited.get(rendezvous, {})), "")

    def remember(self, ended: EndedOffer, now: float) -> None:
        """The newest; what is too old goes, and the oldest when there are too many."""
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
        rendezvous = self._ended[ended.rendezvous]
        rendezvous.remove(ended)
        if not rendezvous:
            del self._ended[ended.rendezvous]

    def place_of(self, claim: Claim) -> OpenOffer | EndedOffer | None:
        """All claims of one want get one offer, also when it has ended meanwhile; what is open goes before what is not.

        So a claim on the next equal prompt hears of one that ended unserved only where no other is open.
        """
        offers = self.open_in(claim.rendezvous)
        ended = [each for each in self._ended.get(claim.rendezvous, ()) if claim.receiver not in each.heard]
        found: list[OpenOffer | EndedOffer] = [each for each in offers if each.want == claim.want]
        found += [each for each in ended if each.want == claim.want]
        found += [each for each in offers if each.want is None]
        found += [each for each in ended if each.want is None]
        return next(iter(found), None)

    def hear(self, ended: EndedOffer, claim: Claim) -> tuple[str, str]:
        """This claim came in vain: why. Nothing is kept once all of its want have heard."""
        ended.want, ended.receivers = claim.want, ended.receivers or claim.receivers
        ended.heard.add(claim.receiver)
        if len(ended.heard) >= ended.receivers:
            self._forget(ended)
        return ended.why
