"""A rank of a synthetic engine as its agent sees it: memory, and a connection through adapters/engine/client.py."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Collection, Sequence
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

    def __init__(self, socket: str, pool: Pool, regions: Sequence[torch.Tensor], *, is_spinning: bool = False) -> None:
        self.pool = pool
        self.regions = regions
        self.client = EngineClient(socket)
        self.fence = EngineFence(regions[0].device)
        self._is_spinning = is_spinning
        self._heard: list[Any] = []

    def attach(self, ranks: Sequence[str]) -> None:
        """Share the memory. `ranks` are the agents of all ranks of this engine."""
        handles, fds = export_all(region.untyped_storage() for region in self.regions)
        if not self.client.connect(PATIENCE_S):
            raise RequestRejected(self.client.why)
        self._heard.clear()
        attach = Attach(versions=OURS, pool=self.pool, handles=handles, fence_fd=len(fds))
        self.client.send(attach, (*fds, self.fence.fd))
        for fd in fds:
            os.close(fd)
        self.answer(Attached)
        self.client.send(directory_of(ranks, len(ranks)))

    def answer(self, kind: type[T]) -> T:
        """The answer of this kind. Raises RequestRejected if there is a refusal before it."""
        message = self.wait(lambda heard: isinstance(heard, (kind, Refused)))
        if not isinstance(message, kind):
            raise RequestRejected(": ".join(why(message)))
        return message

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

    def wait(self, is_wanted: Callable[[Any], bool]) -> Any:
        """The first wanted message; others are kept. Raises RequestRejected after PATIENCE_S, or if disconnected."""
        end = time.monotonic() + PATIENCE_S
        while True:
            for message in self._heard:
                if is_wanted(message):
                    self._heard.remove(message)
                    return message
            if not self.client.is_connected:
                raise RequestRejected(self.client.why)
            if time.monotonic() > end:
                raise RequestRejected(f"no answer in {PATIENCE_S:g} s; heard {str(self._heard)[:500]}")
            if not self._is_spinning:
                select.select([self.client], [], [], 0.02)
            self._heard += self.client.poll()

    def detach(self) -> None:
        self.client.send(Detach())
        self.wait(lambda heard: isinstance(heard, Detached))
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
