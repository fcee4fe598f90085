"""What deploy/ has for Prometheus and Grafana, and Prometheus' own programs, got by `make .prometheus/.ready`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
TESTS = ROOT / "tests/system/alerts_test.yml"
SCRAPE = ROOT / "deploy/prometheus/kvbridge.yml"
DASHBOARD = ROOT / "deploy/grafana/kvbridge.json"
OWN = ROOT / ".prometheus/usr/bin"


def program(name: str) -> str:
    """Its path. Skips where it is not."""
    found = shutil.which(name, path=str(OWN)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make .prometheus/.ready")
    return found


def promtool(*arguments: str | Path, given: str = "") -> str:
    """What it has against something, or ""."""
    command = [program("promtool"), *map(str, arguments)]
    told = subprocess.run(command, input=given, capture_output=True, text=True)
    return (told.stdout + told.stderr) if told.returncode else ""


def rules() -> dict[str, dict[str, Any]]:
    """Each alert by its name."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def cases() -> list[dict[str, Any]]:
    """The groups of promtool's tests of the alerts. The first is a fleet that is well."""
    return list(yaml.safe_load(TESTS.read_text())["tests"])


def jobs() -> frozenset[str]:
    """What the scrape configuration calls agents and proxies."""
    return frozenset(each["job_name"] for each in yaml.safe_load(SCRAPE.read_text())["scrape_configs"])


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def targets() -> list[tuple[str, str, str]]:
    """Title of the panel, expression and legend of each line that the dashboard draws."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]
