"""Prometheus scrapes two agents and a proxy that everything has happened to. Every query of deploy/ finds something.

One agent is scraped by deploy/'s scrape configuration, the other as the Prometheus operator does for the PodMonitor.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from kvbridge_proto.engine import Computed, Done, Failed, Refused

from demo.processes import free_port
from kvbridge.failpoints import VARIABLE
from testing.agents import START_S, Client, OracleEngine, agent
from testing.nursery import Child, nursery
from testing.oracle import Shape, build
from testing.serving import Answers, listening
from testing.waiting import wait_for
from tests.integration.agent.test_spans import Collector
from tests.support.monitoring import ALERTS, SCRAPE, dashboard, program, promtool, rules, targets
from tests.support.promql import parsed, selectors
from tests.support.served_metrics import QUEUES, of_process, of_proxy, series, values
from tests.system.test_kubernetes import EXAMPLE, built, named, pod

LOOK_S = 30.0
NOWHERE = "tcp://not an address"
RULES = rules()
OF_TARGET = ("__name__", "instance", "job", "namespace", "pod", "kvbridge_role")  # Prometheus adds them to a scrape
HAPPENED = (  # two scrapes of the last of it: rates need two
    "kvbridge_failpoints_total",
    "kvbridge_refused_total",
    "kvbridge_rejected_messages_total",
    "kvbridge_prompt_tokens_computed_here_total",
    "kvbridge_spans_total",
    'kvbridge_wants_total{outcome="done"}',
    'kvbridge_wants_total{outcome="bad_address"}',
    'kvbridge_handshakes_total{role="receiver",outcome="peer_unreachable"}',
    'kvbridge_proxy_requests_total{outcome!="answered"}',
    "kvbridge_proxy_prefills_without_kv_total",
    "kvbridge_proxy_engine_failures_total",
)


def of_deploy(folder: Path, places: Mapping[str, str]) -> list[dict[str, Any]]:
    """deploy/'s own scrape configuration, with other addresses, which are read from files."""
    jobs = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    for job in jobs:
        del job["static_configs"], job["scrape_interval"]
        file = folder / f"{job['job_name']}.json"
        file.write_text(json.dumps([{"targets": [places[job["job_name"]]]}]))
        job["file_sd_configs"] = [{"files": [str(file)]}]
    return list(jobs)


def of_operator(folder: Path, place: str) -> dict[str, Any]:
    """What the Prometheus operator makes of the PodMonitor, for a pod of the example's leaders at this address."""
    monitor, labels = named(EXAMPLE, "PodMonitor", "kvbridge"), pod(EXAMPLE, "prefill")["metadata"]["labels"]
    spec, namespace = monitor["spec"], monitor["metadata"]["namespace"]
    name = f"{namespace}/{monitor['metadata']['name']}"
    found = {f"__meta_kubernetes_pod_label_{_sanitised(key)}": value for key, value in labels.items()}
    taken = [(_sanitised(each), _sanitised(each)) for each in spec.get("podTargetLabels", [])]
    taken += [(_sanitised(spec["jobLabel"]), "job")] if "jobLabel" in spec else []
    relabelled: list[dict[str, Any]] = [
        {"target_label": target, "replacement": value}
        for target, value in (("job", name), ("namespace", namespace), ("pod", "prefill-0"))
    ]
    relabelled += [
        {"source_labels": [f"__meta_kubernetes_pod_label_{source}"], "regex": "(.+)", "target_label": target}
        for source, target in taken
    ]
    file = folder / "pods.json"
    file.write_text(json.dumps([{"targets": [place], "labels": found}]))
    job = {"job_name": f"podMonitor/{name}/0", "file_sd_configs": [{"files": [str(file)]}]}
    return {**job, "relabel_configs": relabelled}


def of_kube_state_metrics(place: str) -> dict[str, Any]:
    """Its labels are kept, as with the charts that install it."""
    return {"job_name": "kube-state-metrics", "honor_labels": True, "static_configs": [{"targets": [place]}]}


class KubeStateMetrics(Answers):
    """What it says of the example's Deployment and LeaderWorkerSet, each scaled to `replicas`.

    The latter's controller makes a StatefulSet of leaders, and one of each leader's workers.
    """

    replicas: ClassVar[dict[str, int]] = {}

    def do_GET(self) -> None:
        lines = []
        for each in (each for each in built(EXAMPLE) if each["kind"] in ("Deployment", "LeaderWorkerSet")):
            name, labels = each["metadata"]["name"], f'namespace="{each["metadata"]["namespace"]}"'
            if each["kind"] == "Deployment":
                lines.append(f'kube_deployment_spec_replicas{{{labels},deployment="{name}"}} {self.replicas[name]}\n')
                continue
            for made in (name, *(f"{name}-{leader}" for leader in range(self.replicas[name]))):
                lines.append(f'kube_statefulset_replicas{{{labels},statefulset="{made}"}} {self.replicas[made]}\n')
        self.answer(200, "".join(lines))


