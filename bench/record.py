"""Where every figure goes: bench/results/NAME.json, with the commit and the machine beside it."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, str]:
    """The commit (with a + if the tree differs from it), the processor, the day."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.split("\n")
    is_changed = any(line and "bench/results" not in line for line in changed)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = f"{len(models)} x {models[0].partition(':')[2].strip()}" if models else platform.processor()
    day = datetime.date.today().isoformat()
    return {"commit": commit + "+" * is_changed, "cpu": cpu, "python": platform.python_version(), "day": day}


def write(name: str, found: dict[str, Any]) -> None:
    """Keep what was measured; a later run of the same bench replaces it."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**machine(), **found}, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
