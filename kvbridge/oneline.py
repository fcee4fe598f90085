"""Makes others' text safe to show: peers, engines and clients choose names and reasons, and must not forge lines."""

from __future__ import annotations

import logging

MOST = 4096  # characters of a line, as they are shown
MOST_LINES = 256  # of a message that has several


def plain(text: str, most: int = MOST) -> str:
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


class OneLine(logging.Filter):
    """Makes messages plain, for a logger whose handlers are another program's."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = plain(record.getMessage()), None
        return True
