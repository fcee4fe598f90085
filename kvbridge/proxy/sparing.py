"""A log in which many similar lines are one: an outage is said once a second, with how many more there were."""

from __future__ import annotations

import logging
import time

from ..oneline import OneLine

EVERY_S = 1.0
MOST_KINDS = 1000


class SparingLog:
    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)
        self._log.addFilter(OneLine())
        self._last: dict[str, tuple[float, int]] = {}  # by kind, when it was said, and how many were left out since

    def say(self, kind: str, text: str) -> None:
        """Say `text`, unless another line of its kind was said just now."""
        now = time.monotonic()
        at, left_out = self._last.get(kind, (-EVERY_S, 0))
        if now - at < EVERY_S:
            self._last[kind] = (at, left_out + 1)
            return
        if len(self._last) > MOST_KINDS:
            self._last.clear()
        self._last[kind] = (now, 0)
        self._log.warning("%s%s", text, f" (and {left_out} more like it)" if left_out else "")
