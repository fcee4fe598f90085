"""What our engine waits for, as the senders are told: requests that queue in it, and wants under way. Pure.

A sender holds what it offers for a short time only. Whoever waits says so, soon after it began and then every few
seconds: all rendezvous ids of a sender at once, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvbridge_proto.engine import Expect
from kvbridge_proto.peer import MAX_HOLD_RENDEZVOUS, Hold

HOLD_EVERY_S = 5.0
SOON_S = 0.05  # most requests have their blocks by then, and their claims say all


class ExpectedRequests:
    """Requests that have no blocks yet, by name; and when their senders hear of them."""

    def __init__(self) -> None:
        self._expected: dict[str, Expect] = {}
        self._of: dict[str, dict[str, Expect]] = {}  # by sender
        self._untold: dict[str, dict[str, float]] = {}  # by sender: the requests that it has not heard of, since when
        self._again_at = 0.0

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def senders(self) -> Collection[str]:
        return self._of.keys()

    def add(self, expect: Expect, now: float) -> None:
        self.end(expect.request)
        self._expected[expect.request] = expect
        self._of.setdefault(expect.sender, {})[expect.request] = expect
        self._untold.setdefault(expect.sender, {})[expect.request] = now

    def end(self, request: str) -> None:
        """It has blocks, or is over."""
        expect = self._expected.pop(request, None)
        if expect is None:
            return
        for by_sender in (self._of, self._untold):
            its: dict[str, Any] = by_sender.get(expect.sender, {})
            its.pop(request, None)
            if not its:
                by_sender.pop(expect.sender, None)

    def clear(self) -> None:
        self._expected.clear()
        self._of.clear()
        self._untold.clear()

    def due(
        self, now: float, wanted: Iterable[tuple[str, str]], can_hear: Callable[[str], bool]
    ) -> dict[str, list[str]]:
        """Rendezvous ids to name now, by sender. `wanted` are (sender, rendezvous) of the wants; `can_hear` says
        whether there is a session with every rank of a sender.

        Everything, every few seconds; between, what has begun to wait and whose sender can hear it.
        """
        rendezvous_ids: dict[str, list[str]] = {}
        if now >= self._again_at:
            self._again_at = now + HOLD_EVERY_S
            for sender, rendezvous in [*wanted, *((each.sender, each.rendezvous) for each in self._expected.values())]:
                rendezvous_ids.setdefault(sender, []).append(rendezvous)
            self._told(float("inf"), can_hear)
        else:
            for sender, requests in self._told(now - SOON_S, can_hear).items():
                rendezvous_ids[sender] = [self._expected[request].rendezvous for request in requests]
        return rendezvous_ids

    def _told(self, until: float, can_hear: Callable[[str], bool]) -> dict[str, list[str]]:
        """Those that have waited since `until`, of which nobody was told, and whose sender can hear of them now."""
        told: dict[str, list[str]] = {}
        for sender in [each for each in self._untold if can_hear(each)]:
            its = self._untold[sender]
            if requests := [request for request, since in its.items() if since <= until]:
                told[sender] = requests
            for request in requests:
                del its[request]
            if not its:
                del self._untold[sender]
        return told


def holds(rendezvous_ids: list[str]) -> list[Hold]:
    """As many messages as it takes."""
    return [
        Hold(rendezvous_ids=tuple(rendezvous_ids[at : at + MAX_HOLD_RENDEZVOUS]))
        for at in range(0, len(rendezvous_ids), MAX_HOLD_RENDEZVOUS)
    ]
