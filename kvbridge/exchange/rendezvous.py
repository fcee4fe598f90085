"""Where an engine's offers wait for the claims on them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvbridge_proto.peer import Claim

from .outgoing import OpenOffer
from .recent import Recent

AWAITED_S = 15.0  # who waits says so three times meanwhile
MOST_AWAITED = 16384
MOST_CUT_SHORT = 4096  # should an engine never say its last word
MOST_ENDED = 16384  # as many as may be open
ENDED_S = 300.0  # a want comes when its engine has blocks for it, and waits for a minute (vLLM's `deadline_s`)


@dataclass(slots=True, eq=False)
class EndedOffer:
    """An offer that ended before all claims on it came. They come in vain: each hears why, once.

    `want` is None if none had come; then it is the first one's that does. `heard` are the sinks that had an answer.
    """

    room: str
    why: tuple[str, str]  # (code, reason)
    until: float
    want: str | None = None
    sinks: int = 0
    heard: set[int] = field(default_factory=set)


class Rendezvous:
    """Offers by room, oldest first; those that ended, for as long as a claim on them may yet come.

    What is awaited in a room may have been said before anything was offered there. `cut_short` are the names of those
    that ended before their engine had said all of them. What it says of such a one later, its agent has no part in: the
    blocks may be anybody's by then.
    """

    def __init__(self) -> None:
        self._offers: dict[str, list[OpenOffer]] = {}
        self._awaited: dict[str, dict[str, tuple[int, float]]] = {}  # by room, boot of a sink: how many wait, said when
        self._ended: dict[str, list[EndedOffer]] = {}
        self._by_age: OrderedDict[EndedOffer, None] = OrderedDict()
        self.cut_short: Recent[str] = Recent(MOST_CUT_SHORT)

    def enter(self, offered: OpenOffer) -> None:
        """Whoever comes from now on comes for this one, and not for one that ended before."""
        self._offers.setdefault(offered.room, []).append(offered)
        for ended in [each for each in self._ended.get(offered.room, ()) if each.want is None]:
            self._forget(ended)

    def leave(self, offered: OpenOffer) -> None:
        """It is released."""
        room = self._offers[offered.room]
        room.remove(offered)
        if not room:
            del self._offers[offered.room]
        if not offered.is_told_out:
            self.cut_short.add(offered.request)

    def open_in(self, room: str) -> list[OpenOffer]:
        """Those that may be read, oldest first."""
        return [each for each in self._offers.get(room, ()) if each.over is None]

    def await_in(self, room: str, boot: str, count: int, now: float) -> list[OpenOffer]:
        """So many requests of a sink wait for offers of this room. Which offers are awaited, by whomever."""
        sinks = self._awaited.pop(room, {})
        recent = {sink: said for sink, said in sinks.items() if now - said[1] <= AWAITED_S}
        before, _ = recent.pop(boot, (0, now))
        self._awaited[room] = recent | {boot: (max(before, count), now)}
        if len(self._awaited) > MOST_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        return self.open_in(room)[: self.awaited_in(room, now)]

    def awaited_in(self, room: str, now: float) -> int:
        """How many requests wait there: for the oldest offers."""
        sinks = self._awaited.get(room, {})
        return sum(count for count, at in sinks.values() if now - at <= AWAITED_S)

    def awaiting(self, room: str) -> str:
        """The boot of the sink that said last that it waits there."""
        return next(reversed(self._awaited.get(room, {})), "")

    def remember(self, ended: EndedOffer, now: float) -> None:
        """The newest; what is too old goes, and the oldest when there are too many."""
        self._ended.setdefault(ended.room, []).append(ended)
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
        room = self._ended[ended.room]
        room.remove(ended)
        if not room:
            del self._ended[ended.room]

    def place_of(self, claim: Claim) -> OpenOffer | EndedOffer | None:
        """All claims of one want get one offer, also when it has ended meanwhile; what is open goes before what is not.

        So a claim on the next equal prompt hears of one that ended unserved only where no other is open.
        """
        offers = self.open_in(claim.room)
        ended = [each for each in self._ended.get(claim.room, ()) if claim.sink not in each.heard]
        found: list[OpenOffer | EndedOffer] = [each for each in offers if each.want == claim.want]
        found += [each for each in ended if each.want == claim.want]
        found += [each for each in offers if each.want is None]
        found += [each for each in ended if each.want is None]
        return next(iter(found), None)

    def hear(self, ended: EndedOffer, claim: Claim) -> tuple[str, str]:
        """This claim came in vain: why. Nothing is kept once all of its want have heard."""
        ended.want, ended.sinks = claim.want, ended.sinks or claim.sinks
        ended.heard.add(claim.sink)
        if len(ended.heard) >= ended.sinks:
            self._forget(ended)
        return ended.why
