"""Which transfers belong to which request, as far as the agent has heard, and for a while after their end."""

from __future__ import annotations

MOST = 4096  # requests, and as many transfers; the oldest are forgotten first
MOST_TRANSFERS = 64  # of one request, the last; a receiver may claim nothing at all again and again


class RequestNames:
    """For one role. A request may have several transfers: one for each agent that sends or receives it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._request_of: dict[str, str] = {}
        self._transfers_of: dict[str, tuple[str, ...]] = {}  # in the order of their claims

    def begin(self, request: str) -> None:
        """A new request, perhaps under a name that was used before."""
        self._transfers_of.pop(request, None)

    def join(self, request: str, transfer: str) -> None:
        """This transfer moves rows of this request."""
        if self._request_of.get(transfer) == request:
            return
        self._request_of[transfer] = request
        known = self._transfers_of.get(request, ())
        if transfer not in known:
            self._transfers_of[request] = (*known, transfer)[-MOST_TRANSFERS:]
        if len(self._request_of) > self._most:
            del self._request_of[next(iter(self._request_of))]
        if len(self._transfers_of) > self._most:
            del self._transfers_of[next(iter(self._transfers_of))]

    def request_of(self, transfer: str) -> str:
        """ "" if it is not known."""
        return self._request_of.get(transfer, "")

    def transfers_of(self, request: str) -> tuple[str, ...]:
        return self._transfers_of.get(request, ())
