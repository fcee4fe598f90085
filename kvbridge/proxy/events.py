"""Splits an engine's stream into server-sent events and recognizes what they report. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import EngineError
from .bodies import GENERATE, OF_VLLM, parse
from .generate import is_finished

EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
GAP = re.compile(rb"\r?\n\r?\n")  # between two events
LONGEST_GAP = 4
# In an answer's text these quotes would have a backslash before them, so the text cannot match.
FINISH = re.compile(rb'(?<!\\)"finish_reason"\s*:\s*(?!null)["{]')
ERROR_EVENT = re.compile(rb'^\{\s*"(error|object"\s*:\s*"error|type"\s*:\s*"error)"')
END_TYPES = ("response.completed", "response.incomplete", "response.failed", "message_stop")


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """`data` is what follows `data:`. `name` is what follows `event:`, where an API has it."""

    data: bytes
    name: bytes = b""

    def framed(self) -> bytes:
        return (b"event: " + self.name + b"\n" if self.name else b"") + b"data: " + self.data + b"\n\n"


class _Typed(msgspec.Struct):
    type: Any = None


def is_end(path: str, event: bytes) -> bool:
    """Whether an event says that its answer is complete."""
    if path == GENERATE:
        return is_finished(event)
    if path not in OF_VLLM:
        return bool(FINISH.search(event))
    try:
        return parse(event, _Typed).type in END_TYPES
    except ValueError:
        return False


class Events:
    """Bytes in, whole events out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def rest_bytes(self) -> int:
        """Of an event that is not complete yet."""
        return len(self._rest)

    def take(self, chunk: bytes) -> Iterator[StreamEvent]:
        """Each event that is now complete and has data. Raises EngineError if one is too long."""
        looked = max(0, len(self._rest) - LONGEST_GAP + 1)
        self._rest += chunk
        whole, begin = [], 0
        for gap in GAP.finditer(self._rest, looked):
            whole.append(bytes(self._rest[begin : gap.start()]))
            begin = gap.end()
        del self._rest[:begin]
        for event in whole:
            if data := _lines(event, b"data:"):
                yield StreamEvent(data, _lines(event, b"event:"))
        if len(self._rest) > EVENT_BYTES:
            raise EngineError("bad_answer", f"an event of more than {EVENT_BYTES} bytes")


def _lines(event: bytes, name: bytes) -> bytes:
    return b"\n".join(line[len(name) :].strip() for line in event.split(b"\n") if line.startswith(name))
