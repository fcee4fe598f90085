"""What servers with real engines need: an environment, a port."""

from __future__ import annotations

import random
import socket
from contextlib import closing, suppress

from kvbridge.loopback.servers import ONE_THREAD

_given: set[int] = set()
SETTINGS = ONE_THREAD | {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}  # the environment of real engines


def free_port() -> int:
    """None that Linux gives by itself to whoever asks for any: an engine listens minutes after it is told its port.

    Nor one that was given before.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        if port in _given:
            continue
        with closing(socket.socket()) as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            _given.add(port)
            return port
