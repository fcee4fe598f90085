"""System calls on a unix socket: who is at its other end, and bytes with descriptors beside them."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Sequence

SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CREDENTIALS = struct.Struct("iII")


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


def send_beside(to: socket.socket, piece: bytes | bytearray, fds: Sequence[int]) -> int:
    """Send bytes, and descriptors with the first of them, without waiting. Returns how many left. Raises OSError."""
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return to.sendmsg([piece], beside, SEND)
