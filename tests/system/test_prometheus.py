"""Prometheus scrapes two agents that everything has happened to, and every query of deploy/ finds something in it."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Computed, Done, Failed, Refused

from demo.processes import free_port
from kvbridge.failpoints import VARIABLE
from tests.integration.agent.harness import AgentProcess, Client, OracleEngine, agent
from tests.integration.agent.test_spans import Collector
from tests.support.monitoring import ALERTS, dashboard, program, promtool, rules, targets
from tests.support.oracle import Shape, build
from tests.support.promql import parsed, selectors
from tests.support.served_metrics import QUEUES, series, values

LOOK_S = 30.0
NOWHERE = "tcp://not an address"
RULES = rules()
HAPPENED = (  # two scrapes of the last of it: rates need two
    "kvbridge_failpoints_total",
    "kvbridge_refused_total",
    "kvbridge_rejected_messages_total",
    "kvbridge_prompt_tokens_computed_here_total",
    "kvbridge_spans_total",
    'kvbridge_wants_total{outcome="done"}',
    'kvbridge_wants_total{outcome="bad_address"}',
    'kvbridge_handshakes_total{role="receiver",outcome="peer_unreachable"}',
)


class Server:
    """A Prometheus that scrapes these addresses each second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{json.dumps(str(ALERTS))}]\n"
            f"scrape_configs: [{{job_name: kvbridge, static_configs: [{{targets: {json.dumps(targets)}}}]}}]\n"
        )
        self._log = (folder / "prometheus.log").open("wb")
        command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self._url.removeprefix('http://')}"], stderr=self._log
        )

    def ask(self, what: str, **query: str) -> Any:
        """What its API answers. Raises for a query that is none."""
        address = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        answer = json.load(urllib.request.urlopen(address, timeout=5))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """What it has for an expression."""
        return list(self.ask("query", query=expr)["result"])

    def wait(self, expr: str) -> None:
        """Until there is something for it."""
        end = time.monotonic() + LOOK_S
        while True:
            try:
                if self.query(expr):
                    return
            except OSError:  # it has not begun to serve
                pass
            assert time.monotonic() < end and self._process.poll() is None, f"nothing for {expr}"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


def carry(sender: OracleEngine, receiver: OracleEngine, name: str) -> None:
    sender.offer(name, list(range(64)), 1024)
    receiver.want(name, sender.agent.address, list(range(64)), range(1024))
    assert isinstance(receiver.answer(name), Done)


def fail(receiver: OracleEngine, name: str, address: str) -> None:
    receiver.want(name, address, [1], range(16))
    assert isinstance(receiver.answer(name), Failed)


