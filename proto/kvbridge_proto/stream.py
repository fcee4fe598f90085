"""Messages on a byte stream: a 4-byte big-endian length, then one msgpack frame. Pure.

Both ends of the engine's unix socket use it. Reading and writing the bytes is left to them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from .codec import LIMITS, BadFrame, Decoder, Limits, encode

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


class StreamReader(Generic[T]):
    """Cuts received bytes into messages of one kind (a tagged union).

    A frame longer than the limit is refused as soon as its length is read. After BadFrame the stream cannot go
    on: close it.
    """

    def __init__(self, kind: Any, limits: Limits = LIMITS) -> None:
        self._decoder: Decoder[T] = Decoder(kind, limits)
        self._limits = limits
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[T]:
        """The messages that `received` completes. They are decoded lazily: the iterator raises BadFrame."""
        self._buffer += received
        return self._messages()

    @property
    def is_midway(self) -> bool:
        """Whether a message has begun but is not complete."""
        return bool(self._buffer)

    def _messages(self) -> Iterator[T]:
        while (frame := self._cut()) is not None:
            yield self._message(frame)

    def _message(self, frame: bytes) -> T:
        return self._decoder.decode(frame)

    def _cut(self) -> bytes | None:
        if len(self._buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._buffer)
        if size > self._limits.frame_bytes:
            raise BadFrame("frame_too_large", f"frame_bytes: got {size}, limit {self._limits.frame_bytes}")
        end = HEADER.size + size
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return frame
