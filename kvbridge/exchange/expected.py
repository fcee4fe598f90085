"""Tells senders what our engine waits for: requests that queue in it, and open wants. Pure.

A sender holds an offer only for a short time. A receiver says that it waits soon after it begins to, and then every few
seconds, naming all its rendezvous ids of a sender at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvbridge_proto.engine import Expect
from kvbridge_proto.peer import MAX_HOLD_RENDEZVOUS, Hold

HOLD_EVERY_S = 5.0
SOON_S = 0.05  # most requests have blocks by then; their claim makes a Hold unnecessary


class ExpectedRequests:
    """Requests that have no blocks yet, by name, and when to tell their senders."""

    def __init__(self) -> None:
        self._expected: dict[str, Expect] = {}
        self._of: dict[str, dict[str, Expect]] = {}  # by sender
        self._unannounced: dict[str, dict[str, float]] = {}  # by sender: requests not yet named to it, since when
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
        self._unannounced.setdefault(expect.sender, {})[expect.request] = now

    def end(self, request: str) -> None:
        """The request has blocks, or is over."""
        expect = self._expected.pop(request, None)
        if expect is None:
            return
        for by_sender in (self._of, self._unannounced):
            its: dict[str, Any] = by_sender.get(expect.sender, {})
            its.pop(request, None)
            if not its:
                by_sender.pop(expect.sender, None)

    def clear(self) -> None:
        self._expected.clear()
        self._of.clear()
        self._unannounced.clear()

    def due(
        self, now: float, wanted: Iterable[tuple[str, str]], can_hear: Callable[[str], bool]
    ) -> dict[str, list[str]]:
        """Rendezvous ids to name now, by sender.

        Every HOLD_EVERY_S these are all ids, of the expected requests and of `wanted`: the wants, as (sender, id). In
        between they are the new ones, of senders that can hear: with every rank of these there is a session.
        """
        rendezvous_ids: dict[str, list[str]] = {}
        if now >= self._again_at:
            self._again_at = now + HOLD_EVERY_S
            for sender, rendezvous in [*wanted, *((each.sender, each.rendezvous) for each in self._expected.values())]:
                rendezvous_ids.setdefault(sender, []).append(rendezvous)
            self._take_new(float("inf"), can_hear)
        else:
            for sender, requests in self._take_new(now - SOON_S, can_hear).items():
                rendezvous_ids[sender] = [self._expected[request].rendezvous for request in requests]
        return rendezvous_ids

    def _take_new(self, until: float, can_hear: Callable[[str], bool]) -> dict[str, list[str]]:
        """By sender: requests that began to wait before `until` and whose sender can hear of them now. Each once."""
        found: dict[str, list[str]] = {}
        for sender in [each for each in self._unannounced if can_hear(each)]:
            its = self._unannounced[sender]
            if requests := [request for request, since in its.items() if since <= until]:
                found[sender] = requests
            for request in requests:
                del its[request]
            if not its:
                del self._unannounced[sender]
        return found


def holds(rendezvous_ids: list[str]) -> list[Hold]:
    """The ids as Hold messages, each within its limit."""
    return [
        Hold(rendezvous_ids=tuple(rendezvous_ids[at : at + MAX_HOLD_RENDEZVOUS]))
        for at in range(0, len(rendezvous_ids), MAX_HOLD_RENDEZVOUS)
    ]
