"""Bytes <-> messages: first unpacked under hard limits, then typed. Pure.

A frame that is too large, too deep or too long is refused before anything of its size is built: msgpack unpacks with
its max_* limits, msgspec converts the result. Nothing here imports by name or runs what it was sent. A frame so
small that it cannot exceed any other limit, as most are, is decoded by msgspec alone, which takes a tenth of the time.

The frame is walked once before it is unpacked: msgpack (up to 1.2.0) makes room for every array at its announced
length, so 1 MiB of nested array headers with nothing behind them would cost 4 GB.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

T = TypeVar("T")


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
