"""Splits an engine's stream into server-sent events and recognizes what they report. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import EngineError

EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
GAP = re.compile(rb"\r?\n\r?\n")  # between two events
LONGEST_GAP = 4
# In an answer's text these quotes would have a backslash before them, so the text cannot match.
FINISH = re.compile(rb'(?<!\\)"finish_reason"\s*:\s*(?!null)["{]')
FAILED = re.compile(rb'^\{\s*"(error|object"\s*:\s*"error)"')


class Events:
    """Bytes in, whole events out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, chunk: bytes) -> Iterator[bytes]:
        """The data of each event that is now complete. Raises EngineError if an event is too long."""
        looked = max(0, len(self._rest) - LONGEST_GAP + 1)
        self._rest += chunk
        whole, begin = [], 0
        for gap in GAP.finditer(self._rest, looked):
            whole.append(bytes(self._rest[begin : gap.start()]))
            begin = gap.end()
        del self._rest[:begin]
        for event in whole:
            if found := data(event):
                yield found
        if len(self._rest) > EVENT_BYTES:
            raise EngineError("bad_answer", f"an event of more than {EVENT_BYTES} bytes")


def data(event: bytes) -> bytes:
    """What follows `data:` in an event. Empty for a comment."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def framed(said: bytes) -> bytes:
    return b"data: " + said + b"\n\n"
