"""Where an engine's offers wait for the claims on them. Pure."""

from __future__ import annotations

from kvbridge_proto.peer import Claim

from .outlet import Offered
from .recent import Recent

MOST_CUT_SHORT = 4096  # should an engine never say its last word


class Rooms:
    """Offers by room, oldest first.

    `cut_short` are the names of those that ended before their engine had said all of them. What it says of such a one
    later, its agent has no part in: the blocks may be anybody's by then.
    """

    def __init__(self) -> None:
        self._offers: dict[str, list[Offered]] = {}
        self.cut_short: Recent[str] = Recent(MOST_CUT_SHORT)

    def enter(self, offered: Offered) -> None:
        self._offers.setdefault(offered.room, []).append(offered)

    def leave(self, offered: Offered) -> None:
        """It is released."""
        room = self._offers[offered.room]
        room.remove(offered)
        if not room:
            del self._offers[offered.room]
        if not offered.is_told_out:
            self.cut_short.add(offered.request)

    def open_in(self, room: str) -> list[Offered]:
        """Those that may be read, oldest first."""
        return [each for each in self._offers.get(room, ()) if each.over is None]

    def offer_for(self, claim: Claim) -> Offered | None:
        """All claims of one want get one offer."""
        open_offers = self.open_in(claim.room)
        same = [each for each in open_offers if each.want == claim.want]
        return next(iter(same or [each for each in open_offers if each.want is None]), None)
