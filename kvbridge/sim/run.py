"""Runs seeds, one after another or on several processes, and makes a failing one small."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from .memo import remembered
from .scenario import Scenario, make
from .world import Outcome, World

COLLECT_EVERY = 200  # runs; what a world leaves behind is in circles


class _Listener(logging.Handler):
    """What the agents log as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.heard.append(text)


@contextmanager
def prepared() -> Iterator[_Listener]:
    """No log but errors, no collection of garbage in the middle of a run, pure results kept."""
    listener, log = _Listener(), logging.getLogger("kvbridge")
    level, propagates, was_on = log.level, log.propagate, gc.isenabled()
    log.setLevel(logging.ERROR)
    log.propagate = False
    log.addHandler(listener)
    gc.disable()
    try:
        with remembered():
            yield listener
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
        log.propagate = propagates
        if was_on:
            gc.enable()


def play(scenario: Scenario, listener: _Listener, is_told: bool = False) -> Outcome:
    """One run; an error that was logged fails it as well."""
    listener.heard.clear()
    outcome = World(scenario, is_told).run()
    if listener.heard and not outcome.failure:
        outcome.failure = f"logged: {listener.heard[0]}"
    return outcome


def seeds(first: int, count: int) -> Iterator[tuple[int, Outcome]]:
    """The outcomes of `count` seeds."""
    with prepared() as listener:
        for seed in range(first, first + count):
            yield seed, play(make(seed), listener)
            if seed % COLLECT_EVERY == 0:
                gc.collect()
