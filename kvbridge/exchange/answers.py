"""What becomes of a claim for which no offer is there: it waits for one, or is refused with the reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Known(Enum):
    """What a sender knows about the offers under a rendezvous id, when none of them is free for a claim."""

    UNREAD = auto()  # perhaps not all: its engine may have said more than was read since the claim came
    NOTHING = auto()  # none was made there, as far as it remembers
    TAKEN = auto()  # those that are not released serve other wants
    FETCHED = auto()  # the last one served another want, or this one before
    DECLINED = auto()  # the last one was declined
    ENDED = auto()  # the last one ended before anybody had it


@dataclass(frozen=True, slots=True)
class NotOffered:
    code: str
    reason: str


WAITS: NotOffered | None = None
# By what the receiver was told (`Claim.is_offered`) and what the sender knows. Without word that the prefill has ended
# an offer may still come: equal prompts share a rendezvous id, and a claim may be first. With it, every offer was made
# before the claim came, so none can come after what the engine had said by then.
ANSWERS: dict[tuple[bool, Known], NotOffered | None] = {(False, known): WAITS for known in Known} | {
    (True, Known.UNREAD): WAITS,
    (True, Known.NOTHING): NotOffered(
        code="unknown_offer", reason="nothing was offered under this id since our engine attached, as far as we know"
    ),
    (True, Known.TAKEN): NotOffered(
        code="already_fetched", reason="another request fetches what was offered under this id"
    ),
    (True, Known.FETCHED): NotOffered(
        code="already_fetched", reason="what was offered under this id went to another request: an offer serves one"
    ),
    (True, Known.DECLINED): NotOffered(
        code="already_declined", reason="what was offered under this id was declined: its receiver needed none of it"
    ),
    (True, Known.ENDED): NotOffered(code="offer_over", reason="what was offered under this id is over"),
}
