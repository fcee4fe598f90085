"""Writes one of the overlays again as a Helm chart: python deploy/kubernetes/chart.py OVERLAY FOLDER (`make chart`).

It needs kubectl and PyYAML. The resources are those of the overlay; VALUES names what a chart's user may set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
VERSION = re.findall(r'^version = "(.+)"$', (HERE.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)[0]
ROLES = ("prefill", "decode")
# Pods start again when their configuration changes: the names of ConfigMaps do not, unlike kustomize's.
CHECKSUM = "{{ list .Values.model .Values.dial .Values.netDevices | toJson | sha256sum }}"


@dataclass(frozen=True)
class Value:
    """One of values.yaml, and where it stands: in which resource (kind/name), and the keys that lead there.

    Instead of a number, EACH leads to each of a list.
    """

    name: str
    says: str
    places: tuple[tuple[str, tuple[str | int, ...]], ...]


def _of_both(*keys: str | int) -> tuple[tuple[str, tuple[str | int, ...]], ...]:
    return tuple((f"StatefulSet/{role}", ("spec", *keys)) for role in ROLES)


POD = ("template", "spec")
EACH = "*"
SCRAPED_FROM = ("spec", "ingress", 2, "from", 0, "namespaceSelector", "matchLabels")
VALUES = (
    Value("model", "Of all engines.", (("ConfigMap/engine", ("data", "model")),)),
    *(
        Value(f"{role}Replicas", f"How many {role} pods; the router is told each.", _of_both("replicas")[i : i + 1])
        for i, role in enumerate(ROLES)
    ),
    Value(
        "agentImage",
        "docs/kubernetes.md says how to build the images.",
        _of_both(*POD, "initContainers", EACH, "image"),
    ),
    Value("engineImage", "With kvbridge's adapter.", _of_both(*POD, "containers", 0, "image")),
    Value("routerImage", "", (("Deployment/router", ("spec", *POD, "containers", 0, "image")),)),
    Value("engineRequests", "Guesses for a model of 8B.", _of_both(*POD, "containers", 0, "resources", "requests")),
    Value("engineLimits", "", _of_both(*POD, "containers", 0, "resources", "limits")),
    Value(
        "modelStorage",
        "Of the volume with a pod's model; of the cluster's default class.",
        _of_both("volumeClaimTemplates", 0, "spec", "resources", "requests", "storage"),
    ),
    Value(
        "prometheusNamespace",
        "From where Prometheus may ask the agents.",
        (("NetworkPolicy/kvbridge", (*SCRAPED_FROM, "kubernetes.io/metadata.name")),),
    ),
)
# Lines of the agents' configuration file.
OPTIONS = (
    (
        "dial",
        "The pods' network and the agents' port, such as 10.244.0.0/16:7700 (:* if pods have several agents). If it is "
        "empty, agents dial nobody.",
    ),
    ("net_devices", "The pod's interface, as UCX names it."),
)


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, so that a value can stand in them."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def resources(overlay: str) -> list[dict[str, Any]]:
    """As kustomize builds them, without a namespace, and without the hash of its content in a ConfigMap's name."""
    command = ["kubectl", "kustomize", str(HERE / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = list(yaml.safe_load_all(text))
    for name in [each["metadata"]["name"] for each in found if each["kind"] == "ConfigMap"]:
        text = text.replace(name, name.rpartition("-")[0])
    found = list(yaml.safe_load_all(text))
    for each in found:
        each["metadata"].pop("namespace", None)
    return found


def write(overlay: str, folder: Path) -> None:
    """The chart, in a folder of its own. Its defaults are what the overlay has."""
    found = resources(overlay)
    values: list[tuple[str, str, Any]] = [(each.name, each.says, _replaced(found, each)) for each in VALUES]
    values += [(_camel(name), says, _option(found, name)) for name, says in OPTIONS]
    for each in found:
        if each["kind"] == "StatefulSet":
            each["spec"]["template"]["metadata"].setdefault("annotations", {})["checksum/configuration"] = (
                "<<CHECKSUM>>"
            )
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    chart = {"apiVersion": "v2", "name": "kvbridge", "version": VERSION, "appVersion": VERSION, "type": "application"}
    chart["description"] = f"Prefill and decode engines, each with its kvbridge agent: the overlay {overlay}"
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart, sort_keys=False))
    (folder / "values.yaml").write_text("".join(_documented(*each) for each in values))
    (folder / "values.schema.json").write_text(json.dumps(_schema(values), indent=1))
    for kind, text in _templates(found):
        (folder / "templates" / f"{kind}.yaml").write_text(text)


def _replaced(found: list[dict[str, Any]], value: Value) -> Any:
    """What stands where the value belongs, after its name has been put there."""
    before = None
    for place, keys in value.places:
        kind, name = place.split("/")
        reached: list[Any] = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        *outer, last = keys
        for key in outer:
            reached = [below for at in reached for below in (at if key == EACH else [at[key]])]
        for at in reached:
            assert before in (None, at[last]), f"{value.name} differs between its places"
            before, at[last] = at[last], f"<<{value.name}>>"
    return before


def _option(found: list[dict[str, Any]], name: str) -> Any:
    (file,) = (each["data"] for each in found if "agent.toml" in each.get("data", {}))
    line = re.compile(rf"^{name} = (.+)$", re.MULTILINE)
    (before,) = line.findall(file["agent.toml"])
    file["agent.toml"] = line.sub(f"{name} = <<{_camel(name)}>>", file["agent.toml"])
    return json.loads(before)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


def _documented(name: str, says: str, default: Any) -> str:
    return (f"# {says}\n" if says else "") + f"{name}: {json.dumps(default)}\n"


def _schema(values: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """So that a name that is not one is refused."""
    types = {str: "string", int: "integer", list: "array", dict: "object"}
    properties = {name: {"type": types[type(default)]} for name, _, default in values}
    return {"type": "object", "additionalProperties": False, "properties": {**properties, "global": {"type": "object"}}}


def _templates(found: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """A file for the resources of each kind."""
    for kind in sorted({each["kind"] for each in found}):
        text = yaml.dump_all(
            [each for each in found if each["kind"] == kind], Dumper=Dumper, sort_keys=False, width=1000
        )
        text = text.replace("{{", '{{ "{{" }}')  # those of alerts are Prometheus'
        for role in ROLES:
            text = re.sub(rf"(?:( *)- --{role}\n(?:\1- [^-\n].*\n)+)+", _for_each_pod, text)
        text = text.replace("<<CHECKSUM>>", CHECKSUM)
        yield kind.lower(), re.sub(r"'?<<(\w+)>>'?", r"{{ toJson .Values.\1 }}", text)


def _for_each_pod(options: re.Match[str]) -> str:
    """The options of a router that name one pod, for as many as there are."""
    indent, role = re.findall(r"^( *)- --(\w+)\n", options[0])[0]
    one = re.split(rf"(?=^{indent}- --)", options[0], flags=re.MULTILINE)[1]
    one = one.replace(f"{role}-0.", f"{role}-{{{{ $i }}}}.")
    return f"{indent}{{{{- range $i := until (int .Values.{role}Replicas) }}}}\n{one}{indent}{{{{- end }}}}\n"


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
