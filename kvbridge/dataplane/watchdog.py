"""The end of an agent whose mover's thread does not come back from what it has in hand.

Nothing takes a thread out of a driver's call, and while it is there its engine's memory is mapped and may be touched.
The end of the process is what unmaps it for sure, and what the engine sees; whoever keeps agents starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, TypeVar

log = logging.getLogger("kvbridge.mover")
T = TypeVar("T")

STUCK_S = 30.0  # what it may take at most: a kernel's compilation, slots made anew, on a busy host
LOOK_S = 0.25
STATUS = 3
FRAMES = 6


def end_process(reason: str) -> NoReturn:
    """At once: to end in order would wait for the thread, and give the lock back while it may still write."""
    log.error("ending the agent: code=mover_stuck %s", reason)
    os._exit(STATUS)


class Watchdog:
    """Of a thread that says `beat` while it is well, by those who wait for it."""

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
        self.beats = 0
        self._beat_at = clock()

    def beat(self) -> None:
        """On the thread."""
        self.beats += 1
        self._beat_at = self._clock()

    @property
    def still_s(self) -> float:
        """How long ago the last beat was."""
        return max(0.0, self._clock() - self._beat_at)

    async def until(self, done: Awaitable[T]) -> T:
        """What this gives, once it is done. Ends the process if the thread shows no life for so long meanwhile.

        Looks are counted, not seconds: a process that was stopped has not given its thread the time.
        """
        waiting = asyncio.ensure_future(done)
        beats, still = self.beats, 0
        try:
            while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
                beats, still = self.beats, still + 1 if beats == self.beats else 0
                if still * LOOK_S >= self.stuck_s:
                    self.end(f"no sign of life of its thread in {self.stuck_s:g} s")
            return waiting.result()
        finally:
            waiting.cancel()

    def end(self, reason: str) -> NoReturn:
        self._end(f"{reason}; it is at {_doing(self._thread)}")


def _doing(thread: threading.Thread) -> str:
    """The innermost places of its stack."""
    frame = sys._current_frames().get(thread.ident or 0)
    places = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    return " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(places)) or "its end"
