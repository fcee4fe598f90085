"""What an agent counts: each metric is in docs/metrics.md, labels are few, and stages are what the journal says."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.status import SlotCounts

from kvbridge.agent.journal import Journal
from kvbridge.agent.lives import Life, Lives
from kvbridge.agent.metrics import MAX_CODES, Gauges, Metrics
from tests.integration.agent.harness import wait_for
from tests.integration.agent.test_carry import Bench
from tests.integration.agent.test_journal import TABLE, TOKENS, WANTED
from tests.support.oracle import Shape

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = (ROOT / "deploy/grafana/kvbridge.json").read_text()
NEW = ("route_bytes_total", "stage_seconds", "queue_length", "transfers_open", "sessions", "handshakes_total")


def described() -> dict[str, str]:
    """The labels of each metric, as the page has them."""
    rows = re.findall(r"^\| (`kvbridge_[^|]*) \|([^|]*)\|", PAGE, re.MULTILINE)
    return {name: labels.strip() for names, labels in rows for name in re.findall(r"`(\w+)`", names)}


def served() -> dict[str, str]:
    """The same of those that an agent has."""
    metrics, nothing = Metrics(), dict.fromkeys((each.name for each in fields(Gauges)), lambda: 0)
    slots = lambda: SlotCounts(free=0, lent=0, landed=0, quarantined=0)  # noqa: E731
    by_role: dict[str, Any] = {"waiting": {}, "moving": {}, "sessions": {}, "open_sessions": {}}
    metrics.watch(Gauges(**{**nothing, **by_role, "inbound": slots, "outbound": slots, "readers": list}))
    found = {"kvbridge_route_bytes_per_second": "role, route"}
    for collector, names in metrics.registry._collector_to_names.items():
        kept = [each for each in names if not each.endswith(("_created", "_bucket", "_sum", "_count"))]
        labels = ", ".join(getattr(collector, "_labelnames", ()))
        found |= dict.fromkeys([each for each in kept if each.endswith("_total")] or kept, labels)
    return found


def test_the_page_has_every_metric_with_its_labels() -> None:
    assert described() == served()


def test_the_dashboard_shows_what_moves_waits_and_is_agreed() -> None:
    exprs = [target["expr"] for panel in json.loads(DASHBOARD)["panels"] for target in panel["targets"]]
    for name in (*NEW, "route_bytes_per_second"):
        assert any(f"kvbridge_{name}" in expr for expr in exprs), name


def test_peers_cannot_make_outcomes_without_end() -> None:
    metrics = Metrics()
    for number in range(3 * MAX_CODES):
        metrics.greeted("source", f"code{number}")
    outcomes = [each for each in metrics.values() if each.startswith("kvbridge_handshakes_total")]
    assert len(outcomes) <= MAX_CODES + 4 and any("outcome=other" in each for each in outcomes)


def lives(role: Any, most: int = 10) -> tuple[Lives, list[float], list[Life]]:
    now, ended = [5.0], list[Life]()
    return Lives(role, Journal(lambda: now[0]), ended.append, most), now, ended


def stages(life: Life) -> dict[str, float]:
    return {stage: round(ended_at - began_at, 3) for stage, began_at, ended_at in life.stages}


def test_stages_of_a_fetch_are_between_what_the_journal_was_told() -> None:
    kept, now, ended = lives("sink")
    for at, what, names in (
        (0.0, "wanted", {"request": "d", "room": "r"}),
        (0.1, "claimed", {"request": "d", "room": "r", "transfer": "t1"}),
        (0.2, "claimed", {"request": "d", "room": "r", "transfer": "t2"}),
        (0.4, "landed", {"transfer": "t2"}),
        (0.5, "landed", {"transfer": "t1"}),
        (1.0, "done", {"request": "d"}),
        (2.0, "landed", {"transfer": "t1"}),  # nobody's any more
    ):
        now[0] = 5.0 + at
        kept.note(what, **names)
    (life,) = ended
    assert stages(life) == {"claim": 0.1, "begin": 0.3, "move": 0.6} and life.transfers == {"t1", "t2"}
    assert not kept._of_request and not kept._of_transfer


@pytest.mark.parametrize(("claimed", "claim", "begin"), [(0.0, 0.0, 0.1), (0.25, 0.05, 0.05)])
def test_a_sender_may_be_asked_before_it_has_anything(claimed: float, claim: float, begin: float) -> None:
    kept, now, ended = lives("source")
    for at, what, names in sorted(
        (
            (claimed, "claimed", {"room": "r", "transfer": "t"}),
            (0.2, "offered", {"request": "p", "room": "r"}),
            (0.21 if claimed < 0.2 else 0.26, "ordered", {"request": "p", "transfer": "t"}),
            (0.3, "written", {"transfer": "t"}),
            (0.4, "released", {"request": "p"}),
        ),
        key=lambda each: each[0],
    ):
        now[0] = 5.0 + at
        kept.note(what, **names)
    assert [stages(each) for each in ended] == [{"claim": claim, "begin": begin, "move": 0.1}]


def test_of_requests_that_never_end_only_so_many_are_kept() -> None:
    kept, _, ended = lives("source", most=4)
    for number in range(100):
        kept.note("offered", request=f"p{number}", room=f"r{number}")
        kept.note("claimed", room="elsewhere", transfer=f"t{number}")
    assert len(kept._of_request) == len(kept._of_transfer) == 4
    kept.note("released", request="p0")
    assert not ended


@pytest.mark.parametrize(("route", "block_tokens", "conversion"), [("pull", 64, "layout"), ("nixl", 16, "none")])
def test_agents_count_bytes_by_route_and_conversion(
    route: str, block_tokens: int, conversion: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        shapes = Shape("nhd", blocks=200), Shape("nhd", block_tokens=block_tokens, blocks=200)
        bench = Bench(tmp_path, stack, *shapes, routes=route, slot_bytes=1 << 20)
        (source,), (sink,) = bench.sources, bench.sinks
        bench.fill(TABLE, TOKENS)
        source.offer("p", TABLE, len(TOKENS), room="room")
        table = WANTED if block_tokens == 64 else list(range(5, 68))
        sink.want("d", bench.address, table, TOKENS, room="room")
        sink.answer("d")
        source.released("p")
        wait_for(lambda: source.agent.status.counters.get("kvbridge_wire_bytes_total{role=source}"))
        for role, engine in (("source", source), ("sink", sink)):
            counters = Counter(engine.agent.status.counters)
            moved = counters[f"kvbridge_wire_bytes_total{{role={role}}}"]
            assert moved == counters[f"kvbridge_route_bytes_total{{role={role},route={route},conversion={conversion}}}"]
            assert counters[f"kvbridge_handshakes_total{{role={role},outcome=open}}"] == 1
