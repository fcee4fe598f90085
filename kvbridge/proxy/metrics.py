"""The proxy's Prometheus metrics. One registry per proxy; engines are labelled as the operator named them."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class ProxyMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter("kvbridge_proxy_requests_total", "Clients' requests", ["path", "outcome"])
        self.pairs = counter("kvbridge_proxy_pairs_total", "Prompts sent to a pair of engines", ["prefill", "decode"])
        self.failures = counter("kvbridge_proxy_engine_failures_total", "Legs that failed", ["role", "engine", "code"])
        self.retries = counter("kvbridge_proxy_retries_total", "Prompts sent to another pair")
        self.without_kv = counter(
            "kvbridge_proxy_prefills_without_kv_total",
            "Prompts that a prefill engine did not offer: the decode engine computes them",
            ["engine"],
        )
        self.without_prefill = counter(
            "kvbridge_proxy_prompts_without_prefill_total",
            "Prompts that no prefill engine could prefill: a decode engine was asked to compute them",
            ["reason"],
        )
        self.moves = counter(
            "kvbridge_proxy_moves_total",
            "Answers that another engine was asked to go on with, by the decode engine that drains or failed",
            ["engine", "outcome"],
        )
        self.healthy = gauge("kvbridge_proxy_engine_healthy", "Passes health checks", ["role", "engine"])
        self.outstanding = gauge("kvbridge_proxy_engine_outstanding", "Legs under way", ["role", "engine"])
        self.connections = gauge("kvbridge_proxy_connections", "Clients' connections")
        self.most_connections = gauge("kvbridge_proxy_connections_limit", "As many as there may be")
        self.connections_ended = counter(
            "kvbridge_proxy_connections_ended_total",
            "Clients' connections that were closed because there were too many",
            ["reason"],
        )
        self.held_bytes = gauge("kvbridge_proxy_held_bytes", "Bytes of bodies and answers in memory")
        self.most_held_bytes = gauge("kvbridge_proxy_held_bytes_limit", "As many as there may be")
        self.stalled_s = counter("kvbridge_proxy_stalled_seconds_total", "How long the proxy stood still")
        ProcessCollector(registry=registry)
        self.prefill_s = self._seconds(
            "kvbridge_proxy_prefill_seconds", "From the request to the prefill engine's answer"
        )
        self.first_s = self._seconds(
            "kvbridge_proxy_first_answer_seconds", "From the request to the first part of the decode engine's answer"
        )
        self.request_s = self._seconds("kvbridge_proxy_request_seconds", "From the request to the end of its answer")

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=BUCKETS_S, registry=self.registry)

    def forget(self, role: str, engine: str) -> None:
        """Remove the series of an engine that is gone."""
        self.failures.remove_by_labels({"role": role, "engine": engine})
        self.outstanding.remove_by_labels({"role": role, "engine": engine})
        self.without_kv.remove_by_labels({"engine": engine})
        self.moves.remove_by_labels({"engine": engine})

    def text(self) -> bytes:
        return generate_latest(self.registry)
