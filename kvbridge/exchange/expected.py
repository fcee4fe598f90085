"""What our engine waits for, as the sources are told: requests that queue in it, and wants under way. Pure.

A source holds what it offers for a short time only. Whoever waits says so, soon after it began and then every few
seconds: all rooms of a source at once, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvbridge_proto.engine import Expect
from kvbridge_proto.peer import MAX_HOLD_ROOMS, Hold

HOLD_EVERY_S = 5.0
SOON_S = 0.05  # most requests have their blocks by then, and their claims say all


class ExpectedRequests:
    """Requests that have no blocks yet, by name; and when their sources hear of them."""

    def __init__(self) -> None:
        self._expected: dict[str, Expect] = {}
        self._of: dict[str, dict[str, Expect]] = {}  # by source
        self._untold: dict[str, dict[str, float]] = {}  # by source: the requests that it has not heard of, since when
        self._again_at = 0.0

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def sources(self) -> Collection[str]:
        return self._of.keys()

    def add(self, expect: Expect, now: float) -> None:
        self.end(expect.request)
        self._expected[expect.request] = expect
        self._of.setdefault(expect.source, {})[expect.request] = expect
        self._untold.setdefault(expect.source, {})[expect.request] = now

    def end(self, request: str) -> None:
        """It has blocks, or is over."""
        expect = self._expected.pop(request, None)
        if expect is None:
            return
        for by_source in (self._of, self._untold):
            its: dict[str, Any] = by_source.get(expect.source, {})
            its.pop(request, None)
            if not its:
                by_source.pop(expect.source, None)

    def clear(self) -> None:
        self._expected.clear()
        self._of.clear()
        self._untold.clear()

    def due(
        self, now: float, wanted: Iterable[tuple[str, str]], can_hear: Callable[[str], bool]
    ) -> dict[str, list[str]]:
        """Rooms to name now, by source. `wanted` are (source, room) of the wants; `can_hear` says whether there is a
        session with every rank of a source.

        Everything, every few seconds; between, what has begun to wait and whose source can hear it.
        """
        rooms: dict[str, list[str]] = {}
        if now >= self._again_at:
            self._again_at = now + HOLD_EVERY_S
            for source, room in [*wanted, *((each.source, each.room) for each in self._expected.values())]:
                rooms.setdefault(source, []).append(room)
            self._told(float("inf"), can_hear)
        else:
            for source, requests in self._told(now - SOON_S, can_hear).items():
                rooms[source] = [self._expected[request].room for request in requests]
        return rooms

    def _told(self, until: float, can_hear: Callable[[str], bool]) -> dict[str, list[str]]:
        """Those that have waited since `until`, of which nobody was told, and whose source can hear of them now."""
        told: dict[str, list[str]] = {}
        for source in [each for each in self._untold if can_hear(each)]:
            its = self._untold[source]
            if requests := [request for request, since in its.items() if since <= until]:
                told[source] = requests
            for request in requests:
                del its[request]
            if not its:
                del self._untold[source]
        return told


def holds(rooms: list[str]) -> list[Hold]:
    """As many messages as it takes."""
    return [Hold(rooms=tuple(rooms[at : at + MAX_HOLD_ROOMS])) for at in range(0, len(rooms), MAX_HOLD_ROOMS)]
