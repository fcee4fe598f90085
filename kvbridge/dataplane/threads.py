"""How the agent's threads sleep, and who notices that the data plane's hangs.

A sleeping thread wakes late: its processor sleeps too, and what it has learnt is cold. Messages come in chains (an
offer, a claim, a read), so one is usually followed by another soon: the event loop stays awake for a while after a
message, and at first does not even nap.

Nothing can take a thread out of a driver call, and meanwhile the engine's memory is mapped and may be touched. So the
process ends if the data plane's thread hangs: that unmaps it for certain, and the engine sees it. A supervisor then
starts another agent.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

log = logging.getLogger("kvbridge.data_plane")
T = TypeVar("T")

STUCK_S = 30.0  # longer than a task takes on a busy host, such as making new slots
WATCHDOG_LOOK_S = 0.25
EXIT_CODE = 3
FRAMES = 6
# Lets other threads have the interpreter. What comes ends it, and so short a sleep is not deep.
LINGER_NAP_S = 5e-5
# After a message the next of its chain mostly follows within this time. Naps until then made wants of one block a tenth
# slower (NVIDIA H200, a virtual machine, 2026-11): each leaves the virtual machine, and what follows it is cold.
SPIN_S = 0.002
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

    At first, for SPIN_S, it only looks, unless `is_needed()`: another thread needs the interpreter. Else it naps in the
    kernel, where what comes wakes it at once. That needs uvloop; another loop just sleeps as long.
    """

    def __init__(
        self, seconds: float, nap_s: float = LINGER_NAP_S, is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        self._seconds = seconds
        self._nap_s = nap_s
        self._is_needed = is_needed
        self._until = self._spins_until = 0.0
        self._is_looking = False
        self._turns = 0  # to go on without a nap

    def keep_awake(self) -> None:
        """Something has happened: stay awake from now on. Called on the loop."""
        if not self._seconds:
            return
        now = time.monotonic()
        self._until, self._spins_until = now + self._seconds, now + min(SPIN_S, self._seconds)
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
        now = time.monotonic()
        self._is_looking = now < self._until
        if not self._is_looking:
            return
        if self._turns:
            self._turns -= 1
        elif (now >= self._spins_until or self._is_needed()) and select.select(awaited, [], [], self._nap_s)[0]:
            self._turns = TURNS_AWAKE
        loop.call_soon(self._look, loop, awaited)


def end_process(reason: str) -> NoReturn:
    """Exit at once. An orderly end would wait for the thread, and release the agent's lock while it may still write."""
    log.error("ending the agent: code=data_plane_stuck %s", reason)
    os._exit(EXIT_CODE)


class Watchdog:
    """Watches a thread that calls `beat` while it is well, for callers that wait for it."""

    def __init__(
        self,
        thread: threading.Thread,
        stuck_s: float,
        end: Callable[[str], NoReturn],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stuck_s = stuck_s
        self._clock = clock
        self._thread = thread
        self._end = end
        self.beats = 0  # grows while the thread lives: at least once a second, or after its present task
        self._beat_at = clock()

    def beat(self) -> None:
        """Show life. Called on the thread."""
        self.beats += 1
        self._beat_at = self._clock()

    @property
    def still_s(self) -> float:
        """Seconds since the last beat."""
        return max(0.0, self._clock() - self._beat_at)

    async def until(self, done: Awaitable[T]) -> T:
        """Await `done` and return its result. Ends the process if the thread does not beat for `stuck_s` meanwhile.

        Checks are counted, not seconds: while the process was stopped, its thread could not run either.
        """
        waiting = asyncio.ensure_future(done)
        beats, still = self.beats, 0
        try:
            while not (await asyncio.wait({waiting}, timeout=WATCHDOG_LOOK_S))[0]:
                beats, still = self.beats, still + 1 if beats == self.beats else 0
                if still * WATCHDOG_LOOK_S >= self.stuck_s:
                    self.end(f"no sign of life of its thread in {self.stuck_s:g} s")
            return waiting.result()
        finally:
            waiting.cancel()

    def end(self, reason: str) -> NoReturn:
        self._end(f"{reason}; it is at {_doing(self._thread)}")


def _doing(thread: threading.Thread) -> str:
    """The innermost frames of its stack, for the log."""
    frame = sys._current_frames().get(thread.ident or 0)
    places = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    return " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(places)) or "its end"
