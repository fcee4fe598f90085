"""The metrics of one agent, in its own registry, and what becomes of its engine's prompts, in the log.

Nothing fails if a router names nothing to fetch: the engine computes every prompt itself, and only time is lost. So a
warning says once a minute which part of the prompts' tokens came by the bridge, and why the rest did not, with the
likely cause. Each rank's agent counts for itself: an engine of two ranks counts every prompt twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Literal, get_args

from kvbridge_proto.engine import Computed, Done, Failed, Offer, Released
from kvbridge_proto.peer import Settled
from kvbridge_proto.pool import MOST_COUNT
from kvbridge_proto.status import PromptCounts, Traits
from msgspec import structs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ..exchange.actions import Carried, Compared, ReadAhead, Uncompared, Unconfirmed
from ..exchange.orders import Digested, Dropped, Malformed, Shipped
from ..exchange.session import Session
from . import scraping
from .record import RequestRecord, Role

log = logging.getLogger("kvbridge.prompts")

# Name, help, labels, and for each combination of their values where to read it.
Gauges = Iterable[tuple[str, str, tuple[str, ...], Mapping[Any, Callable[[], float]]]]
Replaced = Literal["slots", "send_slots", "fabric"]
MAX_CODES = 200
# fmt: off
BUCKETS_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005,
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300,
)
# fmt: on
WARN_SOON_S = 5.0  # from the first such prompt to the first warning
WARN_EVERY_S = 60.0
UNTAGGED = "untagged"
UNFETCHED = ("offer_expired", "reclaimed")
SOME_FETCHED = "others were: decode engines are slow to ask, or their clients left"
NONE_FETCHED = "none was: does the router hand on what this engine answers, does the decode engine run with kvbridge?"
# By reason. The first are known before anything is asked for. All others are codes of failed wants.
CAUSES = {
    UNTAGGED: "they name nothing to fetch: does the router tag what it sends to this engine (docs/routers.md)?",
    "bad_params": "their kv_transfer_params cannot be read: the engine's log has each",
    "other_prompt": "what they name was prefilled for other tokens, another adapter, other media or another salt",
    "other_weights": "the engines' weights have other names, or none since a reset (docs/operations.md, New weights)",
    "reads_all": "they need every prompt token computed here: prompt_logprobs, echo with logprobs, some pooling",
    "does_not_travel": "embeddings, prompts that go on to grow, and media without hashes do not travel",
    "agent_missing": "not every rank of this engine has its agent",
    "deadline": "nobody offered what they name in time: does prefill run with kvbridge, and for the same prompts?",
    "peer_unreachable": "the agent that they name does not answer: its address, the network between",
    "offer_expired": "they came when what they name was held no longer: kvbridge_hold_s on prefill",
    "already_fetched": "an offer serves one request: another had it (a retry, another answer to the prompt)",
    "already_declined": "an offer serves one request: another had it, and needed none of it",
    "started_after_it_was_offered": "the prefill engine or its agent was replaced between prefill and decode",
    "unknown_offer": "the prefill side knows of no such offer: does the router name what that engine has answered?",
    "offer_over": "what they name was over when they came: the prefill engine's log has each",
    "prefill_refused": "the prefill engine refused its half of the call, or was hung up on: its log has each",
    "reclaimed": "they came when the prefill engine had needed its blocks: its pool is small for its load",
    "kept_no_longer": "what another engine kept of them was released before they came",
    "incompatible": "the two engines' KV cannot be converted: `kvbridge plan` says why",
    "not_sent": "this engine's agent was not there",
    "agent_lost": "this engine's agent ended meanwhile",
}


class Metrics:
    """Counts what happens. `see` counts what happens to requests, the other counting methods what does beside them.

    They are cheap and never raise.
    """

    kinds: Collection[type] = (
        *(Done, Failed, Released, Settled, Shipped, Carried, RequestRecord),
        *(Compared, Digested, ReadAhead, Uncompared, Unconfirmed, Dropped, Malformed),
    )

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=BUCKETS_S)
        ProcessCollector(registry=registry)
        gauge("kvbridge_build_info", "1", ["version"]).labels(version("kvbridge")).set(1)
        self._codes = set(CAUSES)  # codes from peers cannot crowd these out
        self._chunks = counter("kvbridge_chunks_total", "Chunks moved", ["role"])
        self._bytes = counter("kvbridge_wire_bytes_total", "Bytes, in the wire's codec", ["role"])
        text = "The same bytes, by the route they took and by how they were converted"
        labels = ["role", "route", "conversion"]
        self._routed = counter("kvbridge_route_bytes_total", text, labels)
        text = "Stages of requests that ended: until both sides had met, until bytes could move, until all had"
        self._stage_s = histogram("kvbridge_stage_seconds", text, ["role", "stage"])
        # To find a metric by its labels takes longer than to count, so those of each request are remembered.
        self._chunks_of, self._bytes_of = cache(self._chunks.labels), cache(self._bytes.labels)
        self._routed_of, self._stage_of = cache(self._routed.labels), cache(self._stage_s.labels)
        text = "Spans of requests that were sent to otlp_endpoint, or dropped"
        self._spans = counter("kvbridge_spans_total", text, ["outcome"])
        text = "Handshakes with other agents: open, or the code of the failure"
        self._handshakes = counter("kvbridge_handshakes_total", text, ["role", "outcome"])
        self._wants = counter("kvbridge_wants_total", "Wants that ended", ["outcome"])
        text = "From when a transfer's last rows were computed until they had been carried"
        self._carry_s = histogram("kvbridge_carry_seconds", text)
        self._wants_of = cache(self._wants.labels)
        self._want_s = histogram("kvbridge_want_seconds", "From want to done")
        self._offers = counter("kvbridge_offers_released_total", "Offers that ended", ["code"])
        self._offers_of = cache(self._offers.labels)
        self._settled = counter("kvbridge_transfers_settled_total", "Transfers a receiver confirmed")
        self._gather_s = counter("kvbridge_gather_seconds_total", "Time spent gathering")
        name, text = "kvbridge_prompts_computed_here_total", "Prompts that our engine computed itself"
        self._here = counter(name, text, ["reason"])
        name, text = "kvbridge_prompt_tokens_computed_here_total", "Prompt tokens that our engine computed itself"
        self._tokens_here = counter(name, text, ["reason"])
        self._fetched = counter("kvbridge_prompt_tokens_fetched_total", "Prompt tokens that came by the bridge")
        self._late = counter("kvbridge_late_writes_total", "Writes that landed and did not count")
        text = "Read leases whose blocks were kept until they ended, because receivers did not confirm"
        self._leases_unconfirmed = counter("kvbridge_leases_unconfirmed_total", text)
        text = "Pulled chunks of which receiver and sender compared the digest"
        self._compared = counter("kvbridge_chunks_compared_total", text, ["role"])
        text = "Chunks that were not compared: no digest came in time, or their blocks were still written"
        self._uncompared = counter("kvbridge_chunks_uncompared_total", text)
        ahead = counter("kvbridge_reads_ahead_total", "Reads ordered before their sender had answered", ["counted"])
        self._ahead = {counts: ahead.labels(said) for counts, said in ((True, "yes"), (False, "no"))}
        text = "Pulled chunks whose digest differed: what was read is not what the sender has"
        self._differing = counter("kvbridge_digest_mismatches_total", text, ["role"])
        for role in ("sender", "receiver"):
            self._handshakes.labels(role, "open")
            for by_role in (self._chunks, self._bytes, self._compared, self._differing):  # alerts need an earlier value
                by_role.labels(role)
        text = "1 for the attached engine; rows can be carried between engines with the same model_key"
        labels = ["model_key", *Traits.__struct_fields__]
        self._engine = gauge("kvbridge_engine_info", text, labels)
        self._pool_tokens = gauge("kvbridge_pool_tokens", "Tokens that the attached engine's pool has room for")
        self._rebuilds = counter("kvbridge_rebuilds_total", "Times slots or the fabric were replaced", ["replaced"])
        for replaced in get_args(Replaced):
            self._rebuilds.labels(replaced)
        self._rejected = counter("kvbridge_rejected_messages_total", "Messages dropped", ["code"])
        failpoints = "Armed: this agent was started to fail, for a test"
        self._failpoints = counter("kvbridge_failpoints_total", failpoints, ["armed"])
        self._refused = counter("kvbridge_refused_total", "Engines and peers refused", ["code"])

    def watch(self, gauges: Gauges, sessions: Mapping[Role, Callable[[], Iterable[Session]]]) -> None:
        """Add these gauges, and the rates of open `sessions`. They are read on another thread, when Prometheus asks.

        So none may iterate over what the loop may change meanwhile.
        """
        for name, text, labels, values in gauges:
            gauge = Gauge(name, text, labels, registry=self.registry)
            for of, value in values.items():
                (gauge.labels(*of) if of else gauge).set_function(value)
        self.registry.register(_Proofs(sessions))

    def attached(self, model_key: str, traits: Traits, tokens: int) -> None:
        """Show this engine as the attached one, with room for so many tokens."""
        self._pool_tokens.set(tokens)
        self._engine.clear()
        self._engine.labels(model_key=model_key, **structs.asdict(traits)).set(1)

    def left(self) -> None:
        """No engine is attached any more."""
        self._pool_tokens.set(0)
        self._engine.clear()

    def warn_of_failpoints(self, armed: tuple[str, ...]) -> None:
        """Show which failpoints this agent was started with."""
        for each in armed:
            self._failpoints.labels(each).inc()

    def serve(
        self,
        address: str,
        why_ill: Callable[[], str],
        pages: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
        lookups: Mapping[str, Callable[[str], bytes]] = MappingProxyType({}),
    ) -> Callable[[], None]:
        """Serve on `host:port`. Returns a function that stops it. Raises OperatorError."""
        return scraping.serve(self.registry, why_ill, address, pages, lookups=lookups)

    def values(self) -> dict[str, float]:
        """All counters of ours, for `kvbridge status`."""
        found = {}
        for family in self.registry.collect():
            if family.type == "counter" and family.name.startswith("kvbridge_"):
                for sample in family.samples:
                    if sample.name.endswith("_total"):
                        labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
                        found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return found

    def prompts(self) -> PromptCounts:
        """What became of prompts, for `kvbridge status`."""
        return PromptCounts(
            fetched_tokens=min(MOST_COUNT, sum(_by_label(self._fetched).values())),
            computed_tokens=min(MOST_COUNT, sum(_by_label(self._tokens_here).values())),
            computed=_by_label(self._here),
            released=_by_label(self._offers),
        )

    def see(self, event: Any, role: Role, at: float) -> None:
        match event:
            case Carried(session=session, chunks=chunks, size_bytes=size_bytes):
                self._chunks_of(role).inc(chunks)
                self._bytes_of(role).inc(size_bytes)
                self._routed_of(role, session.routed.route, session.verdict.conversion).inc(size_bytes)
            case Settled() if role == "sender":
                self._settled.inc()
            case Done(seconds=seconds, tokens=tokens):
                self._wants_of("done").inc()
                self._want_s.observe(seconds)
                self._fetched.inc(tokens)
            case Failed(code=code):
                self._wants_of(self._known(code)).inc()
            case Released(code=code, is_declined=is_declined):
                self._offers_of(self._known(code or ("declined" if is_declined else "served"))).inc()
            case RequestRecord():
                for stage, began_at, ended_at in event.stages():
                    self._stage_of(role, stage).observe(ended_at - began_at)
            case _:
                self._see_chunks(event, role)

    def _see_chunks(self, event: Any, role: Role) -> None:
        """Count what is seldom: most transfers have few chunks, and one in many is compared."""
        match event:
            case Shipped(gather_s=gather_s):
                self._gather_s.inc(sum(gather_s))
            case Compared(chunks=chunks, differing=differing):
                self._compared.labels(role).inc(chunks)
                self._differing.labels(role).inc(differing)
            case Digested(found=found, read=read, failure=None):
                self._compared.labels(role).inc()
                self._differing.labels(role).inc(found != read)
            case Uncompared(chunks=chunks):
                self._uncompared.inc(chunks)
            case ReadAhead(counts=counts):
                self._ahead[counts].inc()
            case Unconfirmed():
                self._leases_unconfirmed.inc()
            case Dropped():
                self._late.inc()
            case Malformed(code=code):
                self.rejected(code)

    def carry_took(self, seconds: float) -> None:
        """Count a transfer of ours that was carried so long after its last rows were computed."""
        self._carry_s.observe(seconds)

    def spans(self, outcome: str, count: int) -> None:
        """Count spans that were "sent" or "dropped"."""
        self._spans.labels(outcome).inc(count)

    def handshake(self, role: Role, outcome: str) -> None:
        """Count a handshake that has ended: "open", or the code of its failure."""
        self._handshakes.labels(role, self._known(outcome)).inc()

    def prompt_computed(self, reason: str, tokens: int) -> str:
        """Count a prompt that our engine computed. Returns the reason as it is shown."""
        known = self._known(reason)
        self._here.labels(known).inc()
        self._tokens_here.labels(known).inc(tokens)
        return known

    def rebuilt(self, replaced: Replaced) -> None:
        self._rebuilds.labels(replaced).inc()

    def rejected(self, code: str) -> None:
        self._rejected.labels(self._known(code)).inc()

    def refused(self, code: str) -> None:
        self._refused.labels(self._known(code)).inc()

    def _known(self, code: str) -> str:
        """The code as a label, "other" once there are too many: peers could make codes up and fill Prometheus."""
        if len(self._codes) < MAX_CODES:
            self._codes.add(code)
        return code if code in self._codes else "other"


class _Proofs(Collector):
    """For each route, the rate of its slowest open session, as measured in the proof. Left out if none was measured."""

    def __init__(self, sessions: Mapping[Role, Callable[[], Iterable[Session]]]) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "Rate of the slowest open session by this route, as measured when it was proved"
        found = GaugeMetricFamily("kvbridge_route_bytes_per_second", text, labels=["role", "route"])
        for role, sessions in self._sessions.items():
            slowest: dict[str, float] = {}
            for session in sessions():
                if (rate := session.routed.rate) is not None:
                    route = session.routed.route
                    slowest[route] = min(rate.bytes_per_s, slowest.get(route, rate.bytes_per_s))
            for name, bytes_per_s in slowest.items():
                found.add_metric([role, name], bytes_per_s)
        yield found


def _by_label(counter: Counter) -> dict[str, int]:
    """What a counter has counted, by its only label. Without labels it is called ""."""
    samples = (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
    return {"".join(each.labels.values()): min(MOST_COUNT, int(each.value)) for each in samples}


@dataclass(slots=True)
class Tally:
    prompts: int = 0
    tokens: int = 0


class Reminder:
    """When to warn of what keeps happening: soon after it began, then once a minute. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._due_at = float("inf")  # nothing to say
        self._said_at = float("-inf")

    def happened(self, now: float) -> None:
        if self._due_at == float("inf"):
            self._due_at = max(now + WARN_SOON_S, self._said_at + WARN_EVERY_S)

    def take(self, now: float) -> bool:
        """Whether to warn now: true once, until it happens again."""
        if now < self._due_at:
            return False
        self._due_at, self._said_at = float("inf"), now
        return True


