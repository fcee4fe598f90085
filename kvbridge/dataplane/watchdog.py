"""Ends the agent's process if the data plane's thread hangs.

Nothing can take a thread out of a driver call, and meanwhile the engine's memory is mapped and may be touched. Ending
the process unmaps it for certain, and the engine sees that. A supervisor then starts another agent.
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

log = logging.getLogger("kvbridge.data_plane")
T = TypeVar("T")

STUCK_S = 30.0  # longer than a task takes on a busy host, such as making new slots
WATCHDOG_LOOK_S = 0.25
EXIT_CODE = 3
FRAMES = 6


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
