"""Keeps the loop looking for a while after something has happened: what comes next finds it awake.

A thread that sleeps is late: its processor sleeps too, and comes back with cold caches. Requests come in chains (an
offer, a claim, a read), so who has just heard of one hears of it again soon.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

NAP_S = 5e-6  # others have the interpreter meanwhile
IDLE_TURN_S = 3e-5  # a turn of the loop that took longer did something, and what follows from that is due at once
TIMER_SLACK_NS = 1000
PR_SET_TIMERSLACK = 29  # linux/prctl.h


def nap_exactly() -> None:
    """For the calling thread and those that it starts: naps end when they should, and not 50 us later."""
    _set_slack(TIMER_SLACK_NS)


@contextmanager
def usual_naps() -> Iterator[None]:
    """Threads that are started meanwhile, by one that naps exactly, do not."""
    _set_slack(0)  # what this thread began with
    try:
        yield
    finally:
        nap_exactly()


def _set_slack(nanoseconds: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


class Linger:
    """Of one loop. With `seconds` 0 it sleeps whenever it can."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = self._looked_at = 0.0
        self._is_looking = False

    def stir(self) -> None:
        """Something has happened. On the loop."""
        if not self._seconds:
            return
        self._until = time.monotonic() + self._seconds
        if not self._is_looking:
            self._is_looking = True
            nap_exactly()
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """A loop that has something to call does not sleep."""
        now = time.monotonic()
        self._is_looking = now < self._until
        if self._is_looking:
            if now - self._looked_at < IDLE_TURN_S:
                time.sleep(NAP_S)
            self._looked_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._look)
