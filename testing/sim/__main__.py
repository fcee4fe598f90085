"""`python -m testing.sim`: plays thousands of simulated schedules, and tells the story of one that fails."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.record import machine
from kvbridge.commands.app import told

from .minimise import minimised
from .minimise import told as story_of
from .run import SimTally, many, play, prepared
from .scenario import as_text, make

SAY_EVERY_S = 30.0
MOST_FAILURES = 20  # of those that failed, after which no more schedules are played


def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many schedules.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, of about 300 MiB each.")] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="Play no longer than this.")] = float("inf"),
    out: Annotated[Path | None, typer.Option(help="Add the figures to this file, as bench/results/sim.json.")] = None,
    story: Annotated[int | None, typer.Option(min=0, help="Print everything that happens under this seed.")] = None,
) -> None:
    """Play faults, delays and late writes against simulated agents. Exits with 1 if anything broke, and says what.

    \b
    Examples:
      python -m testing.sim --seeds 100000 --jobs 2
      python -m testing.sim --first 33554432 --seeds 1000000 --jobs 32 --seconds 540 --out sim.json
      python -m testing.sim --story 4711
    """
    with told("sim"):
        if story is not None:
            tell(story)
        else:
            search(first, seeds, jobs, seconds, out)


def search(first: int, count: int, jobs: int = 1, seconds: float = float("inf"), out: Path | None = None) -> None:
    """Play seeds. If any fail, print the story of the first and exit with 1."""
    total, began = SimTally(), time.monotonic()
    say_at = began + SAY_EVERY_S
    with closing(many(first, count, jobs)) as tallies:
        for tally in tallies:
            total.add(tally)
            for seed, failure in tally.failures:
                typer.echo(f"seed {seed} failed: {failure}", err=True)
            now = time.monotonic()
            if now >= say_at:
                typer.echo(f"{total.runs} of {count}: {_summary(total, now - began)}", err=True)
                say_at = now + SAY_EVERY_S
            if now - began >= seconds or len(total.failures) >= MOST_FAILURES:
                break
    elapsed = time.monotonic() - began
    typer.echo(_summary(total, elapsed))
    if out is not None:
        keep(out, total, jobs, elapsed)
    if total.failures:
        seed, _ = min(total.failures)
        typer.echo(f"\nseed {seed}, made smaller:\n", err=True)
        with prepared() as listener:
            smaller, outcome = minimised(make(seed), listener)
        typer.echo(f"{story_of(smaller, outcome)}\n\nto keep: {as_text(smaller)}", err=True)
        raise typer.Exit(1)


def _summary(total: SimTally, elapsed: float) -> str:
    return (
        f"{total.runs} schedules, {total.events} events in {elapsed:.1f} s: {total.runs / elapsed:.0f} a second, "
        f"{total.runs / total.seconds:.0f} a second of a core's time; at most {total.most_memory_mib} MiB a process; "
        f"{len(total.failures)} failed"
    )


def keep(path: Path, total: SimTally, jobs: int, elapsed: float) -> None:
    """Add these runs to the file, with commit and machine."""
    found: dict[str, Any] = {"total": {"schedules": 0, "failed": 0, "schedules_by_commit": {}}, "runs": []}
    if path.exists():
        found = json.loads(path.read_text())
    about = machine()
    found["runs"].append(
        {
            **about,
            "jobs": jobs,
            "seeds": total.seeds,
            "schedules": total.runs,
            "events": total.events,
            "seconds": round(elapsed, 1),
            "core_seconds": round(total.seconds, 1),
            "schedules_per_second_of_a_core": round(total.runs / total.seconds, 1),
            "most_memory_mib": total.most_memory_mib,
            "failed": len(total.failures),
            "failures": [{"seed": seed, "failure": failure} for seed, failure in sorted(total.failures)],
            "wants_ended": dict(sorted(total.ends.items(), key=lambda end: -end[1])),
            "faults": dict(sorted(total.faults.items(), key=lambda fault: -fault[1])),
        }
    )
    sums, by_commit = found["total"], found["total"]["schedules_by_commit"]
    sums["schedules"] += total.runs
    sums["failed"] += len(total.failures)
    by_commit[about["commit"]] = by_commit.get(about["commit"], 0) + total.runs
    path.write_text(json.dumps(found, indent=1) + "\n")


def tell(seed: int) -> None:
    """Print everything that happens under one seed. Exits with 1 if it fails."""
    with prepared() as listener:
        scenario = make(seed)
        outcome = play(scenario, listener, is_told=True)
    typer.echo(story_of(scenario, outcome))
    if outcome.failure:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(sim)