class FetchOutcomes:
    """The counts of one engine in the last minute or two."""

    def __init__(self) -> None:
        self._computed: dict[str, Tally] = {}
        self._fetched = 0  # tokens
        self._since = float("-inf")
        self._offered_at = float("-inf")
        self._reminder = Reminder()

    def fetch(self, tokens: int, now: float) -> None:
        """Count tokens that came."""
        self._forget(now)
        self._fetched += tokens

    def compute(self, reason: str, tokens: int, now: float) -> None:
        """Count a prompt, and those of its tokens that are computed here and another engine could have sent."""
        self._forget(now)
        self._reminder.happened(now)
        found = self._computed.setdefault(reason, Tally())
        found.prompts += 1
        found.tokens += tokens

    def offer(self, now: float) -> None:
        """A prompt is offered to others."""
        self._offered_at = now

    def due(self, now: float) -> str:
        """The warning that is due now, mostly "". Counts start again when it was due.

        Untagged prompts do not matter if the engine fetches none and offers some: it is there to prefill.
        """
        if not self._reminder.take(now):
            return ""
        is_offering = now - self._offered_at < WARN_EVERY_S
        is_prefill = is_offering and not self._fetched and set(self._computed) == {UNTAGGED}
        warning = "" if is_prefill else self._sentence()
        self._fetched, self._computed, self._since = 0, {}, now
        return warning

    def _forget(self, now: float) -> None:
        """Drop what came long before anything was computed."""
        if not self._computed and now - self._since >= WARN_EVERY_S:
            self._fetched, self._since = 0, now

    def _sentence(self) -> str:
        prompts = sum(each.prompts for each in self._computed.values())
        tokens = sum(each.tokens for each in self._computed.values())
        most_first = sorted(self._computed.items(), key=lambda each: -each[1].tokens)
        causes = "; ".join(
            f"{each.prompts} {reason}" + (f" ({cause})" if (cause := CAUSES.get(reason)) else "")
            for reason, each in most_first
        )
        share = f"; {self._fetched / (self._fetched + tokens):.0%} of prompt tokens came by the bridge"
        return f"computed here lately, not fetched: {prompts} prompts of {tokens} tokens{share}: {causes}"


