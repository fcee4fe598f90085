"""Text of others, as it may be shown: peers, engines and clients choose names and reasons, and must not forge lines."""

from __future__ import annotations

import logging

MOST = 4096  # characters of a line, as they are shown
MOST_LINES = 256  # of a message that has several


def plain(text: str, most: int = MOST) -> str:
    """On one line, without a terminal's commands, and not longer than this, but for the word that says so."""
    kept = text[:most]  # what is shown is no shorter than it
    shown = kept if kept.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in kept)
    return shown if max(len(text), len(shown)) <= most else f"{shown[:most]}... ({len(text)} characters)"


def plain_lines(text: str) -> str:
    """Several lines may be meant: all but the first are indented, so that none looks like one of ours.

    Of too many the first and the last are kept: an exception's last line says what it is.
    """
    lines = list(map(plain, text.splitlines()))
    if (left_out := len(lines) - MOST_LINES) > 0:
        half = MOST_LINES // 2
        lines[half:-half] = [f"... ({left_out} lines)"]
    return "\n  ".join(lines)


class OneLine(logging.Filter):
    """For a logger whose handlers are another program's: what is logged by it is plain."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = plain(record.getMessage()), None
        return True
