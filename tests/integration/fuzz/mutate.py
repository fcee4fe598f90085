"""Makes frames: golden ones with bytes changed, with values changed, and typed ones that are valid but absurd. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgpack
import msgspec

from tests.integration.fuzz.typed import drawer

# Headers of msgpack: small and large arrays, maps, texts, bytes, ext, floats; and what no msgpack begins with.
HEADS = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0), 0xE0, 0xFF)
SIZES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 127, 128, 255, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(-(1 << 63), 0.0, -0.5, float("nan"), float("inf"), float("-inf"), 1e308, "", "a", "ä", "\x00", "x" * 300),
    *(b"", b"\xff", b"0123456789abcdef", [], {}, [[]], {"": None}, msgpack.ExtType(5, b"abc"), msgpack.Timestamp(1, 2)),
)


class Mutator:
    """Frames of one kind from `seeds`, which are good ones, and from the type itself if there is one."""

    def __init__(self, seeds: Sequence[bytes], kind: Any = None, header_bytes: int = 0) -> None:
        self._seeds = list(seeds)
        self._values = [msgpack.unpackb(seed[header_bytes:], strict_map_key=False) for seed in seeds]
        self._draw = drawer(kind) if kind is not None else None

    def frame(self, random: Random) -> bytes:
        """One frame, mostly a bad one."""
        choice = random.random()
        if choice < 0.6:
            return self.changed_bytes(random, random.choice(self._seeds))
        if choice < 0.8 or self._draw is None:
            return self.changed_value(random)
        frame = self.typed(random)
        return self.changed_bytes(random, frame) if choice > 0.95 else frame

    def typed(self, random: Random) -> bytes:
        """A frame that the type allows."""
        assert self._draw is not None
        return msgspec.msgpack.encode(self._draw(random))

    def changed_bytes(self, random: Random, seed: bytes) -> bytes:
        frame = bytearray(seed)
        for _ in range(1 + random.getrandbits(2)):
            if not frame:
                break
            at = random.randrange(len(frame))
            match random.getrandbits(3):
                case 0:
                    frame[at] ^= 1 << random.getrandbits(3)
                case 1:
                    frame[at] = random.choice(HEADS)
                case 2:
                    frame[at] = random.getrandbits(8)
                case 3:
                    del frame[at : at + 1 + random.getrandbits(4)]
                case 4:
                    frame[at:at] = frame[random.randrange(len(frame)) :][: 1 + random.getrandbits(6)]
                case 5:
                    other = random.choice(self._seeds)
                    frame[at:] = other[random.randrange(len(other) + 1) :]
                case 6:
                    del frame[at:]
                case _:  # a length, of one of the widths that msgpack has
                    width = random.choice((">B", ">H", ">I"))
                    size = random.choice(SIZES) & ((1 << 8 * struct.calcsize(width)) - 1)
                    frame[at : at + struct.calcsize(width)] = struct.pack(width, size)
        return bytes(frame)

    def changed_value(self, random: Random) -> bytes:
        value = _changed(random, random.choice(self._values))
        try:
            return msgpack.packb(value, default=str)
        except (ValueError, OverflowError):  # nested deeper than the packer goes
            return b"\x91" * random.choice((400, 600, 2000, 100_000)) + b"\xc0"


def _changed(random: Random, value: Any, depth: int = 0) -> Any:
    """The same value but for one place."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        match random.getrandbits(4):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {
                    **value,
                    random.choice(("", "new", key + "x" if isinstance(key, str) else 0, 7, b"k")): value[key],
                }
            case _:
                return {**value, key: _changed(random, value[key], depth + 1)}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        match random.getrandbits(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + [value[at]] * random.choice((1, 2, 64, 5000))
            case 2:
                return value[::-1]
            case _:
                return [*value[:at], _changed(random, value[at], depth + 1), *value[at + 1 :]]
    if random.random() < 0.02:
        return _bomb(random)
    if isinstance(value, int) and random.random() < 0.5:
        return max(
            -(1 << 63), min((1 << 64) - 1, random.choice((value + 1, value - 1, -value, value << 8, value << 32)))
        )
    return random.choice(LEAVES)


def _bomb(random: Random) -> Any:
    """Deep, or long."""
    if random.random() < 0.5:
        return random.choice(([0] * 5000, {str(i): i for i in range(5000)}, "y" * 70_000, b"z" * 140_000))
    value: Any = None
    for _ in range(random.choice((30, 300, 480))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value
