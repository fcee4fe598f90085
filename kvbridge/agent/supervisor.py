"""What systemd hears of this agent, by sd_notify: that it serves, that it drains, that its data thread turns."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ..options import Supervision

log = logging.getLogger("kvbridge.agent")

LOOKS = 4  # per deadline


class Supervisor:
    """Whoever started us and wants to hear; without one nothing is said."""

    def __init__(self, supervision: Supervision | None) -> None:
        self._said = supervision

    @property
    def look_s(self) -> float:
        """Seconds between two looks at the data thread; 0 if nobody asked for them."""
        return self._said.watchdog_s / LOOKS if self._said else 0.0

    def ready(self) -> None:
        self._say("READY=1\nSTATUS=serving")

    def stopping(self) -> None:
        self._say("STOPPING=1\nSTATUS=draining")

    async def feed(self, turns: Callable[[], int]) -> None:
        """Say that we are well whenever the data thread has turned since the last look. Does not return.

        It says nothing while the thread stands still, nor while the loop does: who listens ends us then.
        """
        seen = -1
        while True:
            if (now := turns()) != seen:
                self._say("WATCHDOG=1")
            seen = now
            await asyncio.sleep(self.look_s)

    def _say(self, message: str) -> None:
        if self._said is None:
            return
        address = self._said.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:  # it ends us if it needed to hear this
            log.warning("systemd was not told %s: %s", message.splitlines()[0], error)
