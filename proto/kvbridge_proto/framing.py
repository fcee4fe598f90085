"""Bytes <-> messages, one by one or on a unix stream socket. Pure.

A frame is first unpacked under hard limits, then typed.

A frame that is too large, too deep or too long is refused before anything of its size is built: msgpack unpacks with
its max_* limits, msgspec converts the result. Nothing here imports by name or runs what it was sent. A frame so
small that it cannot exceed any other limit, as most are, is decoded by msgspec alone, which takes a tenth of the time.

The frame is walked once before it is unpacked: msgpack (up to 1.2.0) makes room for every array at its announced
length, so 1 MiB of nested array headers with nothing behind them would cost 4 GB.

On a stream a frame follows its length, 4 bytes, big-endian. Both ends of every local connection use FrameReader and
FrameWriter, and make the system calls. A frame with descriptors is sent by a call of its own, and they travel with its
first byte. The kernel never returns later bytes together with descriptors. So these belong to the last frame that
begins in the bytes they came with; those of `Descriptors` frames to the message after.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from .engine import Descriptors

T = TypeVar("T")
HEADER = struct.Struct(">I")
FRAME_FDS = 64  # the most descriptors beside one frame; Linux takes 253
MESSAGE_FDS = 1024  # the most for one message, with the `Descriptors` before it


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one frame may hold."""

    frame_bytes: int = 16 << 20
    text_bytes: int = 1 << 16
    binary_bytes: int = 1 << 17
    array_items: int = 1 << 20
    map_items: int = 4096


LIMITS = Limits()


class BadFrame(ValueError):
    """The bytes are not a message we accept; `code` is stable, the text says what and where."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def encode(message: Any) -> bytes:
    """One message as msgpack."""
    return msgspec.msgpack.encode(message)


class Decoder(Generic[T]):
    """Decodes frames of one kind: a struct or a tagged union."""

    def __init__(self, kind: Any, limits: Limits = LIMITS) -> None:
        self._kind = kind
        self._limits = limits
        self._small_bytes = min(msgspec.structs.astuple(limits))  # a frame of this size cannot exceed another limit
        self._direct: msgspec.msgpack.Decoder[T] = _direct(kind)

    def decode(self, frame: bytes | bytearray | memoryview) -> T:
        """The message in `frame`.

        Raises BadFrame with code `frame_too_large`, `frame_malformed`, `frame_too_deep` or `message_invalid`.
        """
        if len(frame) <= self._small_bytes:
            # msgspec builds only what is there, whatever length is announced, and goes no deeper than Python's stack.
            # What it rejects is decoded again below, which names the error.
            try:
                return self._direct.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
        message: T = typed(unpack(frame, self._limits), self._kind)
        return message

    def check(self, frame: bytes | bytearray | memoryview) -> None:
        """For a frame of our own making, before it is sent: msgspec encodes fields that it would not decode.

        Raises BadFrame with code `frame_too_large` or `message_invalid`.
        """
        if len(frame) > self._limits.frame_bytes:
            raise BadFrame("frame_too_large", f"frame_bytes: got {len(frame)}, limit {self._limits.frame_bytes}")
        try:
            self._direct.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame("message_invalid", str(error)[:500]) from None


def decode(frame: bytes | bytearray | memoryview, kind: type[T] | Any, limits: Limits = LIMITS) -> T:
    """One message, as by a `Decoder`. Keep a Decoder where many come: to look one up costs as much as a message."""
    decoder: Decoder[T] = Decoder(kind, limits)
    return decoder.decode(frame)


@functools.cache
def _direct(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def unpack(frame: bytes | bytearray | memoryview, limits: Limits = LIMITS) -> Any:
    """The plain values in `frame`; bounded in size, depth and length. Raises BadFrame."""
    size = len(frame)
    if size > limits.frame_bytes:
        raise BadFrame("frame_too_large", f"frame_bytes: got {size}, limit {limits.frame_bytes}")
    try:
        walker = msgpack.Unpacker(max_buffer_size=max(size, 1))
        walker.feed(frame)
        walker.skip()
        return msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=min(limits.text_bytes, size),
            max_bin_len=min(limits.binary_bytes, size),
            max_array_len=min(limits.array_items, size),
            max_map_len=min(limits.map_items, size),
            max_ext_len=0,
        )
    except msgpack.StackError:
        raise BadFrame("frame_too_deep", "nested deeper than msgpack's own limit") from None
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame("frame_malformed", f"not a frame: {type(error).__name__}: {error}"[:300]) from None


def typed(value: Any, kind: type[T] | Any) -> T:
    """`value` as `kind`. Raises BadFrame(`message_invalid`) naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadFrame("message_invalid", str(error)[:500]) from None


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
