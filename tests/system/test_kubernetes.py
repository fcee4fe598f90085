"""kubectl builds each overlay, Kubernetes' schemas accept it, and its pods start, carry and are probed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config import load
from kvbridge.transport.keys import write_pair
from tests.support import write_prometheus_rule
from tests.support.pods import START_S, Node, Pod, nodes, why_not

ROOT = Path(__file__).parents[2]
PODMONITOR = ROOT / ".podmonitor/node_modules"
KUBERNETES = ROOT / "deploy" / "kubernetes"
ROUTERS = (KUBERNETES.parents[1] / "docs" / "routers.md").read_text()
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
EXAMPLE = "example"  # somebody's own Deployment and LeaderWorkerSet, with the agent's component
RANKS = {("vllm-tp2", "prefill"): 2, (EXAMPLE, "prefill"): 2}  # of pods with more than one
VERSIONS = ("1.34", "1.37")  # the oldest with resource.k8s.io/v1, and the newest that the validator knows
OURS = ("prefill", "decode")
OF_OPERATORS = "monitoring.coreos.com/v1"  # not Kubernetes' own: operator_faults has its schemas
WORKER, LEADER = "prefill-0-1", "prefill-0.prefill.kvbridge"  # as a LeaderWorkerSet's controller names them
NETWORK = "10.77.0.0/29"  # of the pods that are started here
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (constraints.txt)")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not installed (constraints.txt)")
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    """The example, an overlay, or one with a component more: "overlay+component"."""
    name, _, component = overlay.partition("+")
    with tempfile.TemporaryDirectory() as folder:
        path = name if name == EXAMPLE else f"overlays/{name}"
        there = {"resources": path, **({"components": f"components/{component}"} if component else {})}
        text = {kind: [os.path.relpath(KUBERNETES / path, os.path.realpath(folder))] for kind, path in there.items()}
        Path(folder, "kustomization.yaml").write_text(yaml.dump(text))
        told = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return list(yaml.safe_load_all(told.stdout))


def named(overlay: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each for each in built(overlay) if each["kind"] == kind and each["metadata"]["name"].split("-")[0] == name
    ]
    return found


def workload(overlay: str, role: str) -> dict[str, Any]:
    own = {(EXAMPLE, "decode"): "Deployment", (EXAMPLE, "prefill"): "LeaderWorkerSet"}
    return named(overlay, "Deployment" if role == "router" else own.get((overlay, role), "StatefulSet"), role)


def pods_of(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Its template of a pod, or those of leader and worker."""
    spec = workload["spec"]
    both = spec.get("leaderWorkerTemplate", {})
    return [both["leaderTemplate"], both["workerTemplate"]] if both else [spec["template"]]


def pod(overlay: str, role: str) -> dict[str, Any]:
    return pods_of(workload(overlay, role))[0]


def container(overlay: str, role: str, name: str, number: int = 0) -> dict[str, Any]:
    spec = pods_of(workload(overlay, role))[number]["spec"]
    (found,) = [each for each in [*spec.get("initContainers", []), *spec["containers"]] if each["name"] == name]
    return dict(found)


def agents(overlay: str, role: str) -> list[str]:
    """The names of a pod's agents, in their order."""
    return ["agent", *(f"agent-{i}" for i in range(1, RANKS.get((overlay, role), 1)))]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", [*OVERLAYS, EXAMPLE])
def test_kubernetes_takes_the_overlay(overlay: str, version: str) -> None:
    left = []
    for resource in built(overlay):
        if resource["apiVersion"] == OF_OPERATORS:
            left.append(resource["kind"])
        elif resource["kind"] == "LeaderWorkerSet":
            for template in pods_of(resource):
                made = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}
                kubernetes_validate.validate(made, version, strict=True)
        else:
            kubernetes_validate.validate(resource, version, strict=True)
    assert left == ["PodMonitor", "PrometheusRule"]


def test_a_leader_worker_set_has_fields_that_its_controller_knows() -> None:
    """Those of leaderworkerset.x-k8s.io/v1, whose own schema cannot be installed."""
    made = workload(EXAMPLE, "prefill")
    spec, inner = made["spec"], made["spec"]["leaderWorkerTemplate"]
    assert (made["apiVersion"], set(spec)) == ("leaderworkerset.x-k8s.io/v1", {"replicas", "leaderWorkerTemplate"})
    assert set(inner) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert inner["restartPolicy"] in ("RecreateGroupOnPodRestart", "None") and spec["replicas"] == inner["size"] == 2


