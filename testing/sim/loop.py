"""One clock for a whole world, and an asyncio loop for each of its processes. Deterministic, without threads or IO."""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import _set_running_loop, format_helpers
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from heapq import heappop, heappush
from typing import Any, cast

SPARE_TASKS = 16  # ended tasks that are kept before a look for them


class Clock:
    """A queue of events. Time jumps from one event to the next. Events of one moment keep their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._events: list[tuple[float, int, Callable[[], None], Thread | None]] = []
        self._count = 0

    def at(self, when: float, event: Callable[[], None], thread: Thread | None = None) -> None:
        """Let it happen then, on this thread, if it is one's: see `Thread.post`."""
        self._count = count = self._count + 1
        heappush(self._events, (when if when > self.now else self.now, count, event, thread))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, event, thread = heappop(events)
            self.happened += 1
            if thread is None or not (thread.is_frozen or thread.is_dead):
                event()
            elif thread.is_frozen:
                thread.held.append(event)
        self.now = until

    def stop(self) -> None:
        """Let nothing more happen."""
        self._events.clear()


class Thread:
    """A thread of a simulated process. While frozen it does nothing but misses nothing. Once dead it does nothing."""

    def __init__(self, clock: Clock) -> None:
        self.is_frozen = self.is_dead = False
        self.held: list[Callable[[], None]] = []  # what has happened to it since it was frozen
        self._clock = clock

    def post(self, seconds: float, event: Callable[[], None]) -> None:
        """Do this on the thread after so many seconds. Waits while the thread is frozen; dropped if it is dead."""
        self._clock.at(self._clock.now + seconds, event, self)

    def post_at(self, when: float, event: Callable[[], None]) -> None:
        """As `post`, at a given time. What is posted for the same time keeps its order."""
        self._clock.at(when, event, self)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        held, self.held = self.held, []
        for event in held:
            if self.is_frozen:
                self.held.append(event)
            elif not self.is_dead:
                event()

    def kill(self) -> None:
        self.is_frozen, self.is_dead = False, True
        self.held.clear()


class ProcessLoop(Thread):
    """The thread of the loop, with as much of an event loop as asyncio's tasks, futures and timers need.

    Nothing here looks at a context, so calls run in none.
    """

    def __init__(self, clock: Clock, on_error: Callable[[str], None]) -> None:
        super().__init__(clock)
        self.after_run: Callable[[], None] = lambda: None
        self._on_error = on_error
        self._ready: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_due = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._most_tasks = SPARE_TASKS  # after which the ended ones are looked for
        self.asyncio_s = cast(asyncio.AbstractEventLoop, self)

    def kill(self) -> None:
        """End all tasks. The caller has made sure that nothing they still say is heard."""
        super().kill()
        for task in self._tasks:
            task.cancel()
        self._turn()
        self._tasks.clear()

    # What asyncio calls:

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None) -> None:
        self._ready.append((callback, args))
        if not self._is_due and not self.is_dead:
            self._is_due = True
            self._clock.at(0.0, self._turn, self)

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self.asyncio_s, context)
        self._clock.at(when, partial(self._fire, handle), self)
        return handle

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append((_run, (handle,)))
            self._turn()

    def run_now(self, callback: Callable[[], None]) -> None:
        """Run this on the loop without waiting for a turn, as what watches a descriptor does."""
        _set_running_loop(self.asyncio_s)
        try:
            callback()
        finally:
            _set_running_loop(None)
        if not self.is_dead:
            self.after_run()

    def _turn(self) -> None:
        self._is_due = False
        self.run_now(self._run_ready)

    def _run_ready(self) -> None:
        ready = self._ready
        while ready:
            callback, args = ready.popleft()
            try:
                callback(*args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                source = format_helpers._format_callback_source(callback, args)
                self.call_exception_handler({"message": f"Exception in callback {source}", "exception": error})

    def time(self) -> float:
        return self._clock.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.asyncio_s)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None, **_: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self.asyncio_s, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._most_tasks = 2 * len(self._tasks) + SPARE_TASKS
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            self._on_error(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by asyncio. A cancelled timer fires without effect, so there is nothing to do."""


def _run(handle: asyncio.TimerHandle) -> None:
    if not handle.cancelled():
        handle._run()
