"""The engine of a job: a rank of a synthetic engine with the content of its requests.

On a GPU every layer has memory of its own if the layout allows it, and offers and wants are sent with a fence while the
stream is still at work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import torch
from kvbridge_proto.engine import Done, Released
from kvbridge_proto.pool import CodecName

from kvbridge.loopback.engine import SyntheticEngine
from kvbridge.loopback.messages import offer_of, want_of
from kvbridge.loopback.pools import Shape, describe, scattered
from testing.made_rows import POISON, DemoRows, first_difference, prepare

PIECE_TOKENS = 512


class DemoRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. The receiver already has the tokens before `first_token`."""

    name: str
    tokens: int
    first_token: int = 0
    seed: int = 0


def tables(shape: Shape, requests: Sequence[DemoRequest]) -> dict[str, list[int]]:
    """The blocks of every request. The same on every rank."""
    free = scattered(shape)
    return {request.name: [free.pop() for _ in range(-(-request.tokens // shape.block_tokens))] for request in requests}


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
