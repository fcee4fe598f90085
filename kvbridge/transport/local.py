"""The agent's unix socket for its engine and for commands. A connection ends when its engine dies."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from kvbridge_proto.codec import LIMITS, BadFrame, Decoder
from kvbridge_proto.engine import Detached, Number, ToAgent, ToEngine
from msgspec import Struct

from .framed import Connection
from .lock import Lock
from .unix import Server

MAX_CONNECTIONS = 64  # besides the engine's


@dataclass(frozen=True, slots=True)
class Unfit:
    """An offer or a want with a field out of bounds. The connection goes on, since its frame is whole."""

    kind: str
    number: int
    reason: str


class _Offer(Struct, tag="offer"):
    number: Number


class _Want(Struct, tag="want"):
    number: Number


_decoder: Decoder[_Offer | _Want] = Decoder(_Offer | _Want)


def unfit(frame: bytes | bytearray, error: BadFrame) -> Unfit | None:
    """What is wrong with an offer or a want whose number can be read; None for any other frame."""
    if error.code != "message_invalid":
        return None
    try:
        found = _decoder.decode(frame)
    except BadFrame:
        return None
    return Unfit("offer" if isinstance(found, _Offer) else "want", found.number, str(error)[:1024])


class LocalServer(Server["LocalConnection"]):
    """Listens beside the lock. Use as `async with`, then `accept` until cancelled. Entry raises OperatorError."""

    def __init__(self, lock: Lock, *, allowed_uids: Iterable[int] | None = None) -> None:
        super().__init__(lock.socket, frozenset([os.getuid(), *(allowed_uids or ())]), MAX_CONNECTIONS)

    def connection(self, accepted: socket.socket) -> LocalConnection:
        return LocalConnection(accepted, self.open)

    def is_kept(self, connection: LocalConnection) -> bool:
        return connection.is_engine


class LocalConnection(Connection[ToAgent | Unfit, ToEngine]):
    """One engine (or command) on the socket.

    Only `close` closes our end, whatever the other does: an engine waits for our last message (`Detached`), or if that
    does not come for the end of our process. `is_engine` from its attachment until its memory is let go.
    """

    is_engine = False

    def __init__(self, accepted: socket.socket, owner: set[LocalConnection]) -> None:
        super().__init__(accepted, ToAgent, LIMITS, owner, last_word=Detached, unfit=unfit)
