"""One rank of a synthetic engine, as a process: `python -m kvbridge.loopback.engine '<Job as JSON>'`.

It attaches memory as a real engine would, through adapters/engine/client.py. When a line comes on stdin it offers or
wants its requests. It reports in lines of JSON on stdout. On a GPU every layer has memory of its own if the layout
allows it, and offers and wants are sent with a fence while the stream is still at work.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import torch
import xxhash
from kvbridge_proto.common import OURS, Blocks, Rank
from kvbridge_proto.engine import Attach, Attached, Detach, Detached, Directory, Done, Failed, Offer, Refused, Released
from kvbridge_proto.engine import Want as WantMessage
from kvbridge_proto.pool import CodecName

from ..adapters.engine.client import EngineClient
from ..device.fence import EngineFence
from ..device.handles import export_all
from .pools import POISON, DemoRequest, DemoRows, Shape, describe, first_difference, prepare, tables

PATIENCE_S = 60.0
PIECE_TOKENS = 512
T = TypeVar("T")


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


class RequestRejected(Exception):
    """The agent refused, failed the request, or did not answer."""


class SyntheticEngine:
    """The rank's memory and its connection. `regions` is existing memory to use, of the same sizes."""

    def __init__(self, job: Job, regions: Sequence[torch.Tensor] = ()) -> None:
        assert job.device != "cpu" or not job.late_cycles, "late_cycles: a CPU has no stream to be late on"
        self.job = job
        self.layers = (None,) if job.device == "cpu" else job.shape.layers_apart
        sizes = [job.shape.rank_bytes // len(self.layers)] * len(self.layers)
        self.regions = list(regions) or [
            torch.full((size,), POISON, dtype=torch.uint8, device=job.device) for size in sizes
        ]
        self.tables = tables(job.shape, job.requests)
        self.client = EngineClient(job.socket)
        self.fence = None if job.device == "cpu" else EngineFence(job.device)
        self._heard: list[Any] = []

    @property
    def memory(self) -> torch.Tensor:
        """All memory, if one region holds it."""
        (memory,) = self.regions
        return memory

    def attach(self) -> None:
        job = self.job
        handles, fds = export_all(region.untyped_storage() for region in self.regions)
        if not self.client.connect(PATIENCE_S):
            raise RequestRejected(self.client.why)
        pool = describe(job.shape, job.rank, self.layers)
        fence_fd = len(fds) if self.fence else None
        attach = Attach(versions=OURS, pool=pool, handles=handles, fence_fd=fence_fd)
        self.client.send(attach, (*fds, self.fence.fd) if self.fence else fds)
        for fd in fds:
            os.close(fd)
        answer = self.wait(lambda message: isinstance(message, Attached | Refused))
        if isinstance(answer, Refused):
            raise RequestRejected(f"{answer.code}: {'; '.join(answer.reasons)}")
        ranks = tuple(Rank(tp_rank=i, pp_rank=0, address=address) for i, address in enumerate(job.ranks))
        self.client.send(Directory(ranks=ranks))

    def offer_all(self) -> None:
        """Offer the requests one after another, each in pieces, as a prompt is computed."""
        job = self.job
        for request in job.requests:
            given = computed = 0
            for tokens in [*range(PIECE_TOKENS, request.tokens, PIECE_TOKENS), request.tokens]:
                end = -(-tokens // job.shape.block_tokens)
                pieces = (Blocks(0, given, tuple(self.tables[request.name][given:end])),) if end > given else ()
                given = end
                fence, computed = self._compute(request, computed, tokens), tokens
                self.client.send(
                    Offer(
                        rendezvous=request.name,
                        request=request.name,
                        tokens=tokens,
                        blocks=pieces,
                        is_last=tokens == request.tokens,
                        hold_s=PATIENCE_S,
                        fence=fence,
                    )
                )
        for request in job.requests:
            self.ended(request.name, Released, Refused)

    def want(self, requests: Sequence[DemoRequest]) -> tuple[float, int]:
        """Want all these requests. Returns the seconds from the first want to the last done, and the bytes moved."""
        job, began = self.job, time.perf_counter()
        for request in requests:
            first = request.first_token // job.shape.block_tokens
            blocks = Blocks(0, first, tuple(self.tables[request.name][first:]))
            fence = self._leave(request)
            self.client.send(
                WantMessage(
                    request=request.name,
                    rendezvous=request.name,
                    sender=job.sender,
                    first_token=request.first_token,
                    end_token=request.tokens,
                    blocks=(blocks,),
                    deadline_s=PATIENCE_S,
                    fence=fence,
                )
            )
        done = [self.ended(request.name, Done, Failed, Refused) for request in requests]
        return time.perf_counter() - began, sum(message.moved_bytes for message in done)

    def detach(self) -> None:
        self.client.send(Detach())
        self.wait(lambda message: isinstance(message, Detached))
        self.close()

    def close(self) -> None:
        """Close the connection and the fence: the next engine's page may get the same address. Idempotent."""
        self.client.close()
        if self.fence is not None:
            self.fence.close()

    def fill_own(self) -> None:
        """Write the rows of every prompt. With `late_cycles` each piece is written when it is offered instead."""
        if not self.job.late_cycles:
            for request in self.job.requests:
                for rows in self._rows(self.regions, request, self.job.shape.codec):
                    rows.put()

    def verify(self) -> str:
        """What is wrong with the memory, or "". Checks every wanted element, and for poison everywhere else."""
        job = self.job
        expected = [torch.full_like(region, POISON) for region in self.regions]
        for request in job.requests:
            for rows in self._rows(expected, request, job.sender_codec):
                rows.put()
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
        return self.fence.mark() if self.fence and self.job.is_fenced else 0

    def _put_late(self, rows: Iterator[DemoRows]) -> None:
        ready = list(rows)  # copies from the host would wait for the kernel, so they come before it
        with torch.cuda.device(self.job.device):
            torch.cuda._sleep(self.job.late_cycles)
            for each in ready:
                each.put()

    def _rows(self, regions: Sequence[torch.Tensor], request: DemoRequest, codec: CodecName) -> Iterator[DemoRows]:
        job, table = self.job, self.tables[request.name]
        for layer, region in zip(self.layers, regions, strict=True):
            tokens = torch.arange(request.first_token, request.tokens, device=region.device)
            yield from prepare(region, job.shape, job.rank, table, tokens, codec, layer, request.seed)

    def wait(self, is_wanted: Callable[[Any], bool]) -> Any:
        """The first wanted message; others are kept. Raises RequestRejected after PATIENCE_S, or if disconnected."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self._heard += self.client.poll()
            for message in self._heard:
                if is_wanted(message):
                    self._heard.remove(message)
                    return message
            if not self.client.is_connected:
                raise RequestRejected(self.client.why)
            if time.monotonic() > end:
                raise RequestRejected(f"no answer in {PATIENCE_S:g} s")
            select.select([self.client], [], [], 0.02)

    def ended(self, name: str, good: type[T], *bad: type) -> T:
        """How this request ended. Raises RequestRejected unless it ended with `good`."""

        def is_its_end(message: Any) -> bool:
            named: tuple[Any, Any] = (getattr(message, "request", None), getattr(message, "about", None))
            return isinstance(message, (good, *bad)) and name in named

        message = self.wait(is_its_end)
        code: str = getattr(message, "code", "")
        if code or not isinstance(message, good):
            reason = getattr(message, "reason", "") or "; ".join(getattr(message, "reasons", ()))
            raise RequestRejected(f"{name}: {code}: {reason}")
        return message


def main() -> None:
    """Attach, wait for a line, do the job, report the result."""
    torch.set_num_threads(1)
    engine = SyntheticEngine(msgspec.json.decode(sys.argv[1], type=Job))
    try:
        engine.attach()
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
            first_s, _ = engine.want([first])  # includes setting up the session: sockets, memory registration, a plan
            seconds, moved_bytes = engine.want(rest)
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
