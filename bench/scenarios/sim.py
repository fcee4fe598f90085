"""Plays millions of simulated schedules: how many, how fast, what failed.

Adds a run to sim.json, and writes it as it goes. A run that is stopped or killed keeps the batches that were done
(`seeds` are [first, count]). Another run at that commit must begin after them. Failing seeds do not stop it.
`python -m testing.sim --first SEED --seeds 1` tells the story of one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from typing import Any

from bench.record import machine
from bench.scenario import Bench
from testing.sim.run import SimTally, many

WRITE_EVERY_S = 10.0


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


def totals(runs: list[dict[str, Any]]) -> dict[str, Any]:
    by_commit: Counter[str] = Counter()
    for run in runs:
        by_commit[run["commit"]] += run["schedules"]
    failed = sum(run["failed"] for run in runs)
    return {"schedules": by_commit.total(), "failed": failed, "schedules_by_commit": dict(by_commit)}


def measure(bench: Bench, *, first: int = 0, seeds: int = 1_000_000, jobs: int = os.cpu_count() or 1) -> None:
    """Play the seeds until all are done or we are stopped."""
    about, before, total = machine(), bench.earlier(), SimTally()
    if is_counted(before, about["commit"], first, seeds):
        sys.exit(f"some of these seeds are already counted at {about['commit']}: use a larger --first")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    written_s = 0.0

    def write() -> None:
        if total.runs:
            runs = [*before, entry(about, total, bench.spent_s)]
            bench.keep(totals(runs), runs)
        bench.say(f"{total.runs} of {seeds} schedules, {len(total.failures)} failed")

    try:
        for tally in many(first, seeds, jobs):
            total.add(tally)
            for seed, text in tally.failures:
                bench.problem(f"seed {seed}", text)
            if bench.spent_s - written_s > WRITE_EVERY_S:
                write()
                written_s = bench.spent_s
    finally:
        write()
