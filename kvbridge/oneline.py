"""Makes others' text safe to show: peers, engines and clients choose names and reasons, and must not forge lines."""

from __future__ import annotations

import logging
from typing import Any

MOST_CHARACTERS = 4096  # characters of a line, as they are shown
MOST_LINES = 256  # of a message that has several
SHOWN = 40  # characters of a value that a reason shows
INTEGER_BITS = 64  # Python raises where it should write a number of more than 4300 digits


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text on one line, without terminal commands, and cut to `most` characters with a note if it is longer."""
    kept = text[:most]  # escaping only makes it longer
    shown = kept if kept.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in kept)
    return shown if max(len(text), len(shown)) <= most else f"{shown[:most]}... ({len(text)} characters)"


def plain_lines(text: str) -> str:
    """For text that may have several lines. All but the first are indented, so that none looks like one of ours.

    If there are too many, the first and the last are kept: an exception's last line says what it is.
    """
    lines = list(map(plain, text.splitlines()))
    if (left_out := len(lines) - MOST_LINES) > 0:
        half = MOST_LINES // 2
        lines[half:-half] = [f"... ({left_out} lines)"]
    return "\n  ".join(lines)


def shown(value: Any) -> str:
    """Any value, for a reason: safe, and short."""
    if type(value) is int and value.bit_length() > INTEGER_BITS:
        return f"a number of {value.bit_length()} bits"
    return f"{value!a:.{SHOWN}}" if isinstance(value, str | int) else type(value).__name__


class OneLine(logging.Filter):
    """Makes messages and tracebacks plain, for a logger whose handlers are another program's.

    Exceptions quote what others sent. So a traceback is written here, and no handler sees the exception itself.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = plain(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = "  " + plain_lines(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
        return True
