"""The engine that is attached now. Engines writes it; everyone else reads it, and sends to the engine through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbridge_proto.engine import ToEngine

from ..dataplane.attached import AttachedMemory
from ..exchange.session import AttachedEngine
from ..transport.local import LocalConnection


@dataclass(frozen=True, slots=True)
class Attachment:
    """One epoch of an engine: what sessions need of it, its memory, and its connection (None once it is leaving).

    `version` is that of the protocol which was agreed on with its adapter.
    """

    engine: AttachedEngine
    memory: AttachedMemory
    connection: LocalConnection | None
    version: int

    def __post_init__(self) -> None:
        epochs = self.engine.epoch, self.memory.epoch
        assert epochs[0] == epochs[1], f"epoch: {epochs[0]} of the engine, {epochs[1]} of its memory"


class CurrentEngine:
    """Runs on the loop. Everything is None while no engine is attached."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.attachment: Attachment | None
        self.engine: AttachedEngine | None
        self.memory: AttachedMemory | None
        self.connection: LocalConnection | None
        self.change(None)
        self._clock = clock

    def change(self, attachment: Attachment | None) -> None:
        """This one is attached from now on, or none. Another thread sees one or the other, and nothing between."""
        self.attachment = attachment
        self.engine = None if attachment is None else attachment.engine
        self.memory = None if attachment is None else attachment.memory
        self.connection = None if attachment is None else attachment.connection

    def hang_up(self) -> None:
        """The engine is leaving: send it nothing more. Its memory stays for moves under way."""
        if self.attachment is not None:
            self.change(replace(self.attachment, connection=None))

    def tell(self, message: ToEngine) -> None:
        """Send this to the engine, or drop it if none is connected: its requests concern nobody else."""
        if self.connection is not None:
            self.connection.send(message)

    def note_if_silent(self) -> None:
        """Note the time if we have read everything that the engine has sent so far."""
        now = self._clock()
        if self.memory is not None and self.connection is not None and self.connection.is_silent:
            self.memory.liveness.heard_at = now
