"""One rank of a synthetic engine, as a process: `python -m kvbridge.loopback.job '<Job as JSON>'`.

When a line comes on stdin it offers or wants its requests. It reports in lines of JSON on stdout. On a GPU every layer
has memory of its own if the layout allows it, and offers and wants are sent with a fence while the stream is still at
work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch
import xxhash
from kvbridge_proto.engine import Done, Released
from kvbridge_proto.pool import CodecName

from .engine import RequestRejected, SyntheticEngine
from .messages import offer_of, want_of
from .pools import POISON, DemoRequest, DemoRows, Shape, describe, first_difference, prepare, tables

PIECE_TOKENS = 512


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
        for request in self.job.requests:
            self.ended(Released, (request.name,))

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

    def digest(self) -> str:
        """The digest of every byte, region after region."""
        digest = xxhash.xxh3_64()
        for region in self.regions:
            digest.update(region.cpu().numpy().data)
        return digest.hexdigest()

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


def main(kind: type[JobEngine] = JobEngine, job: type[Job] = Job) -> None:
    """Attach, wait for a line, do the job, report the result."""
    torch.set_num_threads(1)
    engine = kind(msgspec.json.decode(sys.argv[1], type=job))
    try:
        engine.join(engine.job.ranks)
        if engine.job.role == "sender":
            engine.fill_own()
        _say("ready")
        sys.stdin.readline()
        if engine.job.role == "sender":
            engine.offer_all()
            _say("released")
            sys.stdin.readline()  # a sender that leaves would cut off transfers under way
            engine.detach()
            _say("done")
        else:
            first, *rest = engine.job.requests
            first_s, _ = engine.want_all([first])  # sets up the session too: sockets, memory registration, a plan
            seconds, moved_bytes = engine.want_all(rest)
            _say("moved", first_s=first_s, seconds=seconds, moved_bytes=moved_bytes)
            wrong = engine.verify()
            engine.detach()
            _say("done", wrong=wrong, digest=engine.digest())
    except RequestRejected as error:
        _say("failed", reason=str(error))
        sys.exit(1)


def _say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


if __name__ == "__main__":
    main()
