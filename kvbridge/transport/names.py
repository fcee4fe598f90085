"""Host names of dialled addresses, each looked up on a thread of its own: a name server may take a minute to fail.

ZeroMQ would look them up on the one thread that carries all links.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread

MOST_LOOKUPS = 64  # looked up at once
MOST_OF_A_NAME = 256  # who wait for one name
MOST_KNOWN = 1024

Found = Callable[[Sequence[str], str], None]


class Names:
    """Used on one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, list[Found]] = {}
        self._known: dict[str, Sequence[str]] = {}  # the last addresses of each name, for when too many hang

    def look_up(self, host: str, found: Found) -> None:
        """Have `found` called on the loop with the host's IPv4 addresses and "", or with none and why."""
        if (asking := self._asked.get(host)) is not None and len(asking) < MOST_OF_A_NAME:
            asking.append(found)
        elif asking is not None or len(self._asked) >= MOST_LOOKUPS:
            addresses = self._known.get(host, ())
            many = (
                f"{MOST_LOOKUPS} other names are being looked up" if asking is None else f"{MOST_OF_A_NAME} wait for it"
            )
            self._loop.call_soon(found, addresses, "" if addresses else many)
        else:
            self._asked[host] = [found]
            try:
                Thread(target=self._run, args=(host,), name="kvbridge-name", daemon=True).start()
            except RuntimeError as error:  # at the limit of threads
                self._loop.call_soon(self._tell, host, (), str(error))

    def _run(self, host: str) -> None:
        addresses: Sequence[str] = ()
        reason = ""
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            addresses = tuple(dict.fromkeys(str(each[4][0]) for each in found))
        except (OSError, UnicodeError) as error:
            reason = str(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(partial(self._tell, host, addresses, reason))

    def _tell(self, host: str, addresses: Sequence[str], reason: str) -> None:
        if addresses:
            self._known.pop(host, None)
            self._known[host] = addresses
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        for found in self._asked.pop(host):
            found(addresses, reason)
