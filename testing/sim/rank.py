"""One rank of a simulated engine: its memory, and the connection to its agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbridge_proto.common import OURS
from kvbridge_proto.engine import (
    READERS_S,
    Attach,
    Attached,
    Detach,
    Detached,
    Failed,
    Refused,
    Released,
    Rescale,
    ToAgent,
    ToEngine,
)

from .local import EngineSocket
from .matter import SimBlocks
from .pools import SimRows, make_pool, rows_of

if TYPE_CHECKING:
    from .engine import SimEngine

RETRY_S = 0.3
GONE_S = 0.03  # how long after its sockets closed a killed process is gone


class SimRank:
    """One rank: its memory and its connection to its agent, which it judges as adapters/engine/link.py does."""

    def __init__(self, engine: SimEngine, number: int, agent: str) -> None:
        self.engine = engine
        self.number = number
        self.agent = agent
        self.is_here = False
        self.blocks: SimBlocks
        self.rows: SimRows
        self.marks = 0
        self.revision = 0
        self._socket: EngineSocket | None = None
        self._is_ending = False
        self._has_let_go = True  # the agent said that it holds nothing of ours

    def begin(self) -> None:
        engine = self.engine
        pool = make_pool(engine.shape, engine.identity, self.number)
        self.blocks = SimBlocks(f"{engine.identity}.{self.number}", pool, engine.world.foul)
        self.rows = rows_of(pool)
        self.marks = self.revision = 0
        self.is_here, self._socket = False, None
        self._is_ending, self._has_let_go = False, True
        self._connect()

    def _connect(self) -> None:
        engine, process = self.engine, self.engine.world.processes.get(self.agent)
        if self._socket is not None:
            return
        if process is None or process.is_dead:
            engine.later(RETRY_S, self._connect)
            return
        self._socket, self._is_ending = process.accept(self), False
        self._attach()

    def _attach(self) -> None:
        assert self._socket is not None
        self.revision = 0
        fence = 0 if self.engine.world.has_fences else None
        takes_kept = self.engine.world.scenario.is_mutual and self.number == 0
        attach = Attach(versions=OURS, pool=self.blocks.pool, handles=(), fence_fd=fence, takes_kept=takes_kept)
        self._socket.say(attach)

    def say(self, message: ToAgent) -> bool:
        if self._socket is None or not self.is_here:
            return False
        self._socket.say(message)
        return True

    def hang_up(self) -> None:
        if self._socket is not None:
            self._socket.hang_up()

    def detach(self) -> None:
        if self.say(Detach()):
            self.is_here = False

    def give_up(self) -> None:
        """Tell the agent that we leave. Reads that end too late do not count; we wait for its writes."""
        if self._socket is None or self._is_ending:
            return
        socket = self._socket
        self.is_here, self._is_ending = False, True
        self.hang_up()
        self.engine.later(READERS_S, lambda: self.engine.unread(self) if self._socket is socket else None)

    def rescale(self) -> None:
        self.revision += 1
        self.say(Rescale(revision=self.revision, scales=()))

    def at(self, when: float, event: Callable[[], None]) -> None:
        self.engine.loop.post_at(when, event)

    def hear(self, socket: EngineSocket, message: ToEngine) -> None:
        if socket is not self._socket:
            return
        match message:
            case Attached():
                self.is_here, self._has_let_go = not self._is_ending, False
                self.engine.here()
            case Detached():
                self.is_here, self._has_let_go = False, True
                self.engine.gone(self)
                if not self._is_ending:
                    self._attach()
            case Refused(about="", number=0, code=code) if not self.is_here:
                self.engine.world.say(self.blocks.name, f"refused: {code}")
                self.engine.later(RETRY_S, self._again)
            case Refused(number=number, code="not_attached"):  # it is stopping, and has let go of our memory
                self.engine.answered(self, Released(number=number, request="", code="not_attached"))
                self.engine.answered(self, Failed(number=number, request="", code="not_attached", reason=""))
            case Refused(about=about, number=number, code=code):
                self.engine.world.foul(f"{self.blocks.name}: {about or number} was refused: {code}")
            case _:
                self.engine.answered(self, message)

    def _again(self) -> None:
        if self._socket is not None and not self.is_here:
            self._attach()

    def over(self, socket: EngineSocket) -> None:
        """The agent's end is closed. Unless it said before that it let go, it was killed and its kernels live on."""
        if socket is not self._socket:
            return
        socket.hang_up()
        self.is_here, self._is_ending = False, True
        shared_s = READERS_S if self.engine.world.scenario.is_pulled else 0.0
        if self._has_let_go or not shared_s:
            self.engine.unread(self)
        if self._has_let_go:
            self._end()
        elif not socket.is_crashed:
            self.engine.world.foul(f"{self.blocks.name}: its agent lives and has closed its end without a word")
        else:
            self.engine.later(GONE_S, lambda: self.engine.unwritten(self) if self._socket is socket else None)
            self.engine.later(max(GONE_S, shared_s), self._end)

    def _end(self) -> None:
        self._socket = None
        self._has_let_go = True
        self.engine.gone(self)
        self.engine.later(RETRY_S, self._connect)
