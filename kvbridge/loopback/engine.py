"""A rank of a synthetic engine: its memory, its connection (adapters/engine/client.py), what it offers or wants.

On a GPU every layer has memory of its own if the layout allows it, and offers and wants are sent with a fence while the
stream is still at work.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import torch
from kvbridge_proto.common import OURS
from kvbridge_proto.engine import Attach, Attached, Detach, Detached, Done, Failed, Refused, Released
from kvbridge_proto.pool import CodecName, Pool

from ..adapters.engine.client import EngineClient
from ..device.fence import EngineFence
from ..device.handles import export_all
from .messages import PATIENCE_S, directory_of, number_of, offer_of, want_of
from .pools import POISON, DemoRequest, DemoRows, Shape, describe, first_difference, prepare, tables

T = TypeVar("T")
End = Done | Failed | Released | Refused
PIECE_TOKENS = 512


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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What this rank is and does. `ranks` are the agents of its engine; a receiver knows one agent of the sender."""

    role: Literal["sender", "receiver"]
    shape: Shape
    rank: int
    socket: str
    ranks: tuple[str, ...]
    requests: list[DemoRequest]
    sender: str = ""
    sender_codec: CodecName = "bf16"
    device: str = "cpu"


class JobEngine(SyntheticEngine):
    """The engine of a job, with the content of its requests."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.layers = (None,) if job.device == "cpu" else job.shape.layers_apart
        pool = describe(job.shape, job.rank, self.layers)
        sizes = [region.size_bytes for region in pool.regions]
        regions = [torch.full((size,), POISON, dtype=torch.uint8, device=job.device) for size in sizes]
        super().__init__(job.socket, pool, regions)
        self.tables = tables(job.shape, job.requests)

    @property
    def memory(self) -> torch.Tensor:
        """All memory, if one region holds it."""
        (memory,) = self.regions
        return memory

    def offer_all(self) -> None:
        """Offer the requests one after another, each in pieces, as a prompt is computed."""
        for request in self.job.requests:
            table, given, computed = self.tables[request.name], 0, 0
            for tokens in [*range(PIECE_TOKENS, request.tokens, PIECE_TOKENS), request.tokens]:
                end = -(-tokens // self.job.shape.block_tokens)
                more = {
                    "is_more": given > 0,
                    "is_last": tokens == request.tokens,
                    "fence": self.compute(request, computed, tokens),
                }
                self.client.send(offer_of(request.name, tokens, table[given:end], first=given, **more))
                given, computed = end, tokens

    def await_released(self) -> None:
        """Return once nobody reads what was offered. Raises RequestRejected."""
        for request in self.job.requests:
            self.ended(Released, (request.name,))

    def want_each(self) -> tuple[float, float, int]:
        """Want all. Returns the seconds of the first one, and the seconds and bytes of the others together.

        The first sets up the session, too: sockets, memory registration, a plan.
        """
        first, *rest = self.job.requests
        first_s, _ = self.want_all([first])
        return first_s, *self.want_all(rest)

    def want_all(self, requests: Sequence[DemoRequest]) -> tuple[float, int]:
        """Want all these requests. Returns the seconds from the first want to the last done, and the bytes moved."""
        size, began = self.job.shape.block_tokens, time.perf_counter()
        for request in requests:
            name, tokens = request.name, range(request.first_token, request.tokens)
            fence = self.leave(request)
            self.client.send(want_of(name, self.job.sender, tokens, self.tables[name], size, fence=fence))
        done = [self.ended(Done, (request.name,)) for request in requests]
        return time.perf_counter() - began, sum(message.moved_bytes for message in done)

    def fill_own(self) -> None:
        """Write the rows of every prompt."""
        for request in self.job.requests:
            self.fill(self.regions, request, self.job.shape.codec)

    def verify(self) -> str:
        """What is wrong with the memory, or "". Checks every wanted element, and for poison everywhere else."""
        job = self.job
        expected = [torch.full_like(region, POISON) for region in self.regions]
        for request in job.requests:
            self.fill(expected, request, job.sender_codec, has_zeros=True)
        found = zip(self.layers, self.regions, expected, strict=True)
        wrong = (first_difference(ours, wanted, job.shape, job.rank, layer) for layer, ours, wanted in found)
        return next(filter(None, wrong), "")

    def compute(self, request: DemoRequest, first_token: int, tokens: int) -> int:
        """Compute these tokens, which are there already. Returns the fence behind which they are."""
        return self.fence.mark()

    def leave(self, request: DemoRequest) -> int:
        """The fence behind which nobody else writes the blocks that this request wants."""
        return self.fence.mark()

    def fill(
        self, regions: Sequence[torch.Tensor], request: DemoRequest, codec: CodecName, has_zeros: bool = False
    ) -> None:
        for rows in self.rows(regions, request, codec, has_zeros):
            rows.put()

    def rows(
        self, regions: Sequence[torch.Tensor], request: DemoRequest, codec: CodecName, has_zeros: bool = False
    ) -> Iterator[DemoRows]:
        job, table = self.job, self.tables[request.name]
        for layer, region in zip(self.layers, regions, strict=True):
            tokens = torch.arange(request.first_token, request.tokens, device=region.device)
            yield from prepare(region, job.shape, job.rank, table, tokens, codec, layer, request.seed, has_zeros)
