"""The agent's unix socket for its engine and for commands. A connection ends when its engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from kvbridge_proto.engine import Detached, Number, Refused, ToAgent, ToEngine
from kvbridge_proto.framing import LIMITS, BadFrame, Decoder
from msgspec import Struct

from ..errors import OperatorError
from ..values import Value
from .framed import Connection
from .lock import Lock

log = logging.getLogger("kvbridge.local")

C = TypeVar("C", bound=Connection[Any, Any])
MAX_CONNECTIONS = 64  # besides the engine's


def is_allowed(uid: int, allowed_uids: frozenset[int]) -> bool:
    """Whether a process of this user may speak to the agent. Root always may: it could read our memory anyway."""
    return uid == 0 or uid in allowed_uids


def file_of(found: os.stat_result) -> str:
    """Names a file among all of this kernel, for as long as it is there."""
    return f"{found.st_dev:x}.{found.st_ino:x}"


class Server(ABC, Generic[C]):
    """Listens at `path` for these users. Use as `async with`, then `accept` until cancelled.

    Any of them may open many connections and say nothing. So at most `most` are open that are not kept (`is_kept`), and
    the one that has been silent for longest makes room for the next.

    An existing socket is replaced: we hold the agent's lock, so it is a dead agent's. Raises OperatorError on entry.
    """

    def __init__(self, path: Path, allowed_uids: frozenset[int], most: int) -> None:
        self.path = path
        self.refused = 0
        self.open: set[C] = set()
        self._allowed = allowed_uids
        self._most = most
        self._socket: socket.socket | None = None
        self.file = ""  # which one our socket is, however its path is spelled or mounted; "" before it listens

    @abstractmethod
    def connection(self, accepted: socket.socket) -> C:
        """A connection over this socket, added to `open`."""

    @abstractmethod
    def is_kept(self, connection: C) -> bool:
        """Whether it makes room for no other."""

    async def __aenter__(self) -> Self:
        try:
            self._remove_stale()
            self._listen()
        except OSError as error:
            self._give_back()
            raise OperatorError("socket_unavailable", f"socket {self.path}: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self.open):
            connection.close("the agent stops")
            connection.shut()
        with contextlib.suppress(OSError):
            if file_of(self.path.lstat()) == self.file:
                self.path.unlink()
        self._give_back()

    async def accept(self) -> C:
        """The next connection that is let in. The others are told why not."""
        assert self._socket is not None, "accept() belongs inside `async with`"
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors, or the peer has left already
                log.warning("accept failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            connection = self.connection(accepted)
            if not is_allowed(connection.uid, self._allowed):
                self.refuse(connection, "uid_not_allowed", f"uid: {connection.uid}, allowed {set(self._allowed)}")
            else:
                self._make_room(connection)
                return connection

    def _make_room(self, newest: C) -> None:
        others = [each for each in self.open if each is not newest and not self.is_kept(each)]
        if len(others) >= self._most:
            longest = min(others, key=lambda each: each.silent_since)
            reason = f"connections: limit {self._most}, and this one was silent for longest"
            self.refuse(longest, "too_many_connections", reason)
            longest.shut()

    def refuse(self, connection: C, code: str, reason: str) -> None:
        """Tell it why, and close it."""
        self.refused += 1
        log.warning("refused pid=%d: %s", connection.pid, reason)
        connection.send(Refused(code=code, reasons=(reason,)))
        connection.close(code)

    def _remove_stale(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise OperatorError("socket_unavailable", f"socket {self.path}: there is something else")
            self.path.unlink()

    def _listen(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        os.fchmod(self._socket.fileno(), 0o600)  # Linux makes the file with the socket's own mode, less the umask
        self._socket.bind(os.fspath(self.path))
        self.file = self._set_mode(0o600 if self._allowed == {os.getuid()} else 0o666)
        self._socket.listen(self._most)

    def _set_mode(self, mode: int) -> str:
        """Set the mode of our socket, whatever the umask, and return which file it is. `accept` checks the uid.

        Uses a descriptor of the file itself: whoever may write in the folder could put a link in its place meanwhile.
        """
        fd = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.ESTALE, "something else took its place")
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)
        return file_of(found)

    def _give_back(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Unfit(Value):
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