def operator_faults(resource: dict[str, Any]) -> str:
    """What the Prometheus operator's schema has against it, or ""."""
    if not PODMONITOR.is_dir():
        pytest.skip("no schemas of the Prometheus operator here: make .podmonitor/.ready (needs npm)")
    kind = resource["kind"]
    program = (
        f'import {{{kind}}} from "@kubernetes-models/prometheus-operator/{OF_OPERATORS}/{kind}";'
        f"new {kind}(JSON.parse(process.argv[1])).validate()"
    )
    command = ["node", "--input-type=module", "-e", program, json.dumps(resource)]
    told = subprocess.run(command, cwd=PODMONITOR.parent, capture_output=True, text=True)
    return told.stderr if told.returncode else ""


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
@pytest.mark.parametrize("overlay", [*OVERLAYS, EXAMPLE])
def test_the_operator_takes_what_is_its_own(overlay: str, kind: str) -> None:
    assert operator_faults(named(overlay, kind, "kvbridge")) == ""


def test_the_operators_schemas_see_wrong_values() -> None:
    monitor, rule = (
        json.loads(json.dumps(named("vllm", kind, "kvbridge"))) for kind in ("PodMonitor", "PrometheusRule")
    )
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = "fifteen"
    assert "interval" in operator_faults(monitor)
    rule["spec"]["groups"][0]["rules"][0]["for"] = "fifteen"
    assert "for" in operator_faults(rule)


def test_the_operators_alerts_are_fresh_and_those_of_prometheus() -> None:
    assert write_prometheus_rule.RULE.read_text() == write_prometheus_rule.text(), "make golden"
    assert named("vllm", "PrometheusRule", "kvbridge")["spec"] == yaml.safe_load(
        write_prometheus_rule.ALERTS.read_text()
    )


