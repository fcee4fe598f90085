"""Text of others, as it may be shown: peers, engines and clients choose names and reasons, and must not forge lines."""

from __future__ import annotations

import logging

MOST = 4096  # characters of a message


def plain(text: str, most: int = MOST) -> str:
    """On one line, without a terminal's commands, and not longer than this."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text)} characters)"
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def plain_lines(text: str) -> str:
    """Several lines may be meant: all but the first are indented, so that none looks like one of ours."""
    return "\n  ".join(map(plain, text.splitlines()))


class OneLine(logging.Filter):
    """For a logger whose handlers are another program's: what is logged by it is plain."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = plain(record.getMessage()), None
        return True
