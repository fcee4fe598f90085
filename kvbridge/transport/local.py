"""The agent's unix socket to its engine: framed messages, file descriptors beside them, EOF when the engine dies.

Whose descriptors are whose: a frame that carries descriptors is sent by a `sendmsg` of its own, and they ride with its
first byte. The kernel never joins the bytes behind a descriptor-carrying send to it, so on the receiving side the
descriptors belong to the last frame that begins in the bytes they came with. Those of `Descriptors` frames go to the
message behind them.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
import struct
from collections import deque
from collections.abc import Iterable

from kvbridge_proto.codec import LIMITS, BadFrame, Limits
from kvbridge_proto.engine import Descriptors, Detached, Refused, ToAgent, ToEngine
from kvbridge_proto.stream import FRAME_FDS, MESSAGE_FDS, StreamReader, pack

from ..errors import OperatorError
from .lock import Lock

log = logging.getLogger("kvbridge.local")

MAX_CONNECTIONS = 64
RECEIVE_BYTES = 1 << 18
UNSENT_BYTES = 32 << 20
_CREDENTIALS = struct.Struct("iII")


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that nobody took."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def is_allowed(uid: int, allowed_uids: frozenset[int]) -> bool:
    """Whether a process of this user may speak to the agent; root always may, it could read our memory anyway."""
    return uid == 0 or uid in allowed_uids


class LocalServer:
    """Listens on a unix socket. Use as `async with`, then `accept` until cancelled.

    Who has its lock may: a dead agent's socket is replaced. Raises OperatorError on entry.
    """

    def __init__(
        self,
        lock: Lock,
        *,
        allowed_uids: Iterable[int] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.path = lock.socket
        self.refused = 0
        self._allowed = frozenset([os.getuid(), *(allowed_uids or ())])
        self._limits = limits
        self._open: set[LocalConnection] = set()
        self._socket: socket.socket | None = None
        self._inode = 0

    async def __aenter__(self) -> LocalServer:
        try:
            self._remove_stale()
            self._listen()
        except OSError as error:
            self._give_back()
            raise OperatorError("socket_unavailable", f"socket {self.path}: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._open):
            connection.close("the agent stops")
            connection.shut()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        self._give_back()

    async def accept(self) -> LocalConnection:
        """The next engine or command that may speak; the others are told why not."""
        assert self._socket is not None, "accept() belongs inside `async with`"
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors, or the peer was gone again
                log.warning("accept failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            connection = LocalConnection(accepted, self._limits, self._open)
            if not is_allowed(connection.uid, self._allowed):
                self._refuse(
                    connection, "uid_not_allowed", f"uid: yours {connection.uid}, allowed {set(self._allowed)}"
                )
            elif len(self._open) > MAX_CONNECTIONS:
                self._refuse(connection, "too_many_connections", f"connections: limit {MAX_CONNECTIONS}")
            else:
                return connection

    def _refuse(self, connection: LocalConnection, code: str, reason: str) -> None:
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
        self._inode = self._set_mode(0o600 if self._allowed == {os.getuid()} else 0o666)
        self._socket.listen(MAX_CONNECTIONS)

    def _set_mode(self, mode: int) -> int:
        """Give our socket its mode, whatever the umask; others are let in, or not, by their uid. Its inode.

        By a descriptor of the file itself: who may write in the folder could put a link in its place meanwhile.
        """
        fd = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.ESTALE, "something else took its place")
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)
        return found.st_ino

    def _give_back(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class LocalConnection:
    """One engine (or command) on the socket. One task receives; anyone on the loop may send.

    Only `close` closes our end, whatever the other does: an engine waits for what we say last (`Detached`), and if it
    does not come for the end of our process.
    """

    def __init__(self, accepted: socket.socket, limits: Limits, owner: set[LocalConnection]) -> None:
        accepted.setblocking(False)
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, self.gid = _CREDENTIALS.unpack(credentials)
        self.why = ""
        self._socket = accepted
        self._fd = accepted.fileno()
        self._loop = asyncio.get_running_loop()
        self._reader = _FrameReader(limits)
        self._unsent = bytearray()
        self._is_over = False  # nothing more is received
        self._is_deaf = False  # nothing more is sent but Detached
        self._is_closing = False
        self._wake: asyncio.Future[None] | None = None
        self._owner = owner
        owner.add(self)

    def __repr__(self) -> str:
        state = f"over: {self.why}" if self._is_over else "open"
        return f"<LocalConnection pid={self.pid} uid={self.uid} {state}>"

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def is_silent(self) -> bool:
        """Whether the other end has said nothing but what was received, and all of that is dealt with."""
        if self._wake is None or self._wake.done() or self.is_closed or self._reader.is_midway:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def receive(self) -> tuple[ToAgent, list[int]] | None:
        """The next message and its descriptors, which are the caller's to close; None once nothing more will come.

        Raises BadFrame, after the good messages before it; then nothing more comes either: say Refused. Close at last.
        """
        while not self._is_over:
            if found := self._reader.next():
                return found
            try:
                received, fds, flags = _receive(self._socket)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError as error:
                self._end(f"connection failed: {error}")
                break
            if not received and not fds:
                self._end("the other end is gone")
                break
            self._reader.feed(received, fds, is_cut=bool(flags & socket.MSG_CTRUNC))
        return None

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks or raises; for an end that does not read, `receive` says that it is over.

        It may read again, and then waits for our last word: what it was told before leaves whole, and `Detached`.
        """
        if self._is_closing or (self._is_deaf and not isinstance(message, Detached)):
            return
        was_empty = not self._unsent
        self._unsent += pack(message)
        if was_empty:
            self._flush()
            if self._unsent and not self.is_closed:
                self._loop.add_writer(self._fd, self._flush)
        if len(self._unsent) > UNSENT_BYTES:
            self._is_deaf = True
            self._end(f"unsent_bytes: {len(self._unsent)}, limit {UNSENT_BYTES}: the other end does not read")

    def close(self, why: str = "closed here") -> None:
        """End the connection, once all that was said has left; a `receive` under way returns None. Idempotent."""
        if self._is_closing:
            return
        self._end(why)
        self._loop.remove_reader(self._fd)
        self._is_closing = True
        if not self._unsent:
            self.shut()

    def shut(self) -> None:
        """Close our end at once, whatever has not left yet. Idempotent."""
        if not self.is_closed:
            self._loop.remove_writer(self._fd)
            self._socket.close()
            self._owner.discard(self)

    def _end(self, why: str) -> None:
        self.why = self.why or why
        self._is_over = True
        self._reader.close()
        self._rouse()

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # gone; what it sent before that is still to be read, so `receive` closes
            self._unsent.clear()
        else:
            del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._fd)
            if self._is_closing:
                self.shut()

    async def _readable(self) -> None:
        assert self._wake is None, "one task receives"
        self._wake = self._loop.create_future()
        self._loop.add_reader(self._fd, self._rouse)
        try:
            await self._wake
        finally:
            self._wake = None
            if not self.is_closed:
                self._loop.remove_reader(self._fd)

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _FrameReader(StreamReader[ToAgent]):
    """Cuts the stream and hands each frame its descriptors."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(ToAgent, limits)
        self._ready: deque[tuple[ToAgent, list[int]]] = deque()
        self._waiting: list[int] = []  # descriptors of the frame that is not complete yet
        self._ahead: list[int] = []  # those of the next message that came before it
        self._most_fds = min(MESSAGE_FDS, _open_limit() // 2)
        self._error: BadFrame | None = None

    def next(self) -> tuple[ToAgent, list[int]] | None:
        """The next complete message. Raises BadFrame once those before it are taken."""
        while self._ready:
            message, fds = self._ready.popleft()
            self._ahead += fds
            if len(self._ahead) > self._most_fds:
                reason = f"fds: more than {self._most_fds} with one message, of {_open_limit()} this process may open"
                self.close()
                self._error = BadFrame("too_many_fds", reason)
            elif not isinstance(message, Descriptors):
                ahead, self._ahead = self._ahead, []
                return message, ahead
        if self._error is not None:
            raise self._error
        return None

    def feed(self, received: bytes, fds: list[int], *, is_cut: bool) -> None:  # type: ignore[override]
        known = len(self._ready)
        try:
            if is_cut:
                reason = f"fds: more than {FRAME_FDS} with one frame, or than the {_open_limit()} this process may open"
                raise BadFrame("too_many_fds", reason)
            for message in super().feed(received):
                self._ready.append((message, self._waiting))
                self._waiting = []
            self._assign(fds, known)
        except BadFrame as error:
            self._error = error
            close_fds(fds)
            self.close_waiting()

    def _assign(self, fds: list[int], known: int) -> None:
        if not fds:
            return
        if self._buffer and not self._waiting:
            self._waiting = fds
        elif not self._buffer and len(self._ready) > known and not self._ready[-1][1]:
            self._ready[-1] = (self._ready[-1][0], fds)
        else:
            raise BadFrame("stray_fds", f"fds: {len(fds)} came where no frame begins")

    def close(self) -> None:
        """Close the descriptors nobody received."""
        for _, fds in self._ready:
            close_fds(fds)
        self._ready.clear()
        self._error = None
        close_fds(self._ahead)
        self._ahead = []
        self.close_waiting()

    def close_waiting(self) -> None:
        close_fds(self._waiting)
        self._waiting = []


def _open_limit() -> int:
    """How many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _receive(source: socket.socket) -> tuple[bytes, list[int], int]:
    """Bytes, descriptors and flags of one recvmsg. The kernel drops descriptors beyond FRAME_FDS and says so."""
    fds = array.array("i")
    space = socket.CMSG_SPACE(FRAME_FDS * fds.itemsize)
    received, ancillary, flags, _ = source.recvmsg(RECEIVE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return received, list(fds), flags
