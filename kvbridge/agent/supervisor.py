"""Tells systemd, by sd_notify, that this agent serves, that it drains, and that its data thread is alive."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ..options import Supervision

log = logging.getLogger("kvbridge.agent")

BEATS_A_WATCHDOG = 4  # per deadline


class Supervisor:
    """The service manager that started us. Without one nothing is sent."""

    def __init__(self, supervision: Supervision | None) -> None:
        self._supervision = supervision

    @property
    def check_s(self) -> float:
        """Seconds between two checks of the data thread; 0 if no watchdog was asked for."""
        return self._supervision.watchdog_s / BEATS_A_WATCHDOG if self._supervision else 0.0

    def ready(self) -> None:
        self._notify("READY=1\nSTATUS=serving")

    def stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=draining")

    async def feed(self, turns: Callable[[], int]) -> None:
        """Feed the watchdog whenever the data thread has made a turn since the last check. Does not return.

        While the thread or the loop stands still nothing is sent, and systemd ends us.
        """
        seen = -1
        while True:
            if (now := turns()) != seen:
                self._notify("WATCHDOG=1")
            seen = now
            await asyncio.sleep(self.check_s)

    def _notify(self, message: str) -> None:
        if self._supervision is None:
            return
        address = self._supervision.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:  # systemd ends us if it had to hear this
            log.warning("systemd was not told %s: %s", message.splitlines()[0], error)
