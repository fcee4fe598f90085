"""Writes figures to bench/results/NAME.json, with commit and machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def machine() -> dict[str, str]:
    """The commit, the processor, the day."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = f"{len(models)} x {models[0].partition(':')[2].strip()}" if models else platform.processor()
    day = datetime.date.today().isoformat()
    return {"commit": commit(), "cpu": cpu, "python": platform.python_version(), "day": day}


def commit() -> str:
    """The tree's commit, with a + if the tree differs from it. KVBRIDGE_COMMIT if the tree has no history."""
    if said := os.environ.get("KVBRIDGE_COMMIT"):
        return said
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.split("\n")
    is_changed = any(line and "bench/results" not in line for line in changed)
    return head + "+" * is_changed if head else "unknown"


def write(name: str, found: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write the figures. A later run of the same bench replaces them."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(), **found}, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path
