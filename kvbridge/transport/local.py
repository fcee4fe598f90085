"""The agent's unix socket for its engine and for commands. A connection ends when its engine dies."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from kvbridge_proto.codec import LIMITS, Limits
from kvbridge_proto.engine import Detached, ToAgent, ToEngine

from .framed import Connection
from .lock import Lock
from .unix import Server

MAX_CONNECTIONS = 64  # besides the engine's


class LocalServer(Server["LocalConnection"]):
    """Listens beside the lock. Use as `async with`, then `accept` until cancelled. Entry raises OperatorError."""

    def __init__(self, lock: Lock, *, allowed_uids: Iterable[int] | None = None, limits: Limits = LIMITS) -> None:
        super().__init__(lock.socket, frozenset([os.getuid(), *(allowed_uids or ())]), MAX_CONNECTIONS)
        self._limits = limits

    def connection(self, accepted: socket.socket) -> LocalConnection:
        return LocalConnection(accepted, self._limits, self.open)

    def is_kept(self, connection: LocalConnection) -> bool:
        return connection.is_engine


class LocalConnection(Connection[ToAgent, ToEngine]):
    """One engine (or command) on the socket.

    Only `close` closes our end, whatever the other does: an engine waits for our last message (`Detached`), or if that
    does not come for the end of our process. `is_engine` from its attachment until its memory is let go.
    """

    is_engine = False

    def __init__(self, accepted: socket.socket, limits: Limits, owner: set[LocalConnection]) -> None:
        super().__init__(accepted, ToAgent, limits, owner, last_word=Detached)
