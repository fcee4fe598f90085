"""An agent's log: one line per event, for people or as JSON; no floods of similar lines; the last errors kept."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from kvbridge_proto.common import DAY_S
from kvbridge_proto.status import MAX_ERROR_TEXT, MAX_ERRORS, ErrorStatus

from ..oneline import plain, plain_lines

BURST, WINDOW_S = 50, 10.0  # similar lines, and the time in which they may come
MOST_KINDS = 1024
ARGUMENT = re.compile(r"%%|(?:(\w+)=)?%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")


def set_up(level: str, form: Literal["text", "json"], *others: logging.Handler) -> None:
    """Log to stderr and to `others` from now on."""
    handler = logging.StreamHandler(sys.stderr)
    line = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler, *others])


class PlainFormatter(logging.Formatter):
    """Keeps a message on one line, even if a peer chose its words. Indents the lines of an exception."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "  " + plain_lines(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and each value the message names (`request=%s`)."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": plain(record.getMessage()),
        }
        line |= {name: value for name, value in fields(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)  # ASCII: nothing in it breaks a line or moves a cursor


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The values that a message names: for `request=%s` its argument, under "request"."""
    if not isinstance(record.args, tuple):
        return {}
    names = [found[1] for found in ARGUMENT.finditer(str(record.msg)) if found[0] != "%%"]
    named = zip(names, record.args, strict=False)
    return {name: value if isinstance(value, int | float) else plain(str(value)) for name, value in named if name}


@dataclass(slots=True)
class _Kind:
    began_at: float
    passed: int = 0
    left_out: int = 0


class RateLimit(logging.Filter):
    """Lets `burst` lines that differ only in their values pass per `window_s`. The next says how many were left out.

    The agent's metrics count what was left out all the same.
    """

    def __init__(
        self, burst: int = BURST, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:  # whoever turns on debug wants all of it
            return True
        now, key = self._clock(), (record.name, record.levelno, str(record.msg))
        kind = self._kinds.get(key)
        left_out = 0
        if kind is None or now - kind.began_at >= self._window_s:
            left_out = kind.left_out if kind is not None else 0
            self._kinds.pop(key, None)
            while len(self._kinds) >= MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[key] = _Kind(now)
        if kind.passed >= self._burst:
            kind.left_out += 1
            return False
        kind.passed += 1
        if left_out:
            record.msg = f"{record.msg} ({left_out} more like this were left out)"
        return True


class LastErrors(logging.Handler):
    """Keeps the last MAX_ERRORS warnings and errors that `log_level` lets through, truncated, for `kvbridge status`.

    Callable from any thread.
    """

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
