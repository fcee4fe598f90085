"""The metrics that an agent serves: their names, their labels, and the values of labels that are one of a few. Pure."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import get_args

from kvbridge_proto.peer import ROUTES
from kvbridge_proto.status import SlotCounts
from prometheus_client import CollectorRegistry, ProcessCollector

from kvbridge.agent.daemon import STATES, Agent
from kvbridge.agent.metrics import CAUSES, Metrics, Replaced
from kvbridge.agent.record import Role, Stage
from kvbridge.geometry.compat import Conversion
from kvbridge.proxy.fleet import Role as OfEngine
from kvbridge.proxy.metrics import ProxyMetrics
from tests.unit.proto.codes import NO_CODES, used

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
QUEUES = set(re.findall(r"^\| `(receiver|sender)` \| `(\w+)` \|", PAGE, re.MULTILINE))


def registry() -> CollectorRegistry:
    """An agent's, with its gauges; nothing has happened yet."""
    metrics = Metrics()
    metrics.watch(Agent.__new__(Agent).gauges(), {})  # its parts are looked at only when somebody asks
    return metrics.registry


def served() -> dict[str, tuple[str, ...]]:
    """The labels of each metric."""
    found: dict[str, tuple[str, ...]] = {"kvbridge_route_bytes_per_second": ("role", "route")}
    for collector, names in registry()._collector_to_names.items():
        found |= dict.fromkeys(_kept(list(names)), tuple(getattr(collector, "_labelnames", ())))
    return found


def _kept(names: list[str]) -> list[str]:
    kept = [each for each in names if not each.endswith(("_created", "_bucket", "_sum", "_count"))]
    return [each for each in kept if each.endswith("_total")] or kept


def of_process() -> dict[str, frozenset[str]]:
    """What Prometheus' library says of the process of an agent or a proxy."""
    families = ProcessCollector(registry=None).collect()
    return {sample.name: frozenset() for family in families for sample in family.samples}


def served_by_proxy() -> dict[str, tuple[str, ...]]:
    """As `served`, of a proxy."""
    return {
        name: tuple(getattr(collector, "_labelnames", ()))
        for collector, names in ProxyMetrics().registry._collector_to_names.items()
        for name in _kept(list(names))
    }


def of_proxy() -> dict[str, frozenset[str]]:
    """As `series`, of a proxy."""
    return _samples(served_by_proxy(), ProxyMetrics().registry)


def series() -> dict[str, frozenset[str]]:
    """The labels of each name under which Prometheus keeps samples: a histogram has three."""
    return _samples(served(), Metrics().registry)


def _samples(served: dict[str, tuple[str, ...]], registry: CollectorRegistry) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    histograms = {family.name for family in registry.collect() if family.type == "histogram"}
    for name, labels in served.items():
        if name in histograms:
            found |= {f"{name}_{part}": frozenset(labels) for part in ("sum", "count")}
            found[f"{name}_bucket"] = frozenset({*labels, "le"})
        else:
            found[name] = frozenset(labels)
    return found


@functools.cache  # not at import: to read all codes takes a second, and every worker of the tests imports this
def known_values() -> dict[str, frozenset[str]]:
    """By label, or by metric and label where metrics mean different things by it."""
    codes = frozenset(used()) | {"other"}
    return {
        "role": frozenset(get_args(Role)),
        "route": frozenset(ROUTES),
        "conversion": frozenset(get_args(Conversion)),
        "stage": frozenset(get_args(Stage)),
        "awaits": frozenset(awaits for _, awaits in QUEUES),
        "code": codes,
        "reason": codes | CAUSES.keys(),
        "kvbridge_offers_released_total code": codes | NO_CODES,
        "kvbridge_wants_total outcome": codes | {"done"},
        "kvbridge_handshakes_total outcome": codes | {"open"},
        "kvbridge_spans_total outcome": frozenset({"sent", "dropped"}),
        "kvbridge_rebuilds_total replaced": frozenset(get_args(Replaced)),
        "kvbridge_receive_slots state": frozenset(SlotCounts.__struct_fields__),
        "kvbridge_send_slots state": frozenset(SlotCounts.__struct_fields__),
        "kvbridge_sessions state": frozenset(state.name.lower() for state in STATES),
        "kvbridge_memory_readers state": frozenset({"open", "overdue"}),
        **{f"{name} role": frozenset(OfEngine) for name, labels in of_proxy().items() if "role" in labels},
    }


def values(name: str, label: str) -> frozenset[str] | None:
    """What the label may be, or None if it may be anything."""
    is_proxy = name.startswith("kvbridge_proxy_")  # its labels are its own
    return known_values().get(f"{name} {label}", None if is_proxy else known_values().get(label))
