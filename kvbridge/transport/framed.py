"""One end of a unix socket between processes of a host, on the agent's loop."""

from __future__ import annotations

import array
import asyncio
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvbridge_proto.framing import FRAME_FDS, MESSAGE_FDS, BadFrame, FrameReader, FrameWriter, Limits, framed, pack

from ..unix_socket import SEND, close_fds, credentials_of, send_beside

RECEIVE_BYTES = 1 << 18
UNSENT_BYTES = 32 << 20
# Plain numbers: to combine the enum's members costs more than the system call.
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_CTRUNC)
_FDS_SPACE = socket.CMSG_SPACE(FRAME_FDS * array.array("i").itemsize)
Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class Connection(Generic[Incoming, Outgoing]):
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
        unfit: Callable[[bytes | bytearray, BadFrame], Incoming | None] | None = None,
    ) -> None:
        connected.setblocking(False)
        self.pid, self.uid, _ = credentials_of(connected)
        self.why = ""
        self.silent_since = asyncio.get_running_loop().time()  # when its last whole message was taken, or it came
        self._socket = connected
        self._fd = connected.fileno()
        self._loop = asyncio.get_running_loop()
        most_fds = min(most_fds, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._reader: FrameReader[Incoming] = FrameReader(kind, limits, most_fds, unfit)
        self._writer = FrameWriter()
        self._last_word = last_word
        self._is_over = False  # nothing more is received
        self._is_deaf = False  # the other end does not read: only the last word is still sent
        self._is_closing = False
        self._is_drained = False  # the last read was short: wait until the loop says that there is more
        self._is_watched = False  # the loop calls `_on_readable`
        self._wake: asyncio.Future[None] | None = None  # for which `receive` waits, unless it is done
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

    async def receive(self) -> tuple[Incoming, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None once nothing more will come.

        Raises BadFrame after the good messages before it. Nothing more comes then: send Refused. Close at last.
        """
        try:
            while not self._is_over:
                if found := self._reader.next():
                    self.silent_since = self._loop.time()
                    return found
                if self._is_drained:
                    await self._readable()
                    if self._is_over:
                        break
                self._read()
        except BadFrame:
            close_fds(self._reader.unclaimed())
            raise
        return None

    def _read(self) -> None:
        """Receive once. The kernel drops descriptors beyond FRAME_FDS and sets MSG_CTRUNC.

        Neither receiving nor sending relies on O_NONBLOCK: the flag is the socket's, and another process may hold our
        end.
        """
        try:
            received, beside, flags, _ = self._socket.recvmsg(RECEIVE_BYTES, _FDS_SPACE, _RECEIVE)
        except BlockingIOError:
            self._is_drained = True
        except OSError as error:
            self._end(f"connection failed: {error}")
        else:
            self._is_drained = len(received) < RECEIVE_BYTES
            fds = array.array("i")
            for level, kind, payload in beside:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            self._reader.feed(received, fds, is_cut=bool(flags & _CUT))
            if not received:
                self._end("the other end is gone")

    def send(self, message: Outgoing, fds: Sequence[int] = ()) -> None:
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
        was_empty = not self._writer.unsent_bytes
        if was_empty and not fds:
            try:
                sent = self._socket.send(frame, SEND)
            except OSError:  # no room, or the other end is gone: `_send` finds out
                sent = 0
            if sent == len(frame):
                return
            frame = frame[sent:]
        self._writer.put(frame, fds)
        if was_empty:
            self._send()
            if self._writer.unsent_bytes and not self.is_closed:
                self._loop.add_writer(self._fd, self._send)
        if (unsent_bytes := self._writer.unsent_bytes) > UNSENT_BYTES:
            self._is_deaf = True
            self._end(f"unsent_bytes: {unsent_bytes}, limit {UNSENT_BYTES}: the other end does not read")

    async def flush(self) -> None:
        """Return once all that was queued has left, or never will."""
        while self._writer.unsent_bytes and not self.is_closed:
            self._flushed = self._flushed or self._loop.create_future()
            await asyncio.shield(self._flushed)

    def close(self, why: str = "closed here") -> None:
        """End the connection once all that was queued has left. A `receive` under way returns None. Idempotent."""
        if self._is_closing:
            return
        self._end(why)
        self._unwatch()
        self._is_closing = True
        if not self._writer.unsent_bytes:
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
        close_fds(self._reader.unclaimed())
        self._wake_receiver()

    def _send(self) -> None:
        try:
            while self._writer.unsent_bytes:
                self._writer.sent(send_beside(self._socket, *self._writer.head()))
        except BlockingIOError:
            return
        except OSError:  # it is gone, but what it sent before is still unread: `receive` ends the connection
            self._writer.clear()
        self._loop.remove_writer(self._fd)
        self._wake_flush()
        if self._is_closing:
            self.shut()

    def _wake_flush(self) -> None:
        if self._flushed is not None:
            self._flushed.set_result(None)
            self._flushed = None

    def _readable(self) -> asyncio.Future[None]:
        assert self._wake is None or self._wake.done(), "one task receives"
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._fd, self._on_readable)
        self._wake = self._loop.create_future()
        return self._wake

    def _on_readable(self) -> None:
        """Wake `receive`. If it does not wait, stop watching; to do so each time would cost more than a message."""
        if self._wake is None or self._wake.done():
            self._unwatch()
        else:
            self._wake_receiver()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._fd)

    def _wake_receiver(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
