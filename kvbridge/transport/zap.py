"""The door of our listening socket: ZeroMQ asks here, before a connection may speak, whether it may (RFC 27, ZAP).

Runs on the loop, without a thread. With keys a connection must prove one of them, and is known by it from then on
(`User-Id` of every frame); without, it is only counted, so that nobody keeps us busy with handshakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import zmq
from zmq.utils import z85

from .keys import Keys

log = logging.getLogger("kvbridge.door")

DOMAIN = b"kvbridge"
ENDPOINT = "inproc://zeromq.zap.01"
MOST_ANSWERS = 256  # in one go, so that a flood does not hold the loop
MOST_CALLERS = 1024  # remembered; an older one starts with a full bucket again
GRANTED, LATER, DENIED = b"200", b"300", b"400"


class Buckets:
    """So many handshakes per second of each caller, and as many at once as `burst`. Pure."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, float(burst)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> (tokens, when)

    def __len__(self) -> int:
        return len(self._left)

    def take(self, caller: str, now: float) -> bool:
        """Whether the caller may have one more now."""
        tokens, when = self._left.pop(caller, (self._burst, now))
        tokens = min(self._burst, tokens + (now - when) * self._per_s)
        is_granted = tokens >= 1
        self._left[caller] = (tokens - is_granted, now)
        if len(self._left) > MOST_CALLERS:
            self._left.popitem(last=False)
        return is_granted


class AuthDoor:
    """Answers ZeroMQ while open. `keys` is asked each time, so that a new list counts at once.

    `refused` hears a code and a reason: `key_not_allowed`, `handshakes_too_many`.
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
        for _ in range(MOST_ANSWERS):
            if self._is_closed or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            version, request = frames[:2]
            status, user = self._judge(frames)
            self._socket.send_multipart([version, request, status, b"", user, b""], zmq.NOBLOCK)
            int(self._socket.getsockopt(zmq.EVENTS))  # what we sent may have eaten the descriptor's edge
        self._loop.call_soon(self._serve)

    def _judge(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        """Status and user of ZeroMQ's question: version, request, domain, address, identity, mechanism, credentials."""
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
        return LATER  # it may come again


def guard(socket: zmq.Socket[bytes], keys: Keys | None) -> None:
    """Make a listening socket ask the door about every connection; with keys, speak nothing but CURVE."""
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def introduce(socket: zmq.Socket[bytes], keys: Keys | None, server: str) -> None:
    """Make a dialling socket prove our key, to nobody but the holder of the `server` key."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