class Prompts:
    """Runs on the loop. `count` counts a prompt and its tokens in the metrics, and says under which reason."""

    kinds: Collection[type] = (Offer, Done, Released)

    def __init__(self, count: Callable[[str, int], str]) -> None:
        self._count = count
        self._share = FetchOutcomes()
        self._unfetched = 0
        self._fetched_at = float("-inf")
        self._last = ""
        self._reminder = Reminder()

    def computed(self, message: Computed, now: float) -> None:
        reason = self._count(message.reason, message.tokens)
        self._share.compute(reason, message.tokens, now)

    def see(self, event: Any, role: Role, now: float) -> None:
        match event:
            case Offer(is_last=is_last, tokens=tokens):
                if is_last and tokens:
                    self._share.offer(now)
            case Done(tokens=tokens):
                self._share.fetch(tokens, now)
            case Released(code="", is_declined=False):
                self._fetched_at = now
            case Released(code=code, reason=reason) if code in UNFETCHED:
                self._reminder.happened(now)
                self._unfetched += 1
                self._last = f"{code}: {reason}"

    def tick(self, now: float) -> None:
        if warning := self._share.due(now):
            log.warning("%s", warning)
        if self._reminder.take(now):
            self._say_unfetched(now)

    def _say_unfetched(self, now: float) -> None:
        """Warn of prompts that were computed for nothing: the cause is outside this agent."""
        cause = SOME_FETCHED if now - self._fetched_at < WARN_EVERY_S else NONE_FETCHED
        log.warning("prompts that nobody fetched: %d, the last: %s; %s", self._unfetched, self._last, cause)
        self._unfetched = 0
