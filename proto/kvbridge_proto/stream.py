"""Messages and descriptors on a unix stream socket: a 4-byte big-endian length, then one msgpack frame. Pure.

Both ends of every local connection use it, and make the system calls. A frame with descriptors is sent by a call of its
own, and they travel with its first byte. The kernel never returns later bytes together with descriptors. So these
belong to the last frame that begins in the bytes they came with; those of `Descriptors` frames to the message after.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from .codec import LIMITS, BadFrame, Decoder, Limits, encode
from .engine import Descriptors

T = TypeVar("T")
HEADER = struct.Struct(">I")
FRAME_FDS = 64  # the most descriptors beside one frame; Linux takes 253
MESSAGE_FDS = 1024  # the most for one message, with the `Descriptors` before it


def pack(message: Any) -> bytes:
    """One message, ready for the stream."""
    return framed(encode(message))


def framed(body: bytes) -> bytes:
    """One encoded message, ready for the stream."""
    return HEADER.pack(len(body)) + body


class FrameReader(Generic[T]):
    """Bytes and descriptors in, messages of one kind (a tagged union) out, each with at most `most_fds` descriptors.

    A frame longer than the limit is refused as soon as its length is read. `unfit` may give what is read in place of a
    frame that is no message. After BadFrame nothing more comes: close the stream, and the descriptors of `unclaimed`.
    """

    def __init__(
        self,
        kind: Any,
        limits: Limits = LIMITS,
        most_fds: int = 0,
        unfit: Callable[[bytes | bytearray, BadFrame], T | None] | None = None,
    ) -> None:
        self._decode = Decoder[T](kind, limits).decode
        self._most_bytes = limits.frame_bytes
        self._most_fds = most_fds
        self._unfit = unfit
        self._buffer = bytearray()
        self._begin = 0  # of the buffer in the stream
        self._arrived: deque[tuple[int, int, list[int]]] = deque()  # descriptors, with begin and end of their bytes
        self._fds: list[int] = []  # of the next message
        self._error: BadFrame | None = None

    @property
    def is_midway(self) -> bool:
        """Whether a message has begun but is not complete."""
        return bool(self._buffer)

    def feed(self, received: bytes, fds: Sequence[int] = (), *, is_cut: bool = False) -> None:
        """What one call received; `is_cut` if the kernel dropped descriptors. Take what is complete before the next."""
        if fds:
            end = self._begin + len(self._buffer)
            self._arrived.append((end, end + len(received), list(fds)))
        if is_cut and self._error is None:
            reason = f"fds: more than {FRAME_FDS} with one frame, or than this process may have open"
            self._error = BadFrame("too_many_fds", reason)
        if self._error is None:
            self._buffer += received

    def next(self) -> tuple[T, list[int]] | None:
        """The next complete message and its descriptors, now the caller's. Raises BadFrame after the good ones."""
        buffer = self._buffer
        try:
            while self._error is None and len(buffer) >= HEADER.size:
                (size,) = HEADER.unpack_from(buffer)
                if size > self._most_bytes:
                    raise BadFrame("frame_too_large", f"frame_bytes: got {size}, limit {self._most_bytes}")
                end = HEADER.size + size
                if len(buffer) < end:
                    break
                frame = buffer[HEADER.size : end]
                del buffer[:end]
                begin, self._begin = self._begin, self._begin + end
                if self._arrived:
                    self._claim(begin, self._begin)
                try:
                    message = self._decode(frame)
                except BadFrame as error:
                    if self._unfit is None or (found := self._unfit(frame, error)) is None:
                        raise
                    message = found
                if not isinstance(message, Descriptors):
                    fds, self._fds = self._fds, []
                    return message, fds
            if self._arrived:
                self._claim(self._begin, math.inf)
        except BadFrame as error:
            self._error = error
        if self._error is not None:
            raise self._error
        return None

    def messages(self, received: bytes) -> Iterator[T]:
        """For a stream without descriptors: the messages that `received` completes, and BadFrame, as they are read."""
        self.feed(received)
        while found := self.next():
            yield found[0]

    def unclaimed(self) -> list[int]:
        """Forget everything. Returns the descriptors that nobody took, which the caller closes."""
        self._buffer.clear()
        fds = [*self._fds, *(fd for _, _, each in self._arrived for fd in each)]
        self._fds = []
        self._arrived.clear()
        return fds

    def _claim(self, frame: int, end: float) -> None:
        """Give a frame from `frame` to `end` in the stream the descriptors that came with its beginning."""
        while self._arrived and self._arrived[0][1] <= end:
            first, last, fds = self._arrived.popleft()
            self._fds += fds
            if not first <= frame < last:
                raise BadFrame("stray_fds", f"fds: {len(fds)} came where no frame begins")
            if len(self._fds) > self._most_fds:
                reason = f"fds: more than {self._most_fds} with one message, at most half of what this process may open"
                raise BadFrame("too_many_fds", reason)


class FrameWriter:
    """Frames in, and out what each call has to send, until all of it has left.

    Descriptors stay the caller's, who keeps them open until `sent` or `clear` has returned them.
    """

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self._pieces: deque[tuple[bytearray, list[int]]] = deque()

    def put(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame; descriptors that do not fit beside it go with frames before it."""
        while len(fds) > FRAME_FDS:
            self._put(pack(Descriptors()), fds[:FRAME_FDS])
            fds = fds[FRAME_FDS:]
        self._put(frame, fds)

    def _put(self, frame: bytes, fds: Sequence[int]) -> None:
        if fds or not self._pieces or self._pieces[-1][1]:
            self._pieces.append((bytearray(frame), list(fds)))
        else:
            self._pieces[-1][0].extend(frame)
        self.unsent_bytes += len(frame)

    def head(self) -> tuple[bytearray, Sequence[int]]:
        """What to send next by one call, bytes and the descriptors beside them. Only while there are `unsent_bytes`."""
        return self._pieces[0]

    def sent(self, size_bytes: int) -> list[int]:
        """So much of `head` has left. Returns the descriptors that left with it."""
        rest, fds = self._pieces[0]
        left = fds[:]
        fds.clear()
        del rest[:size_bytes]
        self.unsent_bytes -= size_bytes
        if not rest:
            self._pieces.popleft()
        return left

    def clear(self) -> list[int]:
        """Drop what has not left. Returns its descriptors."""
        fds = [fd for _, each in self._pieces for fd in each]
        self._pieces.clear()
        self.unsent_bytes = 0
        return fds
