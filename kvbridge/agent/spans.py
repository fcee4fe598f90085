"""OpenTelemetry: a request that is over becomes spans, sent over OTLP/HTTP by a thread of its own.

Needs the packages of the extra `otel`. What cannot be sent is dropped and counted; nobody waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from ..errors import OperatorError
from .lives import BEGINS, ENDS, Life, Role

log = logging.getLogger("kvbridge.spans")

MOST_WAITING = 1024  # requests
MOST_AT_ONCE = 64  # requests, in one message: some hundred spans
SEND_S = 5.0
CLOSE_S = 1.0
WARN_S = 60.0
NAMES: dict[Role, str] = {"source": "kvbridge send", "sink": "kvbridge receive"}
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")


class Spans:
    """Sends to `endpoint`, http(s)://HOST:PORT/v1/traces. `count` hears from any thread how many spans were "sent" or
    "dropped". Raises OperatorError (`bad_option`) for another endpoint.
    """

    def __init__(self, endpoint: str, agent: str, count: Callable[[str, int], None]) -> None:
        place = urlsplit(endpoint)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise OperatorError("bad_option", f"otlp_endpoint: {endpoint}, must be http://HOST:PORT/v1/traces")
        self._count = count
        said = {"service.name": "kvbridge", "service.instance.id": agent, "service.version": version("kvbridge")}
        self._resource = Resource(said)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._waiting: queue.Queue[Life | None] = queue.Queue(MOST_WAITING)
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._run, name="kvbridge-spans", daemon=True)
        self._thread.start()

    def ended(self, life: Life) -> None:
        """A request is over. Never blocks."""
        try:
            self._waiting.put_nowait(life)
        except queue.Full:
            self._count("dropped", 1 + len(list(life.stages)))

    def close(self) -> None:
        """Send what waits, if that takes no longer than CLOSE_S."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        is_open = True
        while is_open:
            lives = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(lives) < MOST_AT_ONCE:
                    lives.append(self._waiting.get_nowait())
            is_open = None not in lives
            self._send([span for life in lives if life is not None for span in spans_of(life, self._resource)])

    def _send(self, spans: list[ReadableSpan]) -> None:
        if not spans:
            return
        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever it is, the next ones may go through
            is_sent = False
            self._warn(error)
        self._count("sent" if is_sent else "dropped", len(spans))

    def _warn(self, error: Exception) -> None:
        if time.monotonic() - self._warned >= WARN_S:
            self._warned = time.monotonic()
            log.warning("spans are dropped: %s", error)


def spans_of(life: Life, resource: Resource) -> Iterator[ReadableSpan]:
    """One of the request, with what the journal was told as events, and one of each stage. None if it is not sampled.

    Its parent is the engine's span, where it has said one; else both agents of a room make the same trace of it.
    """
    known = _TRACEPARENT.fullmatch(life.traceparent)
    if known and not int(known["flags"], 16) & TraceFlags.SAMPLED:
        return
    entries = sorted(life.first.values(), key=lambda entry: entry.at_s)
    request, room = (next((each for each in named if each), "") for named in _names(life))
    trace = int(known["trace"], 16) if known else _number(room)
    parent = _context(trace, int(known["span"], 16), is_remote=True) if known else None
    own = _context(trace, secrets.randbits(64) or 1)
    ends = [life.first[what] for what in ENDS[life.role] if what in life.first]
    failure = next((entry.text for entry in ends if entry.what == "failed"), "")
    yield ReadableSpan(
        name=NAMES[life.role],
        context=own,
        parent=parent,
        resource=resource,
        attributes={
            "kvbridge.request": request,
            "kvbridge.room": room,
            "kvbridge.transfers": len(life.transfers),
            "kvbridge.outcome": ends[0].text if ends else "",
        },
        events=[Event(each.what, {"text": each.text}, _ns(each.at_s)) for each in entries],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, failure) if failure else Status(),
        start_time=_ns(life.first[BEGINS[life.role]].at_s if BEGINS[life.role] in life.first else entries[0].at_s),
        end_time=_ns(entries[-1].at_s),
    )
    for stage, began_at, ended_at in life.stages:
        yield ReadableSpan(
            name=f"{NAMES[life.role]}: {stage}",
            context=_context(trace, secrets.randbits(64) or 1),
            parent=own,
            resource=resource,
            kind=SpanKind.INTERNAL,
            start_time=_ns(began_at),
            end_time=_ns(ended_at),
        )


def _names(life: Life) -> tuple[Iterator[str], Iterator[str]]:
    entries = life.first.values()
    return (each.request for each in entries), (each.room for each in entries)


def _number(room: str) -> int:
    """Of the trace. Both agents know the room."""
    return int.from_bytes(hashlib.sha256(room.encode(errors="replace")).digest()[:16], "big") or 1


def _context(trace: int, span: int, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace, span, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)
