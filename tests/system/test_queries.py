"""The dashboard and the alerts ask for metrics, labels and values that agents have: a misspelt one would show nothing.

The expressions are read by promql-parser. What agents have is taken from the code that serves it.
"""

from __future__ import annotations

import re

import pytest

from tests.support import promql
from tests.support.monitoring import ROOT, dashboard, jobs, rules, targets
from tests.support.promql import Misnamed, labels, parsed, selectors, templates
from tests.support.served_metrics import served

VARIABLES = frozenset(each["name"] for each in dashboard()["templating"]["list"])
ALERTS = rules()
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()


def judged(expr: str, *texts: str) -> None:
    """Raises Misnamed for an expression, or for a label in a text about its result."""
    found = labels(parsed(expr), VARIABLES, jobs())
    for text in texts:
        if missing := templates(text) - (found or frozenset()):
            raise Misnamed(f"{text!r} names {missing}, the result has {set(found or ())}")


def test_the_dashboard_asks_for_what_agents_have() -> None:
    for _, expr, legend in targets():
        judged(expr, legend)


def test_an_alert_asks_for_what_agents_have() -> None:
    for rule in ALERTS.values():
        judged(rule["expr"], *rule["annotations"].values())


def test_metrics_that_an_alert_tells_to_look_at_are_served() -> None:
    texts = [text for rule in ALERTS.values() for text in rule["annotations"].values()]
    assert {name for text in texts for name in re.findall(r"\bkvbridge_\w+", text)} <= promql.SERIES.keys()


def metrics_of(expr: str) -> set[str]:
    """The metrics that an expression asks for, by their names on the page: a histogram's without its part."""
    names = {selector.name for selector in selectors(parsed(expr))}
    return {name if name in served() else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_troubleshooting_says_what_to_do_about_each_alert() -> None:
    part = TROUBLESHOOTING.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)\n.", part, re.MULTILINE) == list(ALERTS)


def variable(query: str) -> None:
    """Judges the query of a variable of the dashboard."""
    told = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    assert told, query
    found = labels(parsed(told[1]), VARIABLES, jobs())
    if told[2] not in (found or ()):
        raise Misnamed(f"{told[1]} has no label {told[2]}")


def test_the_variables_are_filled_from_what_agents_have() -> None:
    queries = [each["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    assert queries
    for query in queries:
        variable(query)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("rate(kvbridge_wants_total[5m])", "rate(kvbridge_want_total[5m])", "no agent has kvbridge_want_total"),
        ("rate(kvbridge_wants_total[5m])", "rate(kvbridge_wants[5m])", "no agent has kvbridge_wants"),
        ("kvbridge_want_seconds_sum", "kvbridge_want_seconds", "no agent has kvbridge_want_seconds"),
        ("kvbridge_build_info", "kvbridge_version_info", "no agent has"),
        ('kvbridge_wants_total{outcome="done"}', 'kvbridge_wants_total{code="done"}', "no label code"),
        ("sum by (route) (kvbridge_route_bytes_total)", "sum by (rout) (kvbridge_route_bytes_total)", "no label rout"),
        ("sum without (role) (kvbridge_chunks_total)", "sum without (rule) (kvbridge_chunks_total)", "no label rule"),
        ('kvbridge_wants_total{outcome!="done"}', 'kvbridge_wants_total{outcome!="ok"}', "outcome .* is never ok"),
        ('kvbridge_wants_total{outcome=~"done|deadline"}', 'kvbridge_wants_total{outcome=~"done|late"}', "never late"),
        ('kvbridge_chunks_total{role="sender"}', 'kvbridge_chunks_total{role="source"}', "never source"),
        ('kvbridge_route_bytes_total{route="pull"}', 'kvbridge_route_bytes_total{route="ipc"}', "never ipc"),
        ('kvbridge_receive_slots{state="quarantined"}', 'kvbridge_receive_slots{state="open"}', "never open"),
        ('kvbridge_memory_readers{state="open"}', 'kvbridge_memory_readers{state="free"}', "never free"),
        ('kvbridge_sessions{state="handshake"}', 'kvbridge_sessions{state="ended"}', "never ended"),
        ('kvbridge_queue_length{awaits="credit"}', 'kvbridge_queue_length{awaits="slots"}', "never slots"),
        ('kvbridge_stage_seconds_sum{stage="claim"}', 'kvbridge_stage_seconds_sum{stage="done"}', "never done"),
        ('kvbridge_refused_total{code="deadline"}', 'kvbridge_refused_total{code="dead_line"}', "never dead_line"),
        ('up{job="kvbridge"}', 'up{job="kv-bridge"}', "never kv-bridge"),
        ('kvbridge_wants_open{instance=~"$instance"}', 'kvbridge_wants_open{instance=~"$agent"}', "no variable"),
        (
            "histogram_quantile(0.5, sum by (le) (rate(kvbridge_want_seconds_bucket[5m])))",
            "histogram_quantile(0.5, sum by (role) (rate(kvbridge_want_seconds_bucket[5m])))",
            "no label role",
        ),
        (
            "histogram_quantile(0.5, rate(kvbridge_want_seconds_bucket[5m]))",
            "histogram_quantile(0.5, rate(kvbridge_want_seconds_sum[5m]))",
            "no label le",
        ),
        (
            "sum without (state) (kvbridge_send_slots) / on (instance) kvbridge_offers_open",
            "sum without (state) (kvbridge_send_slots) / on (role) kvbridge_offers_open",
            "no label role",
        ),
        ("kvbridge_wants_open / kvbridge_offers_open", "kvbridge_wants_open / kvbridge_transfers_open", "role"),
        ("rate(kvbridge_wants_total[5m])", "rate(kvbridge_wants_total)", "expected type"),
    ],
)
def test_a_misspelt_name_label_or_value_is_seen(right: str, wrong: str, said: str) -> None:
    judged(right)
    with pytest.raises(Misnamed, match=said):
        judged(wrong)


@pytest.mark.parametrize("text", ["{{ $labels.instances }}", "{{agent}}"])
def test_a_misspelt_label_in_a_text_is_seen(text: str) -> None:
    judged("kvbridge_wants_open", "{{ $labels.instance }} {{job}} {{ $value | humanize }}")
    with pytest.raises(Misnamed):
        judged("kvbridge_wants_open", text)


@pytest.mark.parametrize("query", ["label_values(kvbridge_engines_attached, instance)", "label_values(up, agent)"])
def test_a_misspelt_query_of_a_variable_is_seen(query: str) -> None:
    with pytest.raises(Misnamed):
        variable(query)
