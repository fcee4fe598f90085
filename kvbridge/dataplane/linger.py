"""Keeps the event loop awake for a while after a message, so that it handles the next one at once.

A sleeping thread wakes late: its processor sleeps too, and its caches are cold. Messages come in chains (an offer, a
claim, a read), so one is usually followed by another soon.
"""

from __future__ import annotations

import asyncio
import ctypes
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Lets other threads have the interpreter. What comes ends it, and so short a sleep is not deep.
LINGER_NAP_S = 5e-5
# A message that ended a nap is handled two turns later: its task is called, then the one that waits for the task.
TURNS_AWAKE = 4
FD_SETSIZE = 1024  # select takes no descriptors from here on; without one a nap just lasts its time
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
    """Keeps one loop awake for `seconds` after each `keep_awake`. With 0 the loop sleeps whenever it can.

    The loop naps in the kernel, where what comes wakes it at once. That needs uvloop; another loop just sleeps as long.
    """

    def __init__(self, seconds: float, nap_s: float = LINGER_NAP_S) -> None:
        self._seconds = seconds
        self._nap_s = nap_s
        self._until = 0.0
        self._is_looking = False
        self._turns = 0  # to go on without a nap

    def keep_awake(self) -> None:
        """Something has happened: stay awake from now on. Called on the loop."""
        if not self._seconds:
            return
        self._until = time.monotonic() + self._seconds
        self._turns = TURNS_AWAKE  # what came is handled first: no nap can see what already waits in the loop
        if not self._is_looking:
            self._is_looking = True
            nap_exactly()
            loop = asyncio.get_running_loop()
            backend = getattr(loop, "_get_backend_id", None)  # the descriptor of uvloop's epoll
            awaited = [] if backend is None or backend() >= FD_SETSIZE else [backend()]
            loop.call_soon(self._look, loop, awaited)

    def _look(self, loop: asyncio.AbstractEventLoop, awaited: list[int]) -> None:
        """Called again and again: a loop that has something to call does not sleep."""
        self._is_looking = time.monotonic() < self._until
        if not self._is_looking:
            return
        if self._turns:
            self._turns -= 1
        elif select.select(awaited, [], [], self._nap_s)[0]:
            self._turns = TURNS_AWAKE
        loop.call_soon(self._look, loop, awaited)
