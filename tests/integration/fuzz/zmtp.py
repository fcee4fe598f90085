"""ZeroMQ's own protocol (ZMTP 3.0, RFC 23) by hand, to send what no ZeroMQ would. Pure."""

from __future__ import annotations

import struct

LAST, MORE, LONG, COMMAND = 0, 1, 2, 4
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"


def greeting(mechanism: bytes = b"NULL", major: int = 3) -> bytes:
    return SIGNATURE + bytes([major, 0]) + mechanism.ljust(20, b"\0") + bytes(32)


def frame(payload: bytes, flags: int = LAST, announced: int | None = None) -> bytes:
    """One frame; `announced` is the length it says it has."""
    size = len(payload) if announced is None else announced
    if size > 255:
        return struct.pack(">BQ", flags | LONG, size) + payload
    return bytes([flags, size]) + payload


def ready(socket_type: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    properties = _property(b"Socket-Type", socket_type) + _property(b"Identity", identity)
    return frame(b"\x05READY" + properties, COMMAND)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
