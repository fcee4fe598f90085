"""Adds up what long fuzzing found: `python bench/fuzz.py COMMIT=LINES.jsonl...`, of `python -m tests.fuzz --json`.

Writes bench/results/fuzz.json: of each target how many frames at which commit, how fast, what came of it, what grew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import record


def main() -> None:
    runs: list[dict[str, Any]] = []
    for said in sys.argv[1:]:
        commit, _, path = said.partition("=")
        runs += [{**json.loads(line), "commit": commit} for line in Path(path).read_text().splitlines()]
    found = {
        "frames": sum(run["frames"] for run in runs),
        "crashes": sum(len(run["crashes"]) for run in runs),
        "most_grown_kib": max(run["rss_end_kib"] - run["rss_start_kib"] for run in runs),
        "runs": sorted(runs, key=lambda run: (run["target"], run["commit"], run["seed"])),
    }
    record.write("fuzz", found)


if __name__ == "__main__":
    main()
