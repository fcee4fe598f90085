"""What our engine waits for, as the sources are told: requests that queue in it, and wants under way. Pure.

A source holds what it offers for a short time only. Whoever waits says so, soon after it began and then every few
seconds: all rooms of a source at once, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from kvbridge_proto.engine import Expect
from kvbridge_proto.peer import MAX_HOLD_ROOMS, Hold

HOLD_EVERY_S = 5.0
SOON_S = 0.05  # most requests have their blocks by then, and their claims say all


class Awaited:
    """Requests that have no blocks yet, by name; and when their sources hear of them."""

    def __init__(self) -> None:
        self._expected: dict[str, Expect] = {}
        self._untold: dict[str, tuple[float, Expect]] = {}  # since when
        self._again_at = 0.0

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def sources(self) -> set[str]:
        return {each.source for each in self._expected.values()}

    def add(self, expect: Expect, now: float) -> None:
        self._expected[expect.request] = expect
        self._untold[expect.request] = now, expect

    def end(self, request: str) -> None:
        """It has blocks, or is over."""
        self._expected.pop(request, None)
        self._untold.pop(request, None)

    def clear(self) -> None:
        self._expected.clear()
        self._untold.clear()

    def due(self, now: float, wanted: Iterable[tuple[str, str]], can_hear: Container[str]) -> dict[str, list[str]]:
        """Rooms to name now, by source. `wanted` are (source, room) of the wants, `can_hear` sources with a session.

        Everything, every few seconds; between, what has begun to wait and whose source can hear it.
        """
        named: list[tuple[str, str]] = []
        if now >= self._again_at:
            self._again_at = now + HOLD_EVERY_S
            named = [*wanted, *((each.source, each.room) for each in self._expected.values())]
            self._tell(float("inf"), can_hear)
        elif self._untold:
            named = [(each.source, each.room) for each in self._tell(now - SOON_S, can_hear)]
        rooms: dict[str, list[str]] = {}
        for source, room in named:
            rooms.setdefault(source, []).append(room)
        return rooms

    def _tell(self, until: float, can_hear: Container[str]) -> list[Expect]:
        """Those that have waited since `until`, of which nobody was told, and whose source can hear of them now."""
        told = []
        for since, expect in list(self._untold.values()):
            if since > until:
                break  # the others came later
            if expect.source in can_hear:
                del self._untold[expect.request]
                told.append(expect)
        return told


def holds(rooms: list[str]) -> list[Hold]:
    """As many messages as it takes."""
    return [Hold(rooms=tuple(rooms[at : at + MAX_HOLD_ROOMS])) for at in range(0, len(rooms), MAX_HOLD_ROOMS)]
