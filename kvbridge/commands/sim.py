"""`kvbridge sim`: simulated schedules by the thousand, and the story of one that fails."""

from __future__ import annotations

import time

import typer

from ..sim.minimise import minimised, told
from ..sim.run import SimTally, many, play, prepared
from ..sim.scenario import as_text, make


def run(first: int, count: int, jobs: int) -> None:
    """Play seeds; exit 1 with the story of the first that fails."""
    total, began = SimTally(), time.monotonic()
    for tally in many(first, count, jobs):
        total.add(tally)
        if total.failures:
            break
    elapsed = time.monotonic() - began
    typer.echo(
        f"{total.runs} schedules, {total.events} events in {elapsed:.1f} s: "
        f"{total.runs / total.seconds:.0f} schedules a second of a core's time; {len(total.failures)} failed"
    )
    most = sorted(total.ends.items(), key=lambda end: -end[1])[:12]
    typer.echo("wants ended: " + ", ".join(f"{end} {times}" for end, times in most))
    if total.failures:
        seed, failure = min(total.failures)
        typer.echo(f"\nseed {seed} failed: {failure}\nmade smaller:\n", err=True)
        with prepared() as listener:
            smaller, outcome = minimised(make(seed), listener)
        typer.echo(f"{told(smaller, outcome)}\n\nto keep: {as_text(smaller)}", err=True)
        raise typer.Exit(1)


def story(seed: int) -> None:
    """What happens under one seed, all of it."""
    with prepared() as listener:
        scenario = make(seed)
        outcome = play(scenario, listener, is_told=True)
    typer.echo(told(scenario, outcome))
    if outcome.failure:
        raise typer.Exit(1)
