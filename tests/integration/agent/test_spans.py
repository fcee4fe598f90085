"""Spans of requests, received by a real OTLP/HTTP receiver. If there is none, nobody waits."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from http.server import ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Failed
from kvbridge_proto.status import TraceEntry
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from kvbridge.agent.record import RequestRecord
from kvbridge.agent.spans import COLLECTOR_S, MOST_WAITING, Spans, spans_of
from kvbridge.errors import OperatorError
from testing.agents import ANSWER_S
from testing.oracle import Shape
from testing.pairs import Bench, Benches
from testing.serving import Answers
from testing.waiting import wait_for

TOKENS = range(200)
TABLE, WANTED = list(range(13)), list(range(4))
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans as a collector does; `taken` has them by name."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, Any]] = []  # with the agent's name
        collector = self

        class Handler(Answers):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                for resource in ExportTraceServiceRequest.FromString(self.body).resource_spans:
                    said = {each.key: each.value.string_value for each in resource.resource.attributes}
                    assert said["service.name"] == "kvbridge"
                    for scope in resource.scope_spans:
                        collector.taken += [(said["service.instance.id"], span) for span in scope.spans]
                self.answer(200, "")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self, agent: str, rendezvous: str) -> dict[str, Any]:
        """Those of one request, by name."""
        mine = [span for name, span in self.taken if name == agent]
        roots = [each for each in mine if attributes(each).get("kvbridge.rendezvous") == rendezvous]
        return {
            span.name: span for root in roots for span in mine if root.span_id in (span.span_id, span.parent_span_id)
        }


def attributes(span: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


def started(bench_of: Benches, endpoint: str) -> Bench:
    shapes = Shape("nhd", blocks=200), Shape("hnd", block_tokens=64, blocks=60)
    made = bench_of(*shapes, routes="pull", otlp_endpoint=endpoint)
    made.fill(TABLE, TOKENS)
    return made


def carried(made: Bench, rendezvous: str, **more: object) -> None:
    sender, receiver = made.sender, made.receiver
    sender.offer(f"p-{rendezvous}", TABLE, len(TOKENS), rendezvous=rendezvous, **more)
    receiver.want(f"d-{rendezvous}", made.address, WANTED, TOKENS, rendezvous=rendezvous, **more)
    assert isinstance(receiver.answer(f"d-{rendezvous}"), Done)
    sender.released(f"p-{rendezvous}")


def test_both_sides_of_a_request_are_spans_of_the_engines_trace_or_of_one_of_their_own(bench_of: Benches) -> None:
    with closing(Collector()) as collector:
        made = started(bench_of, collector.endpoint)
        carried(made, "known", traceparent=f"00-{TRACE}-{PARENT}-01")
        carried(made, "alone", traceparent="00-nonsense")
        carried(made, "unsampled", traceparent=f"00-{TRACE}-{PARENT}-00")
        receiver = made.receiver
        receiver.want("late", made.address, WANTED, TOKENS, rendezvous="nowhere", deadline_s=0.3)
        assert isinstance(receiver.answer("late"), Failed)
        wait_for(lambda: len(collector.spans("d0", "nowhere")) >= 1 and len(collector.spans("p0", "alone")) == 4)
        stages = ("claim", "begin", "move")
        for agent, name in (("p0", "kvbridge send"), ("d0", "kvbridge receive")):
            spans = collector.spans(agent, "known")
            assert set(spans) == {name, *(f"{name}: {stage}" for stage in stages)}
            root = spans[name]
            assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
            assert {each.trace_id.hex() for each in spans.values()} == {TRACE}
            ordered = [spans[f"{name}: {stage}"] for stage in stages]
            assert ordered[0].start_time_unix_nano == root.start_time_unix_nano
            for before, after in pairwise(ordered):
                assert before.end_time_unix_nano == after.start_time_unix_nano
            assert ordered[-1].end_time_unix_nano == root.end_time_unix_nano
            assert 0 < root.end_time_unix_nano - root.start_time_unix_nano < ANSWER_S * 1e9
            assert abs(root.end_time_unix_nano / 1e9 - time.time()) < ANSWER_S
            assert collector.spans(agent, "unsampled") == {}
        events = [each.name for each in collector.spans("d0", "known")["kvbridge receive"].events]
        assert events == ["wanted", "claimed", "readable", "reading", "read", "done"]
        alone = [collector.spans(agent, "alone") for agent in ("p0", "d0")]
        assert len({span.trace_id for spans in alone for span in spans.values()}) == 1
        assert not alone[0]["kvbridge send"].parent_span_id
        late = collector.spans("d0", "nowhere")["kvbridge receive"]
        assert late.status.code == 2 and late.status.message.startswith("deadline: ")
        wait_for(lambda: receiver.agent.status.counters["kvbridge_spans_total{outcome=sent}"] >= 9)
        assert "kvbridge_spans_total{outcome=dropped}" not in receiver.agent.status.counters


def test_requests_go_on_where_nobody_takes_spans(bench_of: Benches) -> None:
    with socket.socket() as silent:  # its kernel takes connections, and nobody answers them
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        made = started(bench_of, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        carried(made, "first")
        began = time.monotonic()
        for number in range(20):
            carried(made, f"r{number}")
        assert time.monotonic() - began < 20 * COLLECTOR_S, "not a wait of the sender's thread for each"
        receiver = made.receiver
        wait_for(lambda: receiver.agent.status.counters.get("kvbridge_spans_total{outcome=dropped}", 0) >= 4)
        assert receiver.agent.stop() == 0


def record(traceparent: str = "") -> RequestRecord:
    made = RequestRecord("receiver", traceparent=traceparent)
    for at_s, what in ((1.0, "wanted"), (1.5, "claimed"), (2.0, "done")):
        made.add(TraceEntry(at_s=at_s, what=what, request="r", rendezvous="rendezvous"))
    return made


def test_what_there_is_no_room_for_is_dropped_at_once_and_counted() -> None:
    counted = {"sent": 0, "dropped": 0}

    def count(outcome: str, number: int) -> None:
        counted[outcome] += number

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        spans = Spans(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "a", count)
        began = time.monotonic()
        for _ in range(2 * MOST_WAITING):
            spans.see(record(), "receiver", 0.0)
        assert time.monotonic() - began < 10 * COLLECTOR_S, "it would wait for room in sixteen messages"
        assert counted["dropped"] >= 2 * (MOST_WAITING - 128) and not counted["sent"]
        began = time.monotonic()
        spans.close()
        assert time.monotonic() - began < 10 * COLLECTOR_S, "all that waits takes longer"


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://host/x", "http:///v1/traces"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(OperatorError, match="otlp_endpoint"):
        Spans(endpoint, "a", lambda outcome, number: None)


def test_a_request_that_never_moved_has_the_stages_that_it_came_to() -> None:
    root, claim = spans_of(record(), Resource({}))
    assert (root.name, root.start_time, root.end_time) == ("kvbridge receive", 10**9, 2 * 10**9)
    assert (claim.name, claim.start_time, claim.end_time) == ("kvbridge receive: claim", 10**9, 1_500_000_000)
