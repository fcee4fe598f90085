"""Keeps the event loop awake for a while after a message, so that it handles the next one at once.

A sleeping thread wakes late: its processor sleeps too, and its caches are cold. Messages come in chains (an offer, a
claim, a read), so one is usually followed by another soon.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

NAP_S = 5e-6  # lets other threads have the interpreter
IDLE_TURN_S = 3e-5  # a longer turn of the loop did some work: what follows is due at once, do not nap
TIMER_SLACK_NS = 1000
PR_SET_TIMERSLACK = 29  # linux/prctl.h


def nap_exactly() -> None:
    """Let naps of the calling thread, and of threads it starts, end on time and not 50 us later."""
    _set_slack(TIMER_SLACK_NS)


@contextmanager
def usual_naps() -> Iterator[None]:
    """Threads started inside this block do not nap exactly, although the calling thread does."""
    _set_slack(0)  # back to the thread's default
    try:
        yield
    finally:
        nap_exactly()


def _set_slack(nanoseconds: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


class Linger:
    """Keeps one loop awake for `seconds` after each `keep_awake`. With 0 the loop sleeps whenever it can."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = self._looked_at = 0.0
        self._is_looking = False

    def keep_awake(self) -> None:
        """Something has happened: stay awake from now on. Called on the loop."""
        if not self._seconds:
            return
        self._until = time.monotonic() + self._seconds
        if not self._is_looking:
            self._is_looking = True
            nap_exactly()
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Called again and again: a loop that has something to call does not sleep."""
        now = time.monotonic()
        self._is_looking = now < self._until
        if self._is_looking:
            if now - self._looked_at < IDLE_TURN_S:
                time.sleep(NAP_S)
            self._looked_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._look)
