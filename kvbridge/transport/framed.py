"""One end of a unix socket between processes of a host: framed messages, with file descriptors beside them.

Which descriptors belong to which frame: a frame with descriptors is sent by a `sendmsg` of its own, and they travel
with its first byte. The kernel never returns later bytes together with a send that carried descriptors, so on the
receiving side the descriptors belong to the last frame that begins in the bytes they came with. Those of `Descriptors`
frames belong to the message after them.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from kvbridge_proto.codec import BadFrame, Limits
from kvbridge_proto.engine import Descriptors
from kvbridge_proto.stream import FRAME_FDS, MESSAGE_FDS, StreamReader, framed, pack

RECEIVE_BYTES = 1 << 18
UNSENT_BYTES = 32 << 20
_CREDENTIALS = struct.Struct("iII")
# Plain numbers: to combine the enum's members costs more than the system call.
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_SEND = int(socket.MSG_DONTWAIT)
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_CTRUNC)
_FDS_SPACE = socket.CMSG_SPACE(FRAME_FDS * array.array("i").itemsize)
Heard = TypeVar("Heard")
Said = TypeVar("Said")


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that nobody took."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def credentials_of(connected: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, from the kernel; for a listener, those when it began to listen."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return pid, uid, gid


class Connection(Generic[Heard, Said]):
    """One end. One task receives; anyone on the loop may send. Only `close` closes it, whatever the other end does.

    It receives messages of the union `kind`, each with at most `most_fds` descriptors; `unfit` as of `FrameReader`. It
    is in `owner` while it is open. Messages of the types `last_word` are sent even to an end that does not read.
    """

    def __init__(
        self,
        connected: socket.socket,
        kind: Any,
        limits: Limits,
        owner: set[Any],
        *,
        most_fds: int = MESSAGE_FDS,
        last_word: type | tuple[type, ...] = (),
        unfit: Callable[[bytes, BadFrame], Heard | None] | None = None,
    ) -> None:
        connected.setblocking(False)
        self.pid, self.uid, self.gid = credentials_of(connected)
        self.why = ""
        self.silent_since = asyncio.get_running_loop().time()  # when its last whole message was taken, or it came
        self._socket = connected
        self._fd = connected.fileno()
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[Heard] = FrameReader(kind, limits, most_fds, unfit)
        self._last_word = last_word
        self._unsent: deque[_Piece] = deque()
        self._unsent_bytes = 0
        self._is_over = False  # nothing more is received
        self._is_deaf = False  # the other end does not read: only the last word is still sent
        self._is_closing = False
        self._is_drained = False  # the last read was short: wait until the loop says that there is more
        self._is_watched = False  # the loop calls `_on_readable`
        self._wake: asyncio.Future[None] | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._owner = owner
        owner.add(self)

    def __repr__(self) -> str:
        state = f"over: {self.why}" if self._is_over else "open"
        return f"<{type(self).__name__} pid={self.pid} uid={self.uid} {state}>"

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def is_silent(self) -> bool:
        """Whether `receive` waits, and nothing that the other end sent is left to read, not even part of a frame."""
        if self._wake is None or self._wake.done() or self.is_closed or self._reader.is_midway:
            return False
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def receive(self) -> tuple[Heard, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None once nothing more will come.

        Raises BadFrame after the good messages before it. Nothing more comes then: send Refused. Close at last.
        """
        while not self._is_over:
            if found := self._reader.next():
                self.silent_since = self._loop.time()
                return found
            if self._is_drained:
                await self._readable()
                self._is_drained = False
                continue
            try:
                received, fds, flags = _receive(self._socket)
            except BlockingIOError:
                self._is_drained = True
                continue
            except OSError as error:
                self._end(f"connection failed: {error}")
                break
            if not received and not fds:
                self._end("the other end is gone")
                break
            self._is_drained = len(received) < RECEIVE_BYTES
            self._reader.feed(received, fds, is_cut=bool(flags & _CUT))
        return None

    def send(self, message: Said, fds: Sequence[int] = ()) -> None:
        """Queue a message. Never blocks or raises; if the other end does not read, `receive` returns None.

        An end that does not read now may read later, and wait for our last word. So what was queued before still leaves
        whole, and then that word.

        The descriptors stay the caller's, who keeps them open until they have left (`flush`).
        """
        if self._is_closing or (self._is_deaf and not isinstance(message, self._last_word)):
            return
        self._queue(pack(message), fds)

    def send_encoded(self, body: bytes) -> None:
        """`send` for a message without descriptors that is already encoded."""
        if not self._is_closing and not self._is_deaf:
            self._queue(framed(body), ())

    def _queue(self, frame: bytes, fds: Sequence[int]) -> None:
        was_empty = not self._unsent
        if was_empty and not fds and not (frame := self._left_of(frame)):
            return
        while len(fds) > FRAME_FDS:
            self._put(pack(Descriptors()), fds[:FRAME_FDS])
            fds = fds[FRAME_FDS:]
        self._put(frame, fds)
        if was_empty:
            self._send()
            if self._unsent and not self.is_closed:
                self._loop.add_writer(self._fd, self._send)
        if self._unsent_bytes > UNSENT_BYTES:
            self._is_deaf = True
            self._end(f"unsent_bytes: {self._unsent_bytes}, limit {UNSENT_BYTES}: the other end does not read")

    def _left_of(self, frame: bytes) -> bytes:
        """Send a frame at once, as far as the other end has room. Returns the rest."""
        try:
            return frame[self._socket.send(frame, _SEND) :]
        except OSError:  # no room, or the other end is gone: `_send` finds out
            return frame

    async def flush(self) -> None:
        """Return once all that was queued has left, or never will."""
        while self._unsent and not self.is_closed:
            self._flushed = self._flushed or self._loop.create_future()
            await asyncio.shield(self._flushed)

    def close(self, why: str = "closed here") -> None:
        """End the connection once all that was queued has left. A `receive` under way returns None. Idempotent."""
        if self._is_closing:
            return
        self._end(why)
        self._unwatch()
        self._is_closing = True
        if not self._unsent:
            self.shut()

    def shut(self) -> None:
        """Close our end at once, even if not everything has left. Idempotent."""
        if not self.is_closed:
            self._is_closing = True
            self._loop.remove_writer(self._fd)
            self._unwatch()
            self._socket.close()
            self._owner.discard(self)
            self._end("closed here")
            self._wake_flush()

    def _end(self, why: str) -> None:
        self.why = self.why or why
        self._is_over = True
        self._reader.close()
        self._rouse()

    def _put(self, frame: bytes, fds: Sequence[int]) -> None:
        if fds or not self._unsent or self._unsent[-1].is_apart:
            self._unsent.append(_Piece(frame, fds))
        else:
            self._unsent[-1].rest += frame
        self._unsent_bytes += len(frame)

    def _send(self) -> None:
        while self._unsent:
            piece = self._unsent[0]
            try:
                sent = piece.send(self._socket)
            except BlockingIOError:
                return
            except OSError:  # it is gone, but what it sent before is still unread: `receive` ends the connection
                self._unsent.clear()
                self._unsent_bytes = 0
                break
            self._unsent_bytes -= sent
            if piece.rest:
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._fd)
        self._wake_flush()
        if self._is_closing:
            self.shut()

    def _wake_flush(self) -> None:
        if self._flushed is not None:
            self._flushed.set_result(None)
            self._flushed = None

    async def _readable(self) -> None:
        assert self._wake is None, "one task receives"
        self._wake = self._loop.create_future()
        assert not self.is_closed, "nothing would end this wait"
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._fd, self._on_readable)
        try:
            await self._wake
        finally:
            self._wake = None

    def _on_readable(self) -> None:
        """Wake `receive`. If it does not wait, stop watching; to do so each time would cost more than a message."""
        if self._wake is None or self._wake.done():
            self._unwatch()
        else:
            self._rouse()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._fd)

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _Piece:
    """Bytes sent in order. A frame with descriptors is a piece of its own; they leave with its first byte."""

    __slots__ = ("_fds", "is_apart", "rest")

    def __init__(self, frame: bytes, fds: Sequence[int]) -> None:
        self.rest = bytearray(frame)
        self.is_apart = bool(fds)
        self._fds = fds

    def send(self, to: socket.socket) -> int:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._fds))] if self._fds else []
        sent = to.sendmsg([self.rest], beside, _SEND)
        self._fds = ()
        del self.rest[:sent]
        return sent


