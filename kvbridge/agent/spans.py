"""Sends requests that have ended to OpenTelemetry, as spans, over OTLP/HTTP on a thread of its own.

Needs the packages of the extra `otel`. Spans that cannot be sent are dropped and counted; nobody waits for them.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from ..errors import OperatorError
from .record import BEGINS, ENDS, RequestRecord, Role

log = logging.getLogger("kvbridge.spans")

MOST_WAITING = 1024  # requests
MOST_AT_ONCE = 64  # requests, in one message: some hundred spans
COLLECTOR_S = 5.0
LAST_SPANS_S = 1.0
WARN_DROPPED_SPANS_S = 60.0
NAMES: dict[Role, str] = {"sender": "kvbridge send", "receiver": "kvbridge receive"}
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")


class Spans:
    """Sends to `endpoint`, http(s)://HOST:PORT/v1/traces. Raises OperatorError (`bad_option`) if it is malformed.

    `count` is called on any thread, with "sent" or "dropped" and how many spans.
    """

    kinds: Collection[type] = (RequestRecord,)

    def __init__(self, endpoint: str, agent: str, count: Callable[[str, int], None]) -> None:
        place = urlsplit(endpoint)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise OperatorError("bad_option", f"otlp_endpoint: {endpoint}, must be http://HOST:PORT/v1/traces")
        self._count = count
        attributes = {"service.name": "kvbridge", "service.instance.id": agent, "service.version": version("kvbridge")}
        self._resource = Resource(attributes)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=COLLECTOR_S)
        self._waiting: queue.Queue[RequestRecord | None] = queue.Queue(MOST_WAITING)
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._run, name="kvbridge-spans", daemon=True)
        self._thread.start()

    def see(self, record: RequestRecord, role: Role, at: float) -> None:
        """Send the spans of a request that has ended. Never blocks."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._count("dropped", 1 + len(record.stages()))

    def close(self) -> None:
        """Send what waits, if that takes no longer than LAST_SPANS_S."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(LAST_SPANS_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        is_open = True
        while is_open:
            records = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(records) < MOST_AT_ONCE:
                    records.append(self._waiting.get_nowait())
            is_open = None not in records
            self._send([span for record in records if record is not None for span in spans_of(record, self._resource)])

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
        if time.monotonic() - self._warned >= WARN_DROPPED_SPANS_S:
            self._warned = time.monotonic()
            log.warning("spans are dropped: %s", error)


def spans_of(record: RequestRecord, resource: Resource) -> Iterator[ReadableSpan]:
    """One span for the request, with its journal entries as events, and one per stage. Nothing if it is not sampled.

    The parent is the engine's span, if it named one. Otherwise both agents of a rendezvous derive the same trace.
    """
    known = _TRACEPARENT.fullmatch(record.traceparent)
    if known and not int(known["flags"], 16) & TraceFlags.SAMPLED:
        return
    entries = sorted(record.first.values(), key=lambda entry: entry.at_s)
    request, rendezvous = (next((each for each in named if each), "") for named in _names(record))
    trace = int(known["trace"], 16) if known else _number(rendezvous)
    parent = _context(trace, int(known["span"], 16), is_remote=True) if known else None
    own = _context(trace, secrets.randbits(64) or 1)
    ends = [record.first[what] for what in ENDS[record.role] if what in record.first]
    failure = next((entry.text for entry in ends if entry.what == "failed"), "")
    yield ReadableSpan(
        name=NAMES[record.role],
        context=own,
        parent=parent,
        resource=resource,
        attributes={
            "kvbridge.request": request,
            "kvbridge.rendezvous": rendezvous,
            "kvbridge.transfers": len(record.transfers),
            "kvbridge.outcome": ends[0].text if ends else "",
        },
        events=[Event(each.what, {"text": each.text}, _ns(each.at_s)) for each in entries],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, failure) if failure else Status(),
        start_time=_ns(
            record.first[BEGINS[record.role]].at_s if BEGINS[record.role] in record.first else entries[0].at_s
        ),
        end_time=_ns(entries[-1].at_s),
    )
    for stage, began_at, ended_at in record.stages():
        yield ReadableSpan(
            name=f"{NAMES[record.role]}: {stage}",
            context=_context(trace, secrets.randbits(64) or 1),
            parent=own,
            resource=resource,
            kind=SpanKind.INTERNAL,
            start_time=_ns(began_at),
            end_time=_ns(ended_at),
        )


def _names(record: RequestRecord) -> tuple[Iterator[str], Iterator[str]]:
    entries = record.first.values()
    return (each.request for each in entries), (each.rendezvous for each in entries)


def _number(rendezvous: str) -> int:
    """The trace's id, from the rendezvous id, which both agents know."""
    return int.from_bytes(hashlib.sha256(rendezvous.encode(errors="replace")).digest()[:16], "big") or 1


def _context(trace: int, span: int, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace, span, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)
