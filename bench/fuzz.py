"""Adds up the output of `python -m tests.integration.fuzz --json`: `python bench/fuzz.py LINES.jsonl...`.

Writes bench/results/fuzz.json. For each target it has the number of frames, their commit, rate and outcomes, and what
grew. A run replaces an earlier one of the same target, seed and commit. `--anew` drops all earlier runs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import record


def main() -> None:
    lines = [line for path in sys.argv[1:] if path != "--anew" for line in Path(path).read_text().splitlines()]
    known = record.RESULTS / "fuzz.json"
    before = [] if "--anew" in sys.argv or not known.exists() else json.loads(known.read_text())["runs"]
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in (*before, *map(json.loads, lines)):
        run["commit"] = run["commit"] or record.commit()
        runs[run["target"], run["commit"], run["seed"]] = run
    targets: Counter[str] = Counter()
    for run in runs.values():
        targets[run["target"]] += run["frames"]
    found = {
        "frames": targets.total(),
        "crashes": sum(len(run["crashes"]) for run in runs.values()),
        "most_grown_kib": max(run["rss_end_kib"] - run["rss_start_kib"] for run in runs.values()),
        "frames_of_targets": dict(sorted(targets.items())),
        "runs": [run for _, run in sorted(runs.items(), key=lambda each: each[0])],
    }
    record.write("fuzz", found)


if __name__ == "__main__":
    main()
