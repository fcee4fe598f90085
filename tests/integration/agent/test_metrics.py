"""What an agent counts: each metric is in docs/metrics.md, labels have few values, stages agree with the journal."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.common import Blocks
from kvbridge_proto.engine import Done, Offer, Released, Want
from kvbridge_proto.peer import BlockTables, Settled
from msgspec.structs import replace

from demo.processes import free_port
from kvbridge.agent.journal import Journal
from kvbridge.agent.metrics import MAX_CODES, Metrics
from kvbridge.agent.rates import MOST_OPEN, MOST_RECEIVERS, Rates, Total
from kvbridge.agent.record import Record, RequestRecord, Role
from kvbridge.exchange.actions import Met
from kvbridge.exchange.orders import Sent, StageReached
from testing.oracle import Shape
from testing.pairs import Benches
from testing.waiting import wait_for
from tests.integration.agent.test_journal import TABLE, TOKENS, WANTED
from tests.support.served_metrics import served, served_by_proxy
from tests.unit.exchange.claimant import Claimant

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = (ROOT / "deploy/grafana/kvbridge.json").read_text()
NEW = ("route_bytes_total", "stage_seconds", "queue_length", "transfers_open", "sessions", "handshakes_total")


def described() -> dict[str, str]:
    """The labels of each metric, as the page has them."""
    rows = re.findall(r"^\| (`kvbridge_[^|]*) \|([^|]*)\|", PAGE, re.MULTILINE)
    return {name: labels.strip() for names, labels in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_page_has_every_metric_with_its_labels() -> None:
    assert described() == {name: ", ".join(labels) for name, labels in served().items()}


@pytest.mark.parametrize(("names", "folder"), [(served(), "agent"), (served_by_proxy(), "proxy")])
def test_each_metric_is_found_in_the_code_by_its_whole_name(names: Iterable[str], folder: str) -> None:
    code = "\n".join(each.read_text() for each in (ROOT / "kvbridge" / folder).glob("*.py"))
    assert [name for name in names if f'"{name}"' not in code] == []


def test_each_metric_has_a_help_of_its_own() -> None:
    helps = Counter(family.documentation for family in Metrics().registry.collect())
    assert not [text for text, times in helps.items() if times > 1 or not text]


def test_the_dashboard_shows_what_moves_waits_and_is_agreed() -> None:
    exprs = [target["expr"] for panel in json.loads(DASHBOARD)["panels"] for target in panel["targets"]]
    for name in (*NEW, "route_bytes_per_second"):
        assert any(f"kvbridge_{name}" in expr for expr in exprs), name


def test_peers_cannot_make_outcomes_without_end() -> None:
    metrics = Metrics()
    for number in range(3 * MAX_CODES):
        metrics.handshake("sender", f"code{number}")
    outcomes = [each for each in metrics.values() if each.startswith("kvbridge_handshakes_total")]
    assert len(outcomes) <= MAX_CODES + 4 and any("outcome=other" in each for each in outcomes)


class Ended:
    """A view of the requests that have ended: their stages, in seconds."""

    kinds = (RequestRecord,)

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def see(self, event: RequestRecord, role: Role, at: float) -> None:
        self.records.append(event)

    @property
    def stages(self) -> list[dict[str, float]]:
        return [
            {stage: round(ended_at - began_at, 3) for stage, began_at, ended_at in each.stages()}
            for each in self.records
        ]


NAMES = {"number": 1, "request": "x", "rendezvous": "r"}
OFFER = Offer(**NAMES, tokens=16, blocks=(), is_last=True, hold_s=1.0)
WANT = Want(**NAMES, sender="tcp://p:1", first_token=0, end_token=16, blocks=(), deadline_s=1.0)


def test_stages_of_a_fetch_are_between_what_the_journal_was_told() -> None:
    ended = Ended()
    kept = Record("receiver", Journal(lambda: 0.0), lambda: 0.0, [ended])
    claim = Claimant().claim(end_token=16)
    kept.note(WANT, 5.0)
    kept.note(replace(claim, transfer="t1"), 5.1, number=1)
    kept.note(replace(claim, transfer="t2"), 5.2, number=1)
    kept.note(StageReached("t2", "landed", 5.4, 1))
    kept.note(StageReached("t1", "landed", 5.5, 1))
    kept.note(Done(number=1, request="x", moved_bytes=1, seconds=1.0), 6.0)
    kept.note(StageReached("t1", "landed", 7.0, 1))  # nobody's any more
    (record,) = ended.records
    assert ended.stages == [{"claim": 0.1, "begin": 0.3, "move": 0.6}] and set(record.transfers) == {"t1", "t2"}
    names = kept._of_number[1]
    assert names is kept._of_transfer["t1"] and names.is_over and not names.first


@pytest.mark.parametrize(("claimed", "claim", "begin"), [(0.0, 0.0, 0.1), (0.25, 0.05, 0.05)])
def test_a_sender_may_be_asked_before_it_has_anything(claimed: float, claim: float, begin: float) -> None:
    ended = Ended()
    kept = Record("sender", Journal(lambda: 0.0), lambda: 0.0, [ended])
    first: list[tuple[float, Any]] = [(claimed, Claimant().claim(end_token=16)), (0.2, OFFER)]
    transfer = first[0][1].transfer
    for at, event in sorted(first, key=lambda each: each[0]):
        kept.note(event, at)
    kept.note(Met(transfer, "D", 1, 1, 1), 0.26)
    kept.note(StageReached(transfer, "gathering", 0.3, 1))
    kept.note(Released(number=1, request="x"), 0.4)
    assert ended.stages == [{"claim": claim, "begin": begin, "move": 0.1}]


def test_of_requests_that_never_end_only_so_many_are_kept() -> None:
    ended = Ended()
    kept, claim = Record("sender", Journal(), lambda: 0.0, [ended], most=4), Claimant().claim(end_token=16)
    for number in range(100):
        kept.note(replace(OFFER, number=number + 1))
        kept.note(replace(claim, transfer=f"t{number}"))
    assert len(kept._of_number) == len(kept._of_transfer) == 4
    kept.note(Released(number=1, request="x"))
    assert not ended.records


@pytest.mark.parametrize(("route", "block_tokens", "conversion"), [("pull", 64, "layout"), ("nixl", 16, "none")])
def test_agents_count_bytes_by_route_and_conversion(
    route: str, block_tokens: int, conversion: str, bench_of: Benches
) -> None:
    shapes = Shape("nhd", blocks=200), Shape("nhd", block_tokens=block_tokens, blocks=200)
    bench = bench_of(*shapes, routes=route, slot_bytes=1 << 20)
    sender, receiver = bench.sender, bench.receiver
    bench.fill(TABLE, TOKENS)
    table = WANTED if block_tokens == 64 else list(range(5, 68))
    bench.fetch(TABLE, table, TOKENS, p="p", d="d", rendezvous="rendezvous")
    wait_for(lambda: sender.agent.status.counters.get("kvbridge_wire_bytes_total{role=sender}"))
    for role, engine in (("sender", sender), ("receiver", receiver)):
        counters = Counter(engine.agent.status.counters)
        moved = counters[f"kvbridge_wire_bytes_total{{role={role}}}"]
        assert moved == counters[f"kvbridge_route_bytes_total{{role={role},route={route},conversion={conversion}}}"]
        assert counters[f"kvbridge_handshakes_total{{role={role},outcome=open}}"] == 1


PREFILL_S = 3.0
COMPUTED = list(range(4, 12))  # the prompt's blocks


@pytest.mark.parametrize("route", ["pull", "nixl"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_prefill_does_not_count_as_a_slow_transfer(route: str, chunks: int, bench_of: Benches) -> None:
    """The want comes first, as with routers that ask both engines at once. Prompts come whole, or in chunks."""
    place = f"127.0.0.1:{free_port()}"
    bench = bench_of(Shape("nhd"), Shape("hnd"), routes=route, p={"metrics": place})
    bench.want("r", list(range(8)), range(128))
    if chunks == 2:
        bench.offer("r", COMPUTED[:4], 64, is_last=False)
    time.sleep(PREFILL_S)  # the engine computes
    first = 4 * (chunks - 1)
    bench.offer("r", COMPUTED[first:], 128, first=first, is_more=chunks == 2)
    bench.done("r")
    wait_for(lambda: summed(place, "kvbridge_carry_seconds_count") == 1)
    assert 0 < summed(place, "kvbridge_carry_seconds_sum") < PREFILL_S / 2


def test_a_renewed_lease_does_not_make_a_transfer_look_quicker() -> None:
    metrics = Metrics()
    rates = Rates(metrics.carry_took)
    rates.see(Met("t", "D", 1, 1, 4096), "sender", 0.5)
    for at, blocks in ((1.0, (Blocks(0, 0, (7,)),)), (2.0, ())):
        rates.see(BlockTables(transfer="t", tokens=16, is_last=True, renewal=0, blocks=blocks), "sender", at)
    rates.see(Settled(transfer="t"), "sender", 2.5)
    assert metrics.registry.get_sample_value("kvbridge_carry_seconds_sum") == 1.5


def summed(place: str, name: str) -> float:
    page = urllib.request.urlopen(f"http://{place}/metrics", timeout=60).read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)))


def test_of_transfers_that_are_never_carried_only_so_many_are_kept() -> None:
    metrics = Metrics()
    rates = Rates(metrics.carry_took)
    for number in range(MOST_OPEN + 7):
        rates.see(Met(f"t{number}", "D", number, 1, 10), "sender", 0.5)
        for at in (1.0, 2.0):
            rates.see(StageReached(f"t{number}", "computed", at, 1), "sender", at)
    assert len(rates._open) == MOST_OPEN
    for number in (6, 7, 8, 8):
        rates.see(Sent(f"t{number}"), "sender", 2.5)
    assert [metrics.registry.get_sample_value(f"kvbridge_carry_seconds_{part}") for part in ("count", "sum")] == [2, 1]
    assert rates.to("D") == Total(2, 20, 1.0) and rates.to("another") == Total()


def test_of_receivers_only_so_many_are_kept_and_each_has_its_own_total() -> None:
    rates = Rates([].append)
    for number in [*range(MOST_RECEIVERS), 0, *range(MOST_RECEIVERS, MOST_RECEIVERS + 3)]:
        rates.see(Met("t", f"D{number}", 1, 1, 10), "sender", 0.5)
        rates.see(StageReached("t", "computed", 1.0, 1), "sender", 1.0)
        rates.see(Sent("t"), "receiver", 1.5)
        rates.see(Sent("t"), "sender", 2.0)
    assert len(rates._totals) == MOST_RECEIVERS
    assert [rates.to(f"D{number}").transfers for number in (0, 1, 3, 4, MOST_RECEIVERS + 2)] == [2, 0, 0, 1, 1]
    assert rates.to("D0") == Total(2, 20, 2.0)
