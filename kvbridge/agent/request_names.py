"""Which transfers belong to which offer or want, and what its engine calls it, also for a while after its end."""

from __future__ import annotations

MOST_NAMES = 16384  # offers or wants (as many as may be open), and as many transfers; the oldest are forgotten first
MOST_TRANSFERS = 64  # of one, the last; a receiver may claim nothing at all again and again


class RequestNames:
    """For one role. An offer or want may have several transfers: one for each agent that sends or receives it."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._name_of: dict[int, str] = {}
        self._number_of: dict[str, int] = {}
        self._transfers_of: dict[int, tuple[str, ...]] = {}  # in the order of their claims

    def begin(self, number: int, request: str) -> None:
        """A new offer or want, of a request with this name."""
        self._name_of[number] = request
        if len(self._name_of) > self._most:
            del self._name_of[next(iter(self._name_of))]

    def join(self, number: int, transfer: str) -> None:
        """This transfer moves rows of this offer or want."""
        if self._number_of.get(transfer) == number:
            return
        self._number_of[transfer] = number
        known = self._transfers_of.get(number, ())
        if transfer not in known:
            self._transfers_of[number] = (*known, transfer)[-MOST_TRANSFERS:]
        if len(self._number_of) > self._most:
            del self._number_of[next(iter(self._number_of))]
        if len(self._transfers_of) > self._most:
            del self._transfers_of[next(iter(self._transfers_of))]

    def request_of(self, number: int, transfer: str = "") -> str:
        """The name of its request; "" if it is not known."""
        return self._name_of.get(number or self._number_of.get(transfer, 0), "")

    def transfers_of(self, number: int) -> tuple[str, ...]:
        return self._transfers_of.get(number, ())
