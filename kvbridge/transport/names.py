"""Host names of dialled addresses, each looked up on a thread of its own: a name server may take a minute to fail.

ZeroMQ would look them up on the one thread that carries all links.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from threading import Thread

MOST_NAMES = 64  # looked up at once
MOST_KNOWN = 1024

Found = Callable[[str, str], None]


class Names:
    """Used on one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, list[Found]] = {}
        self._known: dict[str, str] = {}  # the last address of each name, for when too many hang

    def look_up(self, host: str, found: Found) -> None:
        """Have `found` called on the loop with the host's IPv4 address and "", or with "" and why there is none."""
        if host in self._asked:
            self._asked[host].append(found)
        elif len(self._asked) >= MOST_NAMES:
            address = self._known.get(host, "")
            self._loop.call_soon(found, address, "" if address else f"{MOST_NAMES} other names are being looked up")
        else:
            self._asked[host] = [found]
            try:
                Thread(target=self._run, args=(host,), name="kvbridge-name", daemon=True).start()
            except RuntimeError as error:  # at the limit of threads
                self._loop.call_soon(self._tell, host, "", str(error))

    def _run(self, host: str) -> None:
        address, reason = "", ""
        try:
            address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            reason = str(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(partial(self._tell, host, address, reason))

    def _tell(self, host: str, address: str, reason: str) -> None:
        if address:
            self._known.pop(host, None)
            self._known[host] = address
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        for found in self._asked.pop(host):
            found(address, reason)
