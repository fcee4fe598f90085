"""Metrics, alerts and dashboard, by Prometheus itself: `make .prometheus/.ready` gets it from Debian's packages."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from kvbridge_proto.engine import Done, Failed

from .agent.harness import SyntheticEngine, agent
from .oracle import Shape, build

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
SCRAPE = ROOT / "deploy/prometheus/kvbridge.yml"
DASHBOARD = ROOT / "deploy/grafana/kvbridge.json"
OWN = ROOT / ".prometheus/usr/bin"
QUIET = {  # what a fleet that is well has no series of, or none above the threshold
    "kvbridge_prompt_tokens_computed_here_total",
    "kvbridge_refused_total",
    "kvbridge_rejected_messages_total",
    "kvbridge_failpoints_total",
    "kvbridge_spans_total",
}
LOOK_S = 30.0


def program(name: str) -> str:
    found = shutil.which(name, path=str(OWN)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make .prometheus/.ready")
    return found


def promtool(*arguments: str | Path, given: str = "") -> None:
    told = subprocess.run(
        [program("promtool"), *map(str, arguments)], input=given, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_alerts_are_rules_and_each_fires_in_its_case_alone() -> None:
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", ROOT / "tests/alerts_test.yml")
    tested = (ROOT / "tests/alerts_test.yml").read_text()
    for name in (line.split()[-1] for line in ALERTS.read_text().splitlines() if "alert:" in line):
        assert tested.count(name) >= 2, f"{name} is tested neither quiet nor firing"


def test_the_scrape_configuration_is_one() -> None:
    promtool("check", "config", SCRAPE)


def exprs() -> list[str]:
    """Of every panel of the dashboard, for all agents."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"].replace("$instance", ".*") for panel in panels for target in panel["targets"]]


def alerts() -> list[str]:
    """The expressions of all alerts."""
    lines, found = ALERTS.read_text().splitlines(), []
    for at, line in enumerate(lines):
        if line.strip().startswith("expr:"):
            said = line.partition("expr:")[2].strip()
            if said == "|":
                end = next(i for i in range(at + 1, len(lines)) if ":" in lines[i] and "by (" not in lines[i][:30])
                said = " ".join(lines[at + 1 : end])
            found.append(said)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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

    def query(self, expr: str) -> list[dict[str, Any]]:
        """What it has for an expression. Raises for one that is none."""
        address = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        answer = json.load(urllib.request.urlopen(address, timeout=5))
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has seen two agents carry some requests by slots, and one that failed."""
    program("prometheus")
    folder, ports = tmp_path_factory.mktemp("prometheus"), [free_port() for _ in range(2)]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent(folder, name, metrics=f"127.0.0.1:{port}", routes=routes))
            for name, port, routes in zip("pd", ports, ("nixl,pull", "nixl,pull"), strict=True)
        ]
        source, sink = (
            stack.enter_context(closing(SyntheticEngine(running, build(Shape("nhd", blocks=64))))) for running in agents
        )
        source.attach()
        sink.attach()
        server = stack.enter_context(closing(Server(folder, [f"127.0.0.1:{port}" for port in ports])))

        def carry(name: str) -> None:
            source.offer(name, list(range(64)), 1024)
            sink.want(name, source.agent.address, list(range(64)), range(1024))
            assert isinstance(sink.answer(name), Done)

        def fail(name: str) -> None:
            sink.want(name, "tcp://not an address", [1], range(16))
            assert isinstance(sink.answer(name), Failed)

        carry("first")
        fail("bad")
        server.wait("count(up == 1) == 2")
        server.wait('kvbridge_wants_total{outcome="bad_address"}')
        for number in range(3):
            carry(f"r{number}")
            fail(f"bad{number}")
        server.wait('rate(kvbridge_wants_total{outcome="bad_address"}[5m]) > 0')
        server.wait('rate(kvbridge_wants_total{outcome="done"}[5m]) > 0')
        yield server


@pytest.mark.parametrize("expr", exprs())
def test_every_query_of_the_dashboard_has_something_to_show(server: Server, expr: str) -> None:
    found = server.query(expr)
    assert found or any(name in expr for name in QUIET), "nothing to show"


@pytest.mark.parametrize("expr", alerts())
def test_every_alert_is_about_series_that_agents_have(server: Server, expr: str) -> None:
    server.query(expr)
    for name in set(part for part in _names(expr) if part not in QUIET):
        assert server.query(name), f"no agent has {name}"


def _names(expr: str) -> list[str]:
    words = "".join(c if c.isalnum() or c == "_" else " " for c in expr).split()
    return [word for word in words if word.startswith("kvbridge_")]


def test_stages_are_parts_of_what_a_fetch_took(server: Server) -> None:
    """They are taken from the journal's entries, that time from the exchange."""
    found = {}
    for name in ("stage_seconds_sum", "want_seconds_sum", "want_seconds_count"):
        role = '{role="sink"}' if name.startswith("stage") else ""
        ((found[name]),) = (float(each["value"][1]) for each in server.query(f"sum(kvbridge_{name}{role})"))
    apart_s = abs(found["stage_seconds_sum"] - found["want_seconds_sum"])
    assert found["want_seconds_count"] >= 4 and apart_s < 0.01 * found["want_seconds_count"], found


def test_metrics_keep_prometheus_rules(server: Server) -> None:
    (target,) = server.query('topk(1, up{job="kvbridge"})')
    text = urllib.request.urlopen(f"http://{target['metric']['instance']}/metrics", timeout=5).read().decode()
    promtool("check", "metrics", given=text)
    assert 'kvbridge_build_info{version="' in text
    assert "_created" not in text
