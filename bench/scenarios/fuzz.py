"""Adds up what `python -m tests.integration.fuzz --json LINES.jsonl` wrote.

For each target: the number of frames, their commit, rate and outcomes, and what grew. A run replaces an earlier one of
the same target, seed and commit. `--anew` drops all earlier runs.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench import record
from bench.scenario import Bench


def measure(bench: Bench, lines: list[Path], *, anew: bool = False) -> dict[str, Any]:
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in (*([] if anew else bench.earlier()), *(json.loads(line) for path in lines for line in path.open())):
        run["commit"] = run["commit"] or record.commit()
        runs[run["target"], run["commit"], run["seed"]] = run
    targets: Counter[str] = Counter()
    for run in runs.values():
        targets[run["target"]] += run["frames"]
    return {
        "frames": targets.total(),
        "crashes": sum(len(run["crashes"]) for run in runs.values()),
        "most_grown_kib": max(run["rss_end_kib"] - run["rss_start_kib"] for run in runs.values()),
        "frames_of_targets": dict(sorted(targets.items())),
        "runs": [run for _, run in sorted(runs.items(), key=lambda each: each[0])],
    }