def goes_wrong(sender: OracleEngine, receiver: OracleEngine) -> None:
    """Once each: what agents count and a fleet that is well has nothing of."""
    fail(receiver, "nowhere", NOWHERE)
    fail(receiver, "nobody", f"tcp://127.0.0.1:{free_port()}")
    receiver.client.send(Computed(tokens=10, reason="untagged"))
    with closing(Client(receiver.agent.socket)) as second:
        second.socket.sendall(struct.pack(">I", 1 << 31))
        assert second.wait(Refused).code == "frame_too_large"
    with closing(OracleEngine(sender.agent, sender.held)) as other:
        assert isinstance(other.attach(), Refused), "an agent has one engine"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has seen two agents carry some requests by slots, and whatever else they count."""
    program("prometheus")
    folder, ports = tmp_path_factory.mktemp("prometheus"), [free_port() for _ in range(2)]
    with ExitStack() as stack:
        collector = stack.enter_context(closing(Collector()))
        options: dict[str, Any] = {"routes": "nixl,pull", "otlp_endpoint": collector.endpoint}
        agents = list[AgentProcess]()
        for name, port, failpoints in zip("pd", ports, ("", "sender.drained_sent=pause:0.1@1000"), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(os.environ, VARIABLE, failpoints)
                agents.append(stack.enter_context(agent(folder, name, metrics=f"127.0.0.1:{port}", **options)))
        sender, receiver = (
            stack.enter_context(closing(OracleEngine(running, build(Shape("nhd", blocks=64))))) for running in agents
        )
        sender.attach()
        receiver.attach()
        server = stack.enter_context(closing(Server(folder, [f"127.0.0.1:{port}" for port in ports])))
        carry(sender, receiver, "first")
        goes_wrong(sender, receiver)
        server.wait("count(up == 1) == 2")
        for number in range(3):
            carry(sender, receiver, f"r{number}")
            fail(receiver, f"nowhere{number}", NOWHERE)
        for each in HAPPENED:
            server.wait(f"count_over_time({each}[1m]) >= 2")
        server.wait('rate(kvbridge_wants_total{outcome="done"}[5m]) > 0')
        yield server


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels[label[1]], legend)


@pytest.mark.parametrize(("title", "expr", "legend"), targets())
def test_every_query_of_the_dashboard_has_something_to_show(server: Server, title: str, expr: str, legend: str) -> None:
    found = server.query(expr.replace("$instance", ".*"))
    assert found, "nothing to show"
    names = [_named(legend, each["metric"]) for each in found]
    assert len(names) == len(set(names)), f"lines that nobody can tell apart: {names}"


def test_the_variables_of_the_dashboard_find_the_agents(server: Server) -> None:
    (query,) = [each["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    selector, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
    assert len(server.ask(f"label/{label}/values", **{"match[]": selector})) == 2


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_alert_is_asked_whole_and_is_about_series_that_agents_have(server: Server, rule: dict[str, Any]) -> None:
    server.query(rule["expr"])
    for selector in selectors(parsed(rule["expr"])):
        assert server.query(selector.prettify()), f"no agent has {selector.prettify()}"


def test_prometheus_takes_every_alert_and_those_fire_that_should(server: Server) -> None:
    (group,) = server.ask("rules")["groups"]
    assert {each["name"]: each["health"] for each in group["rules"]} == dict.fromkeys(RULES, "ok")
    server.wait('ALERTS{alertname="KvbridgeFailpoints",alertstate="firing"}')
    server.wait('ALERTS{alertname="KvbridgeWantsFail",alertstate="pending"}')
    assert not server.query('ALERTS{alertname!="KvbridgeFailpoints",alertstate="firing"}')


def test_what_agents_serve_is_what_queries_are_judged_by(server: Server) -> None:
    found = server.query('{__name__=~"kvbridge_.+"}')
    labels, unknown, queues = series(), [], set()
    for metric in (each["metric"] for each in found):
        own = {label: value for label, value in metric.items() if label not in ("__name__", "instance", "job")}
        assert own.keys() == labels[metric["__name__"]]
        known = {label: values(metric["__name__"], label) for label in own}
        unknown += [(metric, label) for label, few in known.items() if few is not None and own[label] not in few]
        if metric["__name__"] == "kvbridge_queue_length":
            queues.add((own["role"], own["awaits"]))
    assert not unknown and queues == QUEUES
    assert labels.keys() - {each["metric"]["__name__"] for each in found} == set()


def test_stages_are_parts_of_what_a_fetch_took(server: Server) -> None:
    """They are taken from the journal's entries, that time from the exchange."""
    found: dict[str, float] = {}
    end = time.monotonic() + 20  # until all four have been scraped
    while found.get("want_seconds_count", 0) < 4 and time.monotonic() < end:
        for name in ("stage_seconds_sum", "want_seconds_sum", "want_seconds_count"):
            role = '{role="receiver"}' if name.startswith("stage") else ""
            ((found[name]),) = (float(each["value"][1]) for each in server.query(f"sum(kvbridge_{name}{role})"))
        time.sleep(0.2)
    apart_s = abs(found["stage_seconds_sum"] - found["want_seconds_sum"])
    assert found["want_seconds_count"] >= 4 and apart_s < 0.01 * found["want_seconds_count"], found


def test_metrics_keep_prometheus_rules(server: Server) -> None:
    (target,) = server.query('topk(1, up{job="kvbridge"})')
    text = urllib.request.urlopen(f"http://{target['metric']['instance']}/metrics", timeout=5).read().decode()
    assert promtool("check", "metrics", given=text) == ""
    assert 'kvbridge_build_info{version="' in text
    assert "_created" not in text
