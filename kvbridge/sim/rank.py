"""One rank of a simulated engine: its memory, and the connection to its agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbridge_proto.engine import (
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
from kvbridge_proto.words import OURS

from .local import EngineSocket
from .matter import Blocks
from .pools import Rows, make_pool, rows_of

if TYPE_CHECKING:
    from .engine import Engine

RETRY_S = 0.3


class Rank:
    """One rank: its memory and its connection to its agent."""

    def __init__(self, engine: Engine, number: int, agent: str) -> None:
        self.engine = engine
        self.number = number
        self.agent = agent
        self.is_here = False
        self.blocks: Blocks
        self.rows: Rows
        self.marks = 0
        self.revision = 0
        self._socket: EngineSocket | None = None

    def begin(self) -> None:
        engine = self.engine
        pool = make_pool(engine.shape, engine.identity, self.number)
        self.blocks = Blocks(f"{engine.identity}.{self.number}", pool, engine.world.foul)
        self.rows = rows_of(pool)
        self.marks = self.revision = 0
        self.is_here, self._socket = False, None
        self._connect()

    def _connect(self) -> None:
        engine, process = self.engine, self.engine.world.processes.get(self.agent)
        if self._socket is not None:
            return
        if process is None or process.is_dead:
            engine.later(RETRY_S, self._connect)
            return
        self._socket = process.accept(self)
        self._attach()

    def _attach(self) -> None:
        assert self._socket is not None
        self.revision = 0
        fence = 0 if self.engine.world.has_fences else None
        self._socket.say(Attach(versions=OURS, pool=self.blocks.pool, handles=(), fence_fd=fence))

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
        """The agent hears that we go; blocks are ours again when its end is closed too."""
        self.is_here = False
        self.hang_up()

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
                self.is_here = True
                self.engine.here()
            case Detached():
                self.engine.gone(self)
                self._attach()
            case Refused(about="", code=code) if not self.is_here:
                self.engine.world.say(self.blocks.name, f"refused: {code}")
                self.engine.later(RETRY_S, self._again)
            case Refused(about=request, code="not_attached"):  # it is being stopped, and has let our memory go
                self.engine.answered(self, Released(request=request, code="not_attached"))
                self.engine.answered(self, Failed(request=request, code="not_attached", reason=""))
            case Refused(about=about, code=code):
                self.engine.world.foul(f"{self.blocks.name}: {about} was refused: {code}")
            case _:
                self.engine.answered(self, message)

    def _again(self) -> None:
        if self._socket is not None and not self.is_here:
            self._attach()

    def over(self, socket: EngineSocket) -> None:
        if socket is not self._socket:
            return
        socket.hang_up()
        self._socket, self.is_here = None, False
        self.engine.gone(self)
        self.engine.later(RETRY_S, self._connect)
