"""Transfers that nobody here knew when a sink asked about them: what it was told holds for later claims, too. Pure.

Links do not keep each other's order. A claim may be on its way by one that its sink has given up, while the sink asks
by another whether anything is written, hears that nothing is, and lends the slots to somebody else.
"""

from __future__ import annotations

MOST = 16384  # the last of all sinks together; the link that brings such a claim is lost within silence_s


class Renounced:
    """Which transfers of which sink nothing will ever be written of."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], None] = {}

    def add(self, boot: str, transfer: str) -> None:
        self._said.pop((boot, transfer), None)
        self._said[boot, transfer] = None
        if len(self._said) > MOST:
            del self._said[next(iter(self._said))]

    def knows(self, boot: str, transfer: str) -> bool:
        return (boot, transfer) in self._said
