"""Runs scenarios: one, many one after another, or many in several processes."""

from __future__ import annotations

import gc
import logging
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from .memo import remembered
from .scenario import Scenario, make
from .world import ScenarioOutcome, World

COLLECT_EVERY = 50  # runs; the objects of a world refer to each other, so they need garbage collection
BATCH = 500  # seeds that a process takes at a time, with caches of their own, which grow
PART = 100  # seeds after which a process tells what it found


class SimListener(logging.Handler):
    """Keeps the errors that agents log, but for refusals that are promised: `SimResources` judges those."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "code=rebuild_refused" in text:
            return
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.heard.append(text)


@contextmanager
def prepared() -> Iterator[SimListener]:
    """Log only errors, collect no garbage in the middle of a run, cache the results of pure functions."""
    listener, log = SimListener(), logging.getLogger("kvbridge")
    level, propagates, was_on, was_frozen = log.level, log.propagate, gc.isenabled(), gc.get_freeze_count()
    log.setLevel(logging.ERROR)
    log.propagate = False
    log.addHandler(listener)
    gc.disable()
    if not was_frozen:
        gc.freeze()  # collections skip torch's hundred thousand objects
    try:
        with remembered():
            yield listener
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
        log.propagate = propagates
        if not was_frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()


def play(scenario: Scenario, listener: SimListener, is_told: bool = False) -> ScenarioOutcome:
    """One run. A logged error fails it too, and is added to any other failure as its cause."""
    listener.heard.clear()
    outcome = World(scenario, is_told).run()
    if listener.heard:
        outcome.failure = "; ".join(filter(None, (outcome.failure, f"logged: {listener.heard[0]}")))
    return outcome


def outcomes(first: int, count: int) -> Iterator[tuple[int, ScenarioOutcome]]:
    """The outcomes of `count` seeds from `first` on."""
    with prepared() as listener:
        yield from _outcomes(first, count, listener)


def _outcomes(first: int, count: int, listener: SimListener) -> Iterator[tuple[int, ScenarioOutcome]]:
    for seed in range(first, first + count):
        yield seed, play(make(seed), listener)
        if seed % COLLECT_EVERY == 0:
            gc.collect()


@dataclass(slots=True)
class SimTally:
    """The sums of many runs."""

    seeds: list[tuple[int, int]] = field(default_factory=list)  # ranges: first seed, count
    runs: int = 0
    events: int = 0
    seconds: float = 0.0  # processor time of all processes
    most_memory_mib: int = 0  # that one process had
    failures: list[tuple[int, str]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)  # how wants ended, and how often
    faults: dict[str, int] = field(default_factory=dict)  # what went wrong, and how often

    def add(self, other: SimTally) -> None:
        self.seeds = _joined([*self.seeds, *other.seeds])
        self.runs += other.runs
        self.events += other.events
        self.seconds += other.seconds
        self.most_memory_mib = max(self.most_memory_mib, other.most_memory_mib)
        self.failures += other.failures
        for ours, theirs in ((self.ends, other.ends), (self.faults, other.faults)):
            for what, times in theirs.items():
                ours[what] = ours.get(what, 0) + times


def _joined(seeds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for first, count in sorted(seeds):
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return found


def tallies(batch: tuple[int, int]) -> Iterator[SimTally]:
    """Run a range of seeds in this process, and yield what each part of it comes to."""
    with prepared() as listener:
        for part in ranges(*batch, PART):
            yield _tallied(part, listener)


def _tallied(part: tuple[int, int], listener: SimListener) -> SimTally:
    """Counts processor time: what waits for other load on the machine does not count."""
    tally, began = SimTally([part]), time.process_time()
    for seed, outcome in _outcomes(*part, listener):
        tally.runs += 1
        tally.events += outcome.events
        if outcome.failure:
            tally.failures.append((seed, outcome.failure))
        for _, end in outcome.ends.values():
            tally.ends[end] = tally.ends.get(end, 0) + 1
        for kind in outcome.faults:
            tally.faults[kind] = tally.faults.get(kind, 0) + 1
    tally.seconds = time.process_time() - began
    tally.most_memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return tally


def many(first: int, count: int, jobs: int) -> Generator[SimTally, None, None]:
    """Run all of these seeds in `jobs` processes. Yields what parts of them come to, as they are done."""
    if jobs == 1:
        for batch in ranges(first, count, BATCH):
            yield from tallies(batch)
        return
    heard: queue.Queue[SimTally | None] = queue.Queue()
    ours = [sys.executable, "-m", "testing.sim.run", str(first), str(count), str(jobs)]
    workers = [subprocess.Popen([*ours, str(job)], stdout=subprocess.PIPE, text=True) for job in range(jobs)]
    listeners = [threading.Thread(target=_listen, args=(worker, heard), daemon=True) for worker in workers]
    try:
        for listener in listeners:
            listener.start()
        left = jobs
        while left:
            if (tally := heard.get()) is None:
                left -= 1
            else:
                yield tally
        if any(worker.wait() for worker in workers):
            raise RuntimeError("a process of the simulator ended early; it said why")
    finally:
        for worker in workers:
            worker.kill()


def ranges(first: int, count: int, most: int) -> Iterator[tuple[int, int]]:
    return ((at, min(most, first + count - at)) for at in range(first, first + count, most))


def _listen(worker: subprocess.Popen[str], heard: queue.Queue[SimTally | None]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        heard.put(msgspec.json.decode(line, type=SimTally))
    heard.put(None)


def main() -> None:
    """One of several processes: runs every n-th batch, and prints a line of JSON for each part of it."""
    first, count, jobs, job = map(int, sys.argv[1:])
    for batch in islice(ranges(first, count, min(BATCH, -(-count // jobs))), job, None, jobs):
        for tally in tallies(batch):
            print(msgspec.json.encode(tally).decode(), flush=True)


if __name__ == "__main__":
    main()
