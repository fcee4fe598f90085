"""Knows when the proxy itself was late, so that an engine is not blamed for it."""

from __future__ import annotations

import asyncio

from .metrics import ProxyMetrics

BEAT_S = 0.1
LATE_BEAT_S = 0.5  # a beat so late means that timeouts ended before answers were looked at


class Pulse:
    def __init__(self, metrics: ProxyMetrics) -> None:
        self._loop, self._metrics = asyncio.get_running_loop(), metrics
        self._last = self._loop.time()
        self._late = 0.0  # when it was last late
        self._next = self._loop.call_later(BEAT_S, self._beat)

    def close(self) -> None:
        self._next.cancel()

    def was_late_since(self, began: float) -> bool:
        """Whether the event loop stood still at some moment since `began`, a time of the loop."""
        self._look()
        return self._late >= began

    def _beat(self) -> None:
        self._look()
        self._next = self._loop.call_later(BEAT_S, self._beat)

    def _look(self) -> None:
        now = self._loop.time()
        if (late_s := now - self._last - BEAT_S) > LATE_BEAT_S:
            self._late = now
            self._metrics.stalled_s.inc(late_s)
        self._last = now
