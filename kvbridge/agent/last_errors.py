"""The last warnings and errors that the agent logged, for `kvbridge status`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kvbridge_proto.status import MAX_ERROR_TEXT, MAX_ERRORS, ErrorStatus

from ..oneline import plain
from .status import DAY_S


class LastErrors(logging.Handler):
    """Keeps the last MAX_ERRORS that `log_level` lets through, truncated. Callable from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._kept: deque[tuple[float, str, str, str]] = deque(maxlen=MAX_ERRORS)

    def emit(self, record: logging.LogRecord) -> None:
        text = plain(record.getMessage())[:MAX_ERROR_TEXT]
        self._kept.append((self._clock(), record.levelname.lower(), record.name, text))

    def statuses(self) -> tuple[ErrorStatus, ...]:
        """The kept ones, the latest last."""
        now = self._clock()
        return tuple(
            ErrorStatus(level=level, logger=logger, text=text, age_s=min(DAY_S, max(0.0, now - at)))
            for at, level, logger, text in list(self._kept)
        )
