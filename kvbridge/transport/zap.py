"""Authentication for our listening socket: ZeroMQ asks here whether a new connection may speak (RFC 27, ZAP).

Runs on the loop, without a thread. With keys, a connection must prove one of them, and each of its frames names it
(`User-Id`). Handshakes are limited with keys and without, so that nobody keeps us busy with them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import zmq
from zmq.utils import z85

from .keys import Keys

DOMAIN = b"kvbridge"
ENDPOINT = "inproc://zeromq.zap.01"
ANSWERS_IN_A_ROW = 256  # in one go, so that a flood does not hold the loop
MOST_CALLERS = 1024  # remembered; one that was forgotten starts with a full bucket
GRANTED, LATER, DENIED = b"200", b"300", b"400"


class Buckets:
    """Lets each caller make `per_s` handshakes per second, and `burst` at once. Pure."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, float(burst)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> (tokens, when)

    def __len__(self) -> int:
        return len(self._left)

    def take(self, caller: str, now: float) -> bool:
        """Whether the caller may make one more now. If so it is counted."""
        tokens, when = self._left.pop(caller, (self._burst, now))
        tokens = min(self._burst, tokens + (now - when) * self._per_s)
        is_granted = tokens >= 1
        self._left[caller] = (tokens - is_granted, now)
        if len(self._left) > MOST_CALLERS:
            self._left.popitem(last=False)
        return is_granted


class AuthDoor:
    """Answers ZeroMQ while open. `keys` is called each time, so a new list counts at once.

    `refused` is called with a code, `key_not_allowed` or `handshakes_too_many`, and a reason.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Callable[[], Keys | None],
        buckets: Buckets,
        refused: Callable[[str, str], None],
    ) -> None:
        self._keys = keys
        self._buckets = buckets
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._is_closed = False
        self._loop.add_reader(self._fd, self._serve)
        self._serve()  # ZeroMQ signals a descriptor only after a read found nothing

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(0)

    def _serve(self) -> None:
        for _ in range(ANSWERS_IN_A_ROW):
            if self._is_closed or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            version, request = frames[:2]
            status, user = self._judge(frames)
            self._socket.send_multipart([version, request, status, b"", user, b""], zmq.NOBLOCK)
            int(self._socket.getsockopt(zmq.EVENTS))  # sending may have consumed the descriptor's edge
        self._loop.call_soon(self._serve)

    def _judge(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        """Status and user. Frames: version, request, domain, address, identity, mechanism, credentials."""
        keys, mechanism, address = self._keys(), frames[5], frames[3].decode(errors="replace")
        if keys is None:
            return self._in_time(address) if mechanism == b"NULL" else DENIED, b""
        if mechanism != b"CURVE" or len(frames) != 7 or len(frames[6]) != 32:
            return DENIED, b""
        public = z85.encode(frames[6])
        name = keys.names.get(public.decode())
        if name is None:
            self._refused("key_not_allowed", f"key: {public.decode()} of {address} is not in peers")
            return DENIED, b""
        return self._in_time(f"{name} at {address}"), public

    def _in_time(self, caller: str) -> bytes:
        if self._buckets.take(caller, self._loop.time()):
            return GRANTED
        self._refused("handshakes_too_many", f"handshakes: {caller} connects too often")
        return LATER  # it may try again


def guard(socket: zmq.Socket[bytes], keys: Keys | None) -> None:
    """Make a listening socket ask the AuthDoor about every connection and, with keys, accept only CURVE."""
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def introduce(socket: zmq.Socket[bytes], keys: Keys | None, server: str) -> None:
    """Make a dialling socket prove our key, and only to the holder of the `server` key."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
