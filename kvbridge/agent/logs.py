"""How an agent's log lines look: one line an event, for people or as JSON, and no flood of the same."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ..oneline import plain, plain_lines

BURST, WINDOW_S = 50, 10.0  # lines alike, in so long
MOST_KINDS = 1024
FIELD = re.compile(r"%%|(?:(\w+)=)?%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")


def set_up(level: str, form: Literal["text", "json"], *others: logging.Handler) -> None:
    """Log to stderr and these from here on."""
    handler = logging.StreamHandler(sys.stderr)
    line = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler, *others])


class PlainFormatter(logging.Formatter):
    """What is said is one line, whoever chose its words; of an exception every line is indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "  " + plain_lines(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time (UTC), level, logger, message, and each value that the message names: `request=%s`."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": plain(record.getMessage()),
        }
        said |= {name: value for name, value in fields(record).items() if name not in said}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)  # in ASCII: nothing in it breaks a line or moves a cursor


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The values that a message names: of `request=%s` the one that is put there."""
    if not isinstance(record.args, tuple):
        return {}
    names = [found[1] for found in FIELD.finditer(str(record.msg)) if found[0] != "%%"]
    named = zip(names, record.args, strict=False)
    return {name: value if isinstance(value, int | float) else plain(str(value)) for name, value in named if name}


@dataclass(slots=True)
class _Kind:
    began_at: float
    passed: int = 0
    left_out: int = 0


class RateLimit(logging.Filter):
    """Of lines that differ in their values alone only so many pass in a while. The next says how many did not.

    What is left out is counted all the same, in the agent's metrics.
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
        if record.levelno < logging.INFO:  # who asks for those wants all
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
