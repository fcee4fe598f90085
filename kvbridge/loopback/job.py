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
    """What this rank is and does. `ranks` are the agents of its engine; a receiver knows one agent of the sender.

    With `late_cycles`, on a GPU only, a kernel of that many cycles runs before every piece that a sender computes, and
    before the last write by the former owner of the blocks that a receiver wants. An agent that does not wait for the
    fence then leaves wrong rows.
    """

    role: Literal["sender", "receiver"]
    shape: Shape
    rank: int
    socket: str
    ranks: tuple[str, ...]
    requests: list[DemoRequest]
    sender: str = ""
    sender_codec: CodecName = "bf16"
    device: str = "cpu"
    late_cycles: int = 0
    is_fenced: bool = True  # if False, offers and wants claim that the stream has finished


class JobEngine(SyntheticEngine):
    """The engine of a job, with the content of its requests."""

    def __init__(self, job: Job) -> None:
        assert job.device != "cpu" or not job.late_cycles, "late_cycles: a CPU has no stream to be late on"
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
                    "fence": self._compute(request, computed, tokens),
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
            fence = self._leave(request)
            self.client.send(want_of(name, self.job.sender, tokens, self.tables[name], size, fence=fence))
        done = [self.ended(Done, (request.name,)) for request in requests]
        return time.perf_counter() - began, sum(message.moved_bytes for message in done)

    def fill_own(self) -> None:
        """Write the rows of every prompt. With `late_cycles` each piece is written when it is offered instead."""
        if not self.job.late_cycles:
            for request in self.job.requests:
                self._fill(self.regions, request, self.job.shape.codec)

    def verify(self) -> str:
        """What is wrong with the memory, or "". Checks every wanted element, and for poison everywhere else."""
        job = self.job
        expected = [torch.full_like(region, POISON) for region in self.regions]
        for request in job.requests:
            self._fill(expected, request, job.sender_codec, has_zeros=True)
        found = zip(self.layers, self.regions, expected, strict=True)
        wrong = (first_difference(ours, wanted, job.shape, job.rank, layer) for layer, ours, wanted in found)
        return next(filter(None, wrong), "")

    def digest(self) -> str:
        """The digest of every byte, region after region."""
        digest = xxhash.xxh3_64()
        for region in self.regions:
            digest.update(region.cpu().numpy().data)
        return digest.hexdigest()

    def _compute(self, request: DemoRequest, first_token: int, tokens: int) -> int:
        """Compute these tokens. Returns the fence behind which they are there."""
        if self.job.late_cycles and tokens > request.first_token:
            first_token = max(first_token, request.first_token)
            piece = msgspec.structs.replace(request, first_token=first_token, tokens=tokens)
            self._put_late(self._rows(self.regions, piece, self.job.shape.codec))
        return self._mark()

    def _leave(self, request: DemoRequest) -> int:
        """Let the former owner write for the last time. Returns the fence behind which nobody else writes."""
        if self.job.late_cycles:
            former = msgspec.structs.replace(request, seed=request.seed + 1)
            self._put_late(self._rows(self.regions, former, self.job.sender_codec))
        return self._mark()

    def _mark(self) -> int:
        return self.fence.mark() if self.job.is_fenced else 0

    def _put_late(self, rows: Iterator[DemoRows]) -> None:
        ready = list(rows)  # copies from the host would wait for the kernel, so they come before it
        with torch.cuda.device(self.job.device):
            torch.cuda._sleep(self.job.late_cycles)
            for each in ready:
                each.put()

    def _fill(
        self, regions: Sequence[torch.Tensor], request: DemoRequest, codec: CodecName, has_zeros: bool = False
    ) -> None:
        for rows in self._rows(regions, request, codec, has_zeros):
            rows.put()

    def _rows(
        self, regions: Sequence[torch.Tensor], request: DemoRequest, codec: CodecName, has_zeros: bool = False
    ) -> Iterator[DemoRows]:
        job, table = self.job, self.tables[request.name]
        for layer, region in zip(self.layers, regions, strict=True):
            tokens = torch.arange(request.first_token, request.tokens, device=region.device)
            yield from prepare(region, job.shape, job.rank, table, tokens, codec, layer, request.seed, has_zeros)


def main() -> None:
    """Attach, wait for a line, do the job, report the result."""
    torch.set_num_threads(1)
    engine = JobEngine(msgspec.json.decode(sys.argv[1], type=Job))
    try:
        engine.attach(engine.job.ranks)
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
