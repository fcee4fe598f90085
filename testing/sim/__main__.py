"""`python -m testing.sim`: plays thousands of simulated schedules, and tells the story of one that fails."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvbridge.commands.app import told

from .minimise import minimised
from .minimise import told as story_of
from .run import SimTally, many, play, prepared
from .scenario import as_text, make


def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many schedules.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    story: Annotated[int | None, typer.Option(min=0, help="Print everything that happens under this seed.")] = None,
) -> None:
    """Play faults, delays and late writes against simulated agents. Says what broke, if anything did.

    \b
    Examples:
      python -m testing.sim --seeds 100000 --jobs 2
      python -m testing.sim --story 4711
    """
    with told("sim"):
        if story is not None:
            tell(story)
        else:
            search(first, seeds, jobs)


def search(first: int, count: int, jobs: int) -> None:
    """Play seeds. If one fails, print its story and exit with 1."""
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
        typer.echo(f"{story_of(smaller, outcome)}\n\nto keep: {as_text(smaller)}", err=True)
        raise typer.Exit(1)


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
