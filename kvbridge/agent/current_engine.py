"""The engine that is attached now. Engines writes it; all others read it here, and tell the engine through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbridge_proto.engine import ToEngine

from ..dataplane.attached import AttachedMemory
from ..exchange.session import AttachedEngine
from ..transport.local import LocalConnection
from .prompts import Prompts


@dataclass(frozen=True, slots=True)
class Attachment:
    """One epoch of an engine: what sessions are about, its memory, and its connection until it leaves."""

    engine: AttachedEngine
    memory: AttachedMemory
    connection: LocalConnection | None


class CurrentEngine:
    """Runs on the loop. Everything is None while no engine is attached."""

    def __init__(self, prompts: Prompts, clock: Callable[[], float]) -> None:
        self.attachment: Attachment | None = None
        self._prompts = prompts
        self._clock = clock

    @property
    def engine(self) -> AttachedEngine | None:
        return None if self.attachment is None else self.attachment.engine

    @property
    def memory(self) -> AttachedMemory | None:
        return None if self.attachment is None else self.attachment.memory

    @property
    def connection(self) -> LocalConnection | None:
        return None if self.attachment is None else self.attachment.connection

    def hang_up(self) -> None:
        """The engine is leaving: it is told nothing more, and its memory stays for what is under way."""
        if self.attachment is not None:
            self.attachment = replace(self.attachment, connection=None)

    def tell(self, message: ToEngine) -> None:
        """Send this to the engine. Dropped when there is none: nobody else hears of its requests."""
        if (connection := self.connection) is not None:
            connection.send(message)
            self._prompts.told(message, self._clock())

    def listen(self) -> None:
        """Note the time if we have heard all that the engine has said so far."""
        now = self._clock()
        if self.memory is not None and self.connection is not None and self.connection.is_silent:
            self.memory.liveness.heard_at = now