def test_the_schemas_see_a_wrong_field() -> None:
    wrong = json.loads(json.dumps(workload("vllm", "prefill")))
    wrong["spec"]["template"]["spec"]["initContainers"][0]["restartPolicies"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", OURS)
def test_the_agent_is_a_sidecar_that_sees_the_engine_and_its_gpu(overlay: str, role: str) -> None:
    sidecar, engine = (container(overlay, role, name) for name in ("agent", "engine"))
    spec = pod(overlay, role)["spec"]
    assert sidecar["restartPolicy"] == "Always" and spec["shareProcessNamespace"] is True
    shared = {"name": "run", "mountPath": "/run/kvbridge"}
    assert shared in sidecar["volumeMounts"] and shared in engine["volumeMounts"]
    if overlay.endswith("device-plugin"):
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1" and spec["nodeSelector"]
    else:
        claims = {"name": "gpu"}
        assert claims in sidecar["resources"]["claims"] and claims in engine["resources"]["claims"]
    named_socket = load_of(sidecar).socket.replace("-0", "-{rank}")
    assert named_socket in json.dumps(engine)


def load_of(sidecar: dict[str, Any]) -> Any:
    """The options that the sidecar's file and environment give."""
    return load(str(KUBERNETES / "components/agent/agent.toml"), environment=environment(sidecar, "10.1.2.3"))


def environment(sidecar: dict[str, Any], pod_ip: str) -> dict[str, str]:
    fields = {"status.podIP": pod_ip, "metadata.name": "prefill-0"}
    found: dict[str, str] = {}
    for each in sidecar["env"]:
        value = each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        found[each["name"]] = value.replace("$(POD_IP)", pod_ip)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_found_by_services_policies_and_prometheus(overlay: str) -> None:
    for role in OURS:
        labels = pod(overlay, role)["metadata"]["labels"]
        for name in (role, "router"):
            selector = named(overlay, "Service", name)["spec"]["selector"]
            assert (selector.items() <= labels.items()) == (name == role)
        ports = {port["name"] for name in ("agent", "engine") for port in container(overlay, role, name)["ports"]}
        monitor, policy = named(overlay, "PodMonitor", "kvbridge"), named(overlay, "NetworkPolicy", "kvbridge")
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports
        for selector in (monitor["spec"]["selector"], policy["spec"]["podSelector"]):
            assert selector.get("matchLabels", {}).items() <= labels.items()
            assert all(labels[each["key"]] in each["values"] for each in selector["matchExpressions"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_network_policy_lets_in_routers_to_engines_and_agents_to_agents(overlay: str) -> None:
    def is_chosen(selector: dict[str, Any], labels: dict[str, str]) -> bool:
        said = [labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])]
        return selector.get("matchLabels", {}).items() <= labels.items() and all(said)

    rules = named(overlay, "NetworkPolicy", "kvbridge")["spec"]["ingress"]
    for role, ports in (("router", {8000, 8998}), *((role, set()) for role in OURS)):
        labels = pod(overlay, role)["metadata"]["labels"]
        chosen = [each for each in rules if any(is_chosen(who.get("podSelector", {"matchLabels": {"": ""}}), labels)
                                                for who in each["from"])]  # fmt: skip
        assert [{port["port"] for port in each.get("ports", [])} for each in chosen] == [ports], role


@pytest.mark.parametrize(("role", "number"), [("prefill", 0), ("prefill", 1), ("decode", 0)])
def test_pods_of_ones_own_get_the_agent_of_the_overlays(role: str, number: int) -> None:
    """In a LeaderWorkerSet its leader and its worker."""
    assert container(EXAMPLE, role, "agent", number) == container("vllm", role, "agent")
    claims = [each["resources"]["claims"] for each in (container(EXAMPLE, role, "engine", number),
                                                       container("vllm", role, "engine"))]  # fmt: skip
    assert claims[0] == claims[1]
    template, ours = pods_of(workload(EXAMPLE, role))[number], pod("vllm", role)["spec"]
    own = template["spec"]
    for kept in ("shareProcessNamespace", "securityContext", "terminationGracePeriodSeconds"):
        assert own[kept] == ours[kept]
    names = {each["name"] for each in own["volumes"]}
    mounted = {each["name"] for each in [*own["initContainers"], *own["containers"]] for each in each["volumeMounts"]}
    assert names == mounted == {"run", "agent-cache", "agent-config", "key", "models"}
    labels = template["metadata"]["labels"]
    monitor = named(EXAMPLE, "PodMonitor", "kvbridge")["spec"]
    assert labels[monitor["jobLabel"]] == "kvbridge" and labels["kvbridge/role"] == role


@pytest.mark.parametrize(("overlay", "role"), RANKS)
def test_each_rank_of_a_pod_has_an_agent_of_its_own_and_a_gpu(overlay: str, role: str) -> None:
    count = RANKS[overlay, role]
    for number, template in enumerate(pods_of(workload(overlay, role))):
        engine, *sidecars = (container(overlay, role, name, number) for name in ("engine", *agents(overlay, role)))
        assert [each["name"] for each in template["spec"]["initContainers"]] == agents(overlay, role)
        own = [dict(re.findall(r"--(socket|listen|metrics|device)=(\S+)", " ".join(each["args"]))) for each in sidecars]
        assert own[1:] == [
            {"socket": f"/run/kvbridge/private/agent-{i}.sock", "listen": f"tcp://$(POD_IP):{7700 + i}",
             "metrics": f"$(POD_IP):{9400 + i}", "device": f"cuda:{i}"} for i in range(1, count)
        ]  # fmt: skip
        ports = [[port["containerPort"] for port in each["ports"]] for each in sidecars]
        assert ports == [[7700 + i, 9400 + i] for i in range(count)]
        like = {"args": None, "name": None, "ports": None}
        assert all({**each, **like} == {**sidecars[0], **like} for each in sidecars)
        claim = next(each for each in template["spec"]["resourceClaims"] if each["name"] == "gpu")
        (made,) = (each for each in built(overlay) if each["metadata"]["name"] == claim["resourceClaimTemplateName"])
        assert made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == count
        pods = len(pods_of(workload(overlay, role)))
        assert f"--tensor-parallel-size={count * pods}" in engine["args"]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_more_agents_follow_the_label(count: int, tmp_path: Path) -> None:
    """Their metrics ports are among those that the network policy lets Prometheus ask."""
    overlay, ranks = (os.path.relpath(KUBERNETES / each, tmp_path) for each in ("overlays/vllm", "components/ranks"))
    label = [{"op": "add", "path": "/metadata/labels/kvbridge~1ranks", "value": str(count)}]
    patches = [{"target": {"kind": "StatefulSet", "name": "decode"}, "patch": yaml.dump(label)}]
    (tmp_path / "labelled").mkdir()
    labelled = {"resources": [f"../{overlay}"], "patches": patches}
    (tmp_path / "labelled/kustomization.yaml").write_text(yaml.dump(labelled))
    (tmp_path / "kustomization.yaml").write_text(yaml.dump({"resources": ["labelled"], "components": [ranks]}))
    told = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    sets = [each for each in yaml.safe_load_all(told.stdout) if each["kind"] == "StatefulSet"]
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in sets}
    ports = [each["ports"][1]["containerPort"] for each in pods["decode"]["initContainers"]]
    assert ports == list(range(9400, 9400 + count)) and len(pods["prefill"]["initContainers"]) == 1
    assert pods["decode"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": f"kvbridge-gpus-{count}"}]
    (asked,) = named("vllm", "NetworkPolicy", "kvbridge")["spec"]["ingress"][2]["ports"]
    assert asked["port"] == min(ports) and asked["endPort"] == 9407


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_knows_each_pod_and_is_started_as_it_was_tested(overlay: str) -> None:
    """docs/routers.md has the command lines that `make test-routers` drives; addresses are the pods' own here."""
    router = container(overlay, "router", "router")
    said = " ".join([*router["command"], *router["args"]])
    said = re.sub(" --host=0.0.0.0 --port=30000$| --listen=0.0.0.0:30000$", "", said)
    for role in OURS:
        addresses = [f"{each}:8000" for each in pod_names(overlay, role)]
        options = re.findall(rf" --{role} \S+(?: \d+)?", said)
        assert [re.findall(r"http://(\S+)", each)[0] for each in options] == addresses and len(addresses) == 2
        said = said.replace("".join(options), options[0].replace(addresses[0], f"{role.upper()}:PORT"))
    assert said.replace("python3", "python") in re.sub(r"(?<=PREFILL:|.DECODE:)\d+", "PORT", ROUTERS).splitlines()


def pod_names(overlay: str, role: str) -> list[str]:
    """The names that DNS has of a StatefulSet's pods."""
    spec = workload(overlay, role)["spec"]
    return [f"{role}-{i}.{spec['serviceName']}" for i in range(spec["replicas"])]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", OURS)
def test_one_pod_of_a_role_may_be_disrupted_and_each_has_room_and_rank(overlay: str, role: str) -> None:
    budget, spec = named(overlay, "PodDisruptionBudget", role)["spec"], pod(overlay, role)["spec"]
    assert budget["selector"]["matchLabels"].items() <= pod(overlay, role)["metadata"]["labels"].items()
    assert budget["maxUnavailable"] == 1 < workload(overlay, role)["spec"]["replicas"]
    assert spec["priorityClassName"] == named(overlay, "PriorityClass", "kvbridge")["metadata"]["name"]
    for name in ("agent", "engine"):
        resources = container(overlay, role, name)["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"} and "memory" in resources["limits"]
    engine = container(overlay, role, "engine")
    (home,) = [each["value"] for each in engine["env"] if each["name"] == "HF_HOME"]
    (volume,) = [each["name"] for each in engine["volumeMounts"] if each["mountPath"] == home]
    assert volume in {each["metadata"]["name"] for each in workload(overlay, role)["spec"]["volumeClaimTemplates"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", OURS)
def test_nothing_has_to_run_before_the_agent(overlay: str, role: str) -> None:
    """kustomize puts what a patch names before all others, whatever the order of the base."""
    assert [each["name"] for each in pod(overlay, role)["spec"]["initContainers"]] == agents(overlay, role)


def files_of(overlay: str, key: str) -> dict[str, dict[str, str]]:
    """The files of each ConfigMap of an overlay, and of the Secret that docs/kubernetes.md has made of a key."""
    found = {each["metadata"]["name"]: each["data"] for each in built(overlay) if each["kind"] == "ConfigMap"}
    return {**found, "kvbridge-key": {"fleet.key": key}}


# Each component that patches the agent or its engine, and pods of one's own.
@pytest.mark.timeout(6 * START_S)
@pytest.mark.parametrize("overlay", ["vllm-device-plugin", "vllm-tp2", "sglang+engine-user", EXAMPLE])
def test_pods_start_in_the_manifests_order_carry_and_are_probed(overlay: str, tmp_path: Path) -> None:
    """Real agents and engines that stand in, each container as its user, with its mounts, environment and command."""
    if reason := why_not():
        pytest.skip(reason)
    write_pair(tmp_path / "fleet.key")
    files = files_of(overlay, (tmp_path / "fleet.key").read_text())
    (options,) = [each for each in files.values() if "agent.toml" in each]
    assert tomllib.loads(options["agent.toml"])["dial"] == [], "a network that may not be the pods'"
    options["agent.toml"] = options["agent.toml"].replace("dial = []", f'dial = ["{NETWORK}:*"]\nslot_bytes = 65536')
    with nodes(NETWORK) as (between,), ExitStack() as stack:
        pods = {
            name: made(between, tmp_path, overlay, name, files) for role in OURS for name in replicas(overlay, role)
        }
        between.services["prefill"] = [each.ip for name, each in pods.items() if name.startswith("prefill")]
        between.services[LEADER] = [pods["prefill-0"].ip]
        for each in pods.values():
            stack.callback(each.close)
        with ThreadPoolExecutor(2) as at_once:
            list(at_once.map(Pod.start, pods.values()))
        for each in pods.values():
            containers = [*agents(overlay, each.name.partition("-")[0]), "engine"]
            assert [name for name in each.running if name != "pause"] == containers
            assert all(each.passes(name, kind) for name in containers for kind in PROBES)
            assert can_read_the_key(each) == ("engine-user" not in overlay)
        until_met(between, pods["decode-0"], len(between.services["prefill"]))
        decode = pods["decode-0"]
        for name in replicas(overlay, "prefill"):
            if name != WORKER:
                carry(between, pods[name], decode)
        decode.kill("agent")
        assert not decode.passes("agent", "livenessProbe") and decode.passes("engine", "readinessProbe")
        decode.start_container("agent")  # as a kubelet does; the volumes are as they were


def replicas(overlay: str, role: str) -> list[str]:
    """Those that are started: in front of one decode pod both prefill pods of one overlay, one of the others.

    Of a LeaderWorkerSet, leader and worker.
    """
    names = {("vllm-device-plugin", "prefill"): ["prefill-0", "prefill-1"], (EXAMPLE, "prefill"): ["prefill-0", WORKER]}
    return names.get((overlay, role), [f"{role}-0"])


def made(between: Node, folder: Path, overlay: str, name: str, files: dict[str, dict[str, str]]) -> Pod:
    found = workload(overlay, name.partition("-")[0])
    claimed = [each["metadata"]["name"] for each in found["spec"].get("volumeClaimTemplates", [])]
    number = int(name == WORKER)
    of_controller = {"LWS_LEADER_ADDRESS": LEADER, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(number)}
    given = of_controller if found["kind"] == "LeaderWorkerSet" else {}
    return Pod(between, folder / name, name, pods_of(found)[number], files, claimed, given)


def carry(between: Node, prefill: Pod, decode: Pod) -> None:
    _, address = between.asked(f"http://{prefill.ip}:8000/offer", 30, "r")
    assert address.startswith(f"tcp://{prefill.ip}:7700#")
    said = json.dumps(["r", address])
    assert between.asked(f"http://{decode.ip}:8000/want", 60, said) == (200, ""), decode.log("agent")
    assert "kvbridge_engine_attached 1.0" in between.asked(f"http://{decode.ip}:9400/metrics", 5)[1]


def until_met(between: Node, decode: Pod, count: int) -> None:
    """Wait until its agent has met the prefill pods that the Service names, before a request names one."""
    end = time.monotonic() + START_S
    while (
        f'kvbridge_meet_agents{{state="met"}} {count}.0' not in between.asked(f"http://{decode.ip}:9400/metrics", 5)[1]
    ):
        assert time.monotonic() < end, decode.log("agent")
        time.sleep(0.2)


def can_read_the_key(pod: Pod) -> bool:
    """Whether a process that is the engine's user reads it through the agent's, in the PID namespace of both."""
    user, group, _ = pod._user(pod.container("engine"))
    (agent,) = Path(f"/proc/{(outer := pod.running['agent'].pid)}/task/{outer}/children").read_text().split()
    as_engine = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all"]
    key = f"/proc/{agent}/root/etc/kvbridge-key/fleet.key"
    return subprocess.run([*as_engine, "cat", key], capture_output=True).returncode == 0


def test_the_kubelet_probes_the_address_at_which_the_agent_serves() -> None:
    sidecar = container("vllm", "prefill", "agent")
    ports = {each["name"]: each["containerPort"] for each in sidecar["ports"]}
    for kind in ("startupProbe", "livenessProbe"):
        asked = sidecar[kind]["httpGet"]
        assert f"10.1.2.3:{ports[asked['port']]}" == load_of(sidecar).metrics and "host" not in asked