class FrameReader(StreamReader[Heard]):
    """Cuts the stream into messages, each with its descriptors.

    `unfit` may give what is received in place of a frame that is no message. If it gives nothing the stream is over.
    """

    def __init__(
        self,
        kind: Any,
        limits: Limits,
        most_fds: int = MESSAGE_FDS,
        unfit: Callable[[bytes, BadFrame], Heard | None] | None = None,
    ) -> None:
        super().__init__(kind, limits)
        self._unfit = unfit
        self._ready: deque[tuple[Heard, list[int]]] = deque()
        self._waiting: list[int] = []  # descriptors of the frame that is not complete yet
        self._ahead: list[int] = []  # descriptors that came before their message
        self._most_fds = min(most_fds, _open_limit() // 2)
        self._error: BadFrame | None = None

    def next(self) -> tuple[Heard, list[int]] | None:
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

    def _message(self, frame: bytes) -> Heard:
        try:
            return super()._message(frame)
        except BadFrame as error:
            if self._unfit is None or (found := self._unfit(frame, error)) is None:
                raise
            return found

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
        """Close the descriptors that nobody took."""
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
    """Bytes, descriptors and flags of one recvmsg. The kernel drops descriptors beyond FRAME_FDS and sets MSG_CTRUNC.

    Neither receiving nor sending relies on O_NONBLOCK: the flag is the socket's, and another process may hold our end.
    """
    fds = array.array("i")
    received, ancillary, flags, _ = source.recvmsg(RECEIVE_BYTES, _FDS_SPACE, _RECEIVE)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return received, list(fds), flags