def _sanitised(label: str) -> str:
    return re.sub(r"\W", "_", label)


class Server:
    """A Prometheus that scrapes each second, as these configurations say."""

    def __init__(self, folder: Path, scraped: list[dict[str, Any]]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        said = {"global": intervals, "rule_files": [str(ALERTS)], "scrape_configs": scraped}
        config.write_text(yaml.safe_dump(said))
        self._folder = folder
        self._log = (folder / "prometheus.log").open("wb")
        command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self.url.removeprefix('http://')}"], stderr=self._log
        )

    def ask(self, what: str, **query: str) -> Any:
        """What its API answers. Raises for a query that is none."""
        address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        answer = json.load(urllib.request.urlopen(address, timeout=60))
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

    def lose_targets(self) -> None:
        """From now on nothing is found to scrape."""
        for file in self._folder.glob("*.json"):
            file.write_text("[]")

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


@contextmanager
def fleet(folder: Path) -> Iterator[tuple[Server, OracleEngine, OracleEngine, str]]:
    """It scrapes the agents of a sender and a receiver, and the proxy at this address."""
    program("prometheus")
    ports = [free_port() for _ in range(2)]
    with ExitStack() as stack:
        collector = stack.enter_context(closing(Collector()))
        options: dict[str, Any] = {"routes": "nixl,pull", "otlp_endpoint": collector.endpoint}
        agents = []
        for name, port, failpoints in zip("pd", ports, ("", "sender.drained_sent=pause:0.1@1000"), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(os.environ, VARIABLE, failpoints)
                agents.append(stack.enter_context(agent(folder, name, metrics=f"127.0.0.1:{port}", **options)))
        sender, receiver = (
            stack.enter_context(closing(OracleEngine(running, build(Shape("nhd", blocks=64))))) for running in agents
        )
        sender.attach()
        receiver.attach()
        proxy = stack.enter_context(proxied(folder))
        places = {"kvbridge": f"127.0.0.1:{ports[0]}", "kvbridge-proxy": proxy}
        KubeStateMetrics.replicas = {"prefill": 1, "prefill-0": 0, "decode": 0}
        scraped = [*of_deploy(folder, places), of_operator(folder, f"127.0.0.1:{ports[1]}")]
        scraped += [of_kube_state_metrics(stack.enter_context(listening(KubeStateMetrics)))]
        server = stack.enter_context(closing(Server(folder, scraped)))
        server.wait('count(up{job=~"kvbridge|kvbridge-proxy"} == 1) == 3')
        yield server, sender, receiver, proxy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has seen two agents carry some requests by slots, and whatever else they count."""
    with fleet(tmp_path_factory.mktemp("prometheus")) as (server, sender, receiver, proxy):
        carry(sender, receiver, "first")
        goes_wrong(sender, receiver)
        server.wait('kvbridge_wants_total{outcome="done"} >= 1')  # what follows comes with a later scrape
        for number in range(3):
            complete(proxy, "fine")
            complete(proxy, "fail")
            carry(sender, receiver, f"r{number}")
            fail(receiver, f"nowhere{number}", NOWHERE)
        for each in HAPPENED:
            server.wait(f"count_over_time({each}[1m]) >= 2")
        server.wait('rate(kvbridge_wants_total{outcome="done"}[5m]) > 0')
        complete(proxy, "fail")  # the first failure made the series; a rate needs one more
        yield server


class EngineOfProxy(Answers):
    """A vLLM server that offers no KV, and fails a prompt that says so."""

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.body)
        if body["prompt"] == "fail":
            return self.answer(500, {"error": {"message": "it failed"}})
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        self.answer(200, {"id": "c", "object": "text_completion", "choices": [choice], "usage": {}})


@contextmanager
def proxied(folder: Path) -> Iterator[str]:
    """A proxy in front of an engine that is well and one that is not there. Its address."""
    with listening(EngineOfProxy) as engine:
        at, place = f"vllm=http://{engine}", f"127.0.0.1:{free_port()}"
        arguments = ["proxy", "--listen", place, "--prefill", at, "--decode", at]
        arguments += ["--decode", f"vllm=http://127.0.0.1:{free_port()}"]
        with (folder / "proxy.log").open("wb") as log:
            process = Child(nursery().fork("kvbridge.cli", arguments, (None, log.fileno(), log.fileno())))
        try:
            wait_for(lambda: complete(place, "fine") == 200, START_S)
            yield place
        finally:
            process.end()


def complete(place: str, prompt: str) -> int:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2}).encode()
    asked = urllib.request.Request(f"http://{place}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        return int(urllib.request.urlopen(asked, timeout=10).status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels[label[1]], legend)


def test_every_query_of_the_dashboard_has_something_to_show(server: Server) -> None:
    for title, expr, legend in targets():
        found = server.query(expr.replace("$instance", ".*").replace("$proxy", ".*"))
        assert found, f"{title}: nothing to show: {expr}"
        names = [_named(legend, each["metric"]) for each in found]
        assert len(names) == len(set(names)), f"{title}: lines that nobody can tell apart: {names}"


def test_the_variables_of_the_dashboard_find_the_agents(server: Server) -> None:
    queries = {each["name"]: each["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"}
    for name, found in (("instance", 2), ("proxy", 1)):
        selector, label = queries.pop(name).removeprefix("label_values(").removesuffix(")").split(", ")
        assert len(server.ask(f"label/{label}/values", **{"match[]": selector})) == found
    assert not queries


def test_every_alert_is_asked_whole_and_is_about_series_that_agents_have(server: Server) -> None:
    for name, rule in RULES.items():
        server.query(rule["expr"])
        for selector in selectors(parsed(rule["expr"])):
            assert server.query(selector.prettify()), f"{name}: no agent has {selector.prettify()}"


def test_prometheus_takes_every_alert_and_those_fire_that_should(server: Server) -> None:
    (group,) = server.ask("rules")["groups"]
    assert {each["name"]: each["health"] for each in group["rules"]} == dict.fromkeys(RULES, "ok")
    server.wait('ALERTS{alertname="KvbridgeFailpoints",alertstate="firing"}')
    server.wait('ALERTS{alertname="KvbridgeWantsFail",alertstate="pending"}')
    server.wait('ALERTS{alertname="KvbridgeProxyRequestsFail",alertstate="pending"}')
    server.wait('ALERTS{alertname="KvbridgeProxyEngineIll",alertstate="pending"}')
    others = 'alertname!~"KvbridgeFailpoints|KvbridgeProxyEngineIll"'
    assert not server.query(f'ALERTS{{{others},alertstate="firing"}}')


def test_what_agents_serve_is_what_queries_are_judged_by(server: Server) -> None:
    found = server.query('{__name__=~"kvbridge_.+|process_.+",job=~"kvbridge|kvbridge-proxy"}')
    labels, unknown, queues = series() | of_proxy() | of_process(), list[object](), set()
    for metric in (each["metric"] for each in found):
        own = {label: value for label, value in metric.items() if label not in OF_TARGET}
        assert own.keys() == labels[metric["__name__"]]
        known = {label: values(metric["__name__"], label) for label in own}
        unknown += [(metric, label) for label, few in known.items() if few is not None and own[label] not in few]
        if metric["__name__"] == "kvbridge_queue_length":
            queues.add((own["role"], own["awaits"]))
    assert not unknown and queues == QUEUES
    assert series().keys() - {each["metric"]["__name__"] for each in found} == set()


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
    text = urllib.request.urlopen(f"http://{target['metric']['instance']}/metrics", timeout=60).read().decode()
    assert promtool("check", "metrics", given=text) == ""
    assert 'kvbridge_build_info{version="' in text
    assert "_created" not in text


def test_an_agent_that_ends_and_agents_that_are_gone_raise_alarms(tmp_path: Path) -> None:
    """The labels are those of a real scrape, also of a pod's."""
    with fleet(tmp_path) as (server, sender, receiver, _):
        server.wait('kube_statefulset_replicas{statefulset="prefill"} == 1')
        assert {each["metric"]["job"] for each in server.query("up")} == {
            "kvbridge",
            "kvbridge-proxy",
            "kube-state-metrics",
        }
        missing = 'ALERTS{alertname="KvbridgeAgentsMissing",alertstate="pending",namespace="kvbridge"}'
        assert not server.query(missing)
        KubeStateMetrics.replicas["prefill-0"] = 1  # one pod more is wanted, and nobody finds it
        server.wait(missing)
        for engine in (sender, receiver):
            engine.agent.kill()
        server.wait('count(ALERTS{alertname="KvbridgeAgentDown",alertstate="pending"}) == 2')
        server.lose_targets()
        server.wait('ALERTS{alertname="KvbridgeAgentsGone",alertstate="pending"}')
