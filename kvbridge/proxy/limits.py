"""How much the proxy takes at once, so that no client takes all of it: connections, asks under way, and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..descriptors import raised
from ..errors import KVBridgeError, OperatorError
from .metrics import ProxyMetrics

BODY_BYTES = 64 << 20
SMALL_BODY_BYTES = 1 << 20  # up to this, a body has the last quarter for itself: large ones do not keep it out
BACKLOG = 64  # connections that may be accepted at once
TOLD = 16  # connections that are told that there are too many
OWN = 48  # descriptors for everything else: the listener, the log, name look-ups
PER_ENGINE = 4  # descriptors for health checks and bootstrap servers
FEWEST = 8
MOST_CONNECTIONS = 4096


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    connections: int = MOST_CONNECTIONS  # of clients
    asks: int = MOST_CONNECTIONS  # that are under way: each may have a connection to a prefill and to a decode engine
    held_bytes: int = 512 << 20  # bodies of clients, and answers that are being put together


def limits_here(engines: int) -> ProxyLimits:
    """Raises this process's limit of descriptors as far as it may, and divides them. Raises OperatorError."""
    most = raised()
    reserved = 2 * BACKLOG + TOLD + OWN + PER_ENGINE * engines
    places = (most - reserved) // 3  # a client's connection, and two to engines
    if places < FEWEST:
        least = reserved + 3 * FEWEST
        raise OperatorError("bad_option", f"open files: the limit is {most}, need at least {least} (ulimit -n)")
    return ProxyLimits(min(places, MOST_CONNECTIONS), min(places, MOST_CONNECTIONS))


class Busy(KVBridgeError):
    """There is no room for a request now, and nobody is to blame for it."""


class MemoryBound:
    """Counts bytes that are held for requests."""

    def __init__(self, most_bytes: int, metrics: ProxyMetrics) -> None:
        self._most, self._now, self._gauge = most_bytes, 0, metrics.held_bytes
        metrics.most_held_bytes.set(most_bytes)

    @contextmanager
    def share(self) -> Iterator[RequestBytes]:
        """What one request holds, until the end of the block."""
        share = RequestBytes(self)
        try:
            yield share
        finally:
            self.add(-share.size)

    def add(self, size: int) -> None:
        self._now += size
        self._gauge.set(self._now)

    def has_room(self, size: int, more: int) -> bool:
        most = self._most if size <= SMALL_BODY_BYTES else self._most * 3 // 4
        return self._now + more <= most


class RequestBytes:
    def __init__(self, held: MemoryBound) -> None:
        self._held, self.size = held, 0

    def add(self, size: int) -> None:
        """Less than 0 gives back. Raises Busy."""
        if size > 0 and not self._held.has_room(self.size + size, size):
            raise Busy("busy", "the proxy holds as many bytes of requests as it may, try again")
        self.size += size
        self._held.add(size)
