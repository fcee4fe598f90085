"""A rank of a synthetic engine: its memory, its connection (adapters/engine/client.py), the answers it waits for."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from kvbridge_proto.common import OURS
from kvbridge_proto.engine import Attach, Attached, Detach, Detached, Done, Failed, Refused, Released
from kvbridge_proto.pool import Pool

from ..adapters.engine.client import EngineClient
from ..device.fence import EngineFence
from ..device.handles import export_all
from .messages import PATIENCE_S, directory_of, number_of

T = TypeVar("T")
End = Done | Failed | Released | Refused


class RequestRejected(Exception):
    """The agent refused, failed the request, or did not answer."""


class SyntheticEngine:
    """Shares `regions`, which `pool` describes, and waits for answers. `client` sends the messages of messages.py.

    If it `is_spinning`, it never sleeps while it waits: it has a core of its own.
    """

    def __init__(
        self,
        socket: str,
        pool: Pool,
        regions: Sequence[torch.Tensor],
        *,
        is_spinning: bool = False,
        agent_uids: Iterable[int] = (),
    ) -> None:
        self.pool = pool
        self.regions = regions
        self.client = EngineClient(socket, agent_uids=agent_uids)
        self.fence = EngineFence(regions[0].device)
        self._is_spinning = is_spinning
        self.heard: list[Any] = []

    def join(self, ranks: Sequence[str]) -> None:
        """Share the memory. `ranks` are the agents of all ranks of this engine. Raises RequestRejected."""
        if not isinstance(answer := self.attach(), Attached):
            raise RequestRejected(": ".join(why(answer)))
        self.client.send(directory_of(ranks, len(ranks)))

    def attach(self, **changes: Any) -> Attached | Refused:
        """Ask the agent to take the memory, by a message with these changes."""
        handles, fds = export_all(region.untyped_storage() for region in self.regions)
        if not self.client.is_connected:
            self.connect()
        own: dict[str, Any] = {"versions": OURS, "pool": self.pool, "handles": handles, "fence_fd": len(fds)} | changes
        self.client.send(Attach(**own), (*fds, self.fence.fd))
        for fd in fds:
            os.close(fd)
        answer: Attached | Refused = self.told(Attached, Refused)
        return answer

    def connect(self) -> None:
        self.heard.clear()
        if not self.client.connect(PATIENCE_S):
            raise RequestRejected(self.client.why)

    def told(self, *kinds: type, request: str | None = None, seconds: float = PATIENCE_S) -> Any:
        """The first message of these kinds (about this request). Raises as `wait`."""
        return self.wait(
            lambda heard: (
                isinstance(heard, kinds) and request in (None, getattr(heard, "request", getattr(heard, "about", None)))
            ),
            seconds,
        )

    def ended(self, good: type[T], names: Collection[str]) -> T:
        """The next end of one of these requests. Raises RequestRejected unless it is a good one, of this kind."""
        message = self.end_of(names)
        code, reason = why(message)
        if code or not isinstance(message, good):
            raise RequestRejected(f"{', '.join(names)}: {code}: {reason}")
        return message

    def end_of(self, names: Collection[str]) -> End:
        """The next end of one of these requests, whichever it is."""
        numbers = {number_of(name) for name in names}
        end: End = self.wait(lambda heard: isinstance(heard, End) and heard.number in numbers)
        return end

    def wait(self, is_wanted: Callable[[Any], bool], seconds: float = PATIENCE_S) -> Any:
        """The first wanted message; others are kept. Raises RequestRejected if it is late, or we are disconnected."""
        end = time.monotonic() + seconds
        while True:
            for message in self.heard:
                if is_wanted(message):
                    self.heard.remove(message)
                    return message
            if not self.client.is_connected:
                raise RequestRejected(self.client.why)
            if time.monotonic() > end:
                raise RequestRejected(f"no answer in {seconds:g} s; heard {str(self.heard)[:500]}")
            self.hear(0.0 if self._is_spinning else 0.02)

    def hear(self, seconds: float) -> None:
        """Take in what comes within so long."""
        if seconds:
            select.select([self.client], [], [], seconds)
        self.heard += self.client.poll()

    def detach(self) -> None:
        self.client.send(Detach())
        self.told(Detached)
        self.close()

    def close(self) -> None:
        """Close the connection and the fence: the next engine's page may get the same address. Idempotent."""
        self.client.close()
        self.fence.close()


def why(end: End) -> tuple[str, str]:
    """Code and reason of an end; the code is empty if all is well."""
    if isinstance(end, Refused):
        return end.code, "; ".join(end.reasons)
    return getattr(end, "code", ""), getattr(end, "reason", "")
