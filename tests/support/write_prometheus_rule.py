"""Writes deploy/'s alerts for Prometheus again as a PrometheusRule, which the Prometheus operator reads."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
RULE = ROOT / "deploy/kubernetes/components/prometheus-operator/alerts.yaml"
HEAD = """\
# deploy/prometheus/alerts.yml, written here by make golden.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvbridge
spec:
"""


def text() -> str:
    """The whole file."""
    return HEAD + indent(ALERTS.read_text(), "  ")


if __name__ == "__main__":
    RULE.write_text(text())
