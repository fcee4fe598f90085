"""What becomes of a claim for which no offer is there: it waits for one, or is refused with the reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Known(Enum):
    """What a sender knows about the offers under a rendezvous id, when none of them is free for a claim."""

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
# By whether the prefill is known to have ended, and what the sender knows once it has read all that its engine had said
# when the claim came. The receiver may have been told of that end (`Claim.is_offered`), or the sender (`NoOffer`).
# Without it an offer may still come: equal prompts share a rendezvous id, and a claim may be first.
ANSWERS: dict[tuple[bool, Known], NotOffered | None] = {(False, known): WAITS for known in Known} | {
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
