"""Plays millions of simulated schedules and records them: `python bench/simulate.py --first 0 --seeds 1000000`.

Adds a run to bench/results/sim.json, and writes it as it goes. A run that is stopped or killed keeps the batches that
were done (`seeds` are [first, count]). Another run at that commit must begin after them. Failing seeds do not stop it.
`python -m sim --first SEED --seeds 1` tells the story of one. Exits with 1 if any seed failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from record import RESULTS, machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sim.run import SimTally, many

PATH = RESULTS / "sim.json"
WRITE_EVERY_S = 10.0


def runs() -> list[dict[str, Any]]:
    return json.loads(PATH.read_text())["runs"] if PATH.exists() else []


def is_counted(before: list[dict[str, Any]], commit: str, first: int, count: int) -> bool:
    """Whether some of these seeds are already counted at this commit."""
    seeds = [each for run in before if run["commit"] == commit for each in run["seeds"]]
    return any(at < first + count and first < at + length for at, length in seeds)


def entry(about: dict[str, str], total: SimTally, seconds: float) -> dict[str, Any]:
    return {
        **about,
        "seeds": total.seeds,
        "schedules": total.runs,
        "events": total.events,
        "seconds": round(seconds, 1),
        "core_seconds": round(total.seconds, 1),
        "schedules_per_second_of_a_core": round(total.runs / total.seconds, 1) if total.seconds else None,
        "failed": len(total.failures),
        "failures": [{"seed": seed, "failure": text.partition("\n")[0]} for seed, text in sorted(total.failures)],
        "wants_ended": _by_times(total.ends),
        "faults": _by_times(total.faults),
    }


def _by_times(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda each: -each[1]))


def keep(all_runs: list[dict[str, Any]]) -> None:
    """Replace the file as a whole, so that it stays valid if we are killed."""
    by_commit: Counter[str] = Counter()
    for run in all_runs:
        by_commit[run["commit"]] += run["schedules"]
    total = {
        "schedules": by_commit.total(),
        "failed": sum(run["failed"] for run in all_runs),
        "schedules_by_commit": dict(by_commit),
    }
    PATH.parent.mkdir(parents=True, exist_ok=True)
    half = PATH.with_suffix(".json.new")
    half.write_text(json.dumps({"total": total, "runs": all_runs}, indent=1) + "\n")
    os.replace(half, PATH)


def run(first: int, count: int, jobs: int, about: dict[str, str], before: list[dict[str, Any]]) -> SimTally:
    """Play the seeds until all are done or we are stopped."""
    total, began = SimTally(), time.monotonic()
    written = began

    def write() -> None:
        now = time.monotonic()
        if total.runs:
            keep([*before, entry(about, total, now - began)])
        print(f"{total.runs} of {count} schedules, {len(total.failures)} failed, {now - began:.0f} s", flush=True)

    try:
        for tally in many(first, count, jobs):
            total.add(tally)
            for seed, text in tally.failures:
                print(f"seed {seed} failed: {text}", flush=True)
            if time.monotonic() - written > WRITE_EVERY_S:
                write()
                written = time.monotonic()
    finally:
        write()
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    said = parser.parse_args()
    about, before = machine(), runs()
    if is_counted(before, about["commit"], said.first, said.seeds):
        parser.error(f"some of these seeds are already counted at {about['commit']}: use a larger --first")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    total = run(said.first, said.seeds, said.jobs, about, before)
    return bool(total.failures)


if __name__ == "__main__":
    sys.exit(main())
