"""The socket between an engine rank and its agent: messages in order, and an end that both see."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvbridge_proto.engine import ToAgent, ToEngine

if TYPE_CHECKING:
    from .process import Process


LATE_S = 0.01  # how much later than due a message must be taken to count as late: the loop was frozen meanwhile


class Hearer(Protocol):
    """The engine's end."""

    def hear(self, socket: EngineSocket, message: ToEngine) -> None: ...
    def over(self, socket: EngineSocket) -> None: ...
    def at(self, when: float, event: Callable[[], None]) -> None: ...


class EngineSocket:
    """A `LocalConnection` to the agent, and a client to the engine (`say`, `hang_up`)."""

    pid = 0

    def __init__(self, process: Process, engine: Hearer) -> None:
        self._process = process
        self._engine = engine
        self._received: deque[ToAgent | None] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._arrived: deque[ToAgent | None] = deque()  # and not received yet
        self._unread = 0  # sent by the engine and not received yet
        self._down_at = self._up_at = 0.0
        self.is_closed = False  # the agent's end
        self.is_crashed = False  # closed by the kernel
        self._is_over = False

    # The agent:

    @property
    def is_silent(self) -> bool:
        return not (self._unread or self.is_closed or self._waiting is None or self._waiting.done())

    async def receive(self) -> tuple[ToAgent, list[int]] | None:
        while not self._received:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        message = self._received[0]
        if message is None:
            return None
        self._received.popleft()
        return message, []

    def send(self, message: ToEngine) -> None:
        if not self.is_closed and not self._process.is_dead:
            self._up(lambda: self._engine.hear(self, message))

    def close(self, why: str = "") -> None:
        if not self.is_closed:
            self.is_closed = True
            self._end()

    def end(self) -> None:
        """The agent's process is gone, and the kernel closes its end."""
        self.is_closed = self.is_crashed = True
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._up(lambda: self._engine.over(self))

    # The engine:

    def say(self, message: ToAgent) -> None:
        self._down(message)

    def hang_up(self) -> None:
        """Close the engine's direction, or all of it if the engine died."""
        self._down(None)

    def _down(self, message: ToAgent | None) -> None:
        world = self._process.world
        self._process.listen()
        self._unread += 1
        self._down_at = max(self._down_at, world.clock.now + world.quick())
        due = self._down_at
        self._process.loop.post_at(due, lambda: self._take(message, due))

    def _up(self, event: Callable[[], None]) -> None:
        world = self._process.world
        self._up_at = max(self._up_at, world.clock.now + world.quick())
        self._engine.at(self._up_at, event)

    def _take(self, message: ToAgent | None, due: float) -> None:
        """A loop that was frozen looks at its sockets in any order, so this one may come last."""
        world = self._process.world
        self._arrived.append(message)
        if world.scenario.is_pulled and world.clock.now - due > LATE_S and world.chance(0.5):
            self._process.loop.post(world.quick(), self._hand_over)
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        self._unread -= len(self._arrived)
        self._received.extend(self._arrived)
        self._arrived.clear()
        waiting: Any = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
