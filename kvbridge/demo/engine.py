"""One rank of a synthetic engine, as a process: `python -m kvbridge.demo.engine '<Job as JSON>'`.

It attaches memory as a real engine would, through adapters/client.py, offers or wants its requests when a line comes
on stdin, and reports in lines of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import torch
import xxhash
from kvbridge_proto.engine import Attach, Attached, Detach, Detached, Directory, Done, Failed, Offer, Refused, Released
from kvbridge_proto.engine import Want as WantMessage
from kvbridge_proto.pool import CodecName
from kvbridge_proto.words import OURS, Blocks, Rank

from ..adapters.client import EngineClient
from ..device.handles import export
from .pools import POISON, Request, Shape, describe, fill, first_difference, tables

PATIENCE_S = 60.0
PIECE_TOKENS = 512
T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What this rank is and does. `ranks` are the agents of its engine; a sink is told one agent of the source."""

    role: Literal["source", "sink"]
    shape: Shape
    rank: int
    socket: str
    ranks: tuple[str, ...]
    requests: list[Request]
    source: str = ""
    source_codec: CodecName = "bf16"


class Rejected(Exception):
    """The agent said no, or nothing."""


class SyntheticEngine:
    """The rank's memory and its connection."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.memory = torch.full((job.shape.rank_bytes,), POISON, dtype=torch.uint8)
        self.tables = tables(job.shape, job.requests)
        self.client = EngineClient(job.socket)
        self._heard: list[Any] = []

    def attach(self) -> None:
        job = self.job
        handle, fd = export(self.memory.untyped_storage(), region=0, fd_index=0)
        if not self.client.connect(PATIENCE_S):
            raise Rejected(self.client.why)
        pool = describe(job.shape, job.rank)
        self.client.send(Attach(versions=OURS, pool=pool, handles=(handle,)), (fd,))
        os.close(fd)
        answer = self.wait(lambda message: isinstance(message, Attached | Refused))
        if isinstance(answer, Refused):
            raise Rejected(f"{answer.code}: {'; '.join(answer.reasons)}")
        ranks = tuple(Rank(tp_rank=i, pp_rank=0, address=address) for i, address in enumerate(job.ranks))
        self.client.send(Directory(ranks=ranks))

    def offer_all(self) -> None:
        """As a prompt is computed: some tokens at a time, every request in turn."""
        job = self.job
        for request in job.requests:
            given = 0
            for tokens in [*range(PIECE_TOKENS, request.tokens, PIECE_TOKENS), request.tokens]:
                end = -(-tokens // job.shape.block_tokens)
                pieces = (Blocks(0, given, tuple(self.tables[request.name][given:end])),) if end > given else ()
                given = end
                self.client.send(
                    Offer(
                        room=request.name,
                        request=request.name,
                        tokens=tokens,
                        blocks=pieces,
                        is_last=tokens == request.tokens,
                        hold_s=PATIENCE_S,
                    )
                )
        for request in job.requests:
            self._ended(request.name, Released, Refused)

    def want(self, requests: Sequence[Request]) -> tuple[float, int]:
        """Seconds from the first want to the last done, and bytes moved."""
        job, began = self.job, time.perf_counter()
        for request in requests:
            first = request.first_token // job.shape.block_tokens
            blocks = Blocks(0, first, tuple(self.tables[request.name][first:]))
            self.client.send(
                WantMessage(
                    request=request.name,
                    room=request.name,
                    source=job.source,
                    first_token=request.first_token,
                    end_token=request.tokens,
                    blocks=(blocks,),
                    deadline_s=PATIENCE_S,
                )
            )
        done = [self._ended(request.name, Done, Failed, Refused) for request in requests]
        return time.perf_counter() - began, sum(message.moved_bytes for message in done)

    def detach(self) -> None:
        self.client.send(Detach())
        self.wait(lambda message: isinstance(message, Detached))
        self.client.close()

    def fill_own(self) -> None:
        for request in self.job.requests:
            fill(self.memory, self.job.shape, self.job.rank, self.tables[request.name], request, self.job.shape.codec)

    def verify(self) -> str:
        """What is wrong with the memory, or nothing: every wanted element, and poison everywhere else."""
        job = self.job
        expected = torch.full_like(self.memory, POISON)
        for request in job.requests:
            fill(expected, job.shape, job.rank, self.tables[request.name], request, job.source_codec)
        return first_difference(self.memory, expected, job.shape, job.rank)

    def wait(self, is_wanted: Callable[[Any], bool]) -> Any:
        """The first message that is wanted; others stay. Raises Rejected by its deadline."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self._heard += self.client.poll()
            for message in self._heard:
                if is_wanted(message):
                    self._heard.remove(message)
                    return message
            if not self.client.is_connected:
                raise Rejected(self.client.why)
            if time.monotonic() > end:
                raise Rejected(f"no answer in {PATIENCE_S:g} s")
            select.select([self.client], [], [], 0.02)

    def _ended(self, name: str, good: type[T], *bad: type) -> T:
        def is_its_end(message: Any) -> bool:
            named: tuple[Any, Any] = (getattr(message, "request", None), getattr(message, "about", None))
            return isinstance(message, (good, *bad)) and name in named

        message = self.wait(is_its_end)
        code: str = getattr(message, "code", "")
        if code or not isinstance(message, good):
            reason = getattr(message, "reason", "") or "; ".join(getattr(message, "reasons", ()))
            raise Rejected(f"{name}: {code}: {reason}")
        return message


def main() -> None:
    """Attach, wait for a line, do the job, say how it went."""
    torch.set_num_threads(1)
    engine = SyntheticEngine(msgspec.json.decode(sys.argv[1], type=Job))
    try:
        engine.attach()
        if engine.job.role == "source":
            engine.fill_own()
        _say("ready")
        sys.stdin.readline()
        if engine.job.role == "source":
            engine.offer_all()
            _say("released")
            sys.stdin.readline()  # a source that leaves takes what is still on its way with it
            engine.detach()
            _say("done")
        else:
            first, *rest = engine.job.requests
            first_s, _ = engine.want([first])  # the two agents meet: sockets, memory registration, a plan
            seconds, moved_bytes = engine.want(rest)
            _say("moved", first_s=first_s, seconds=seconds, moved_bytes=moved_bytes)
            wrong = engine.verify()
            engine.detach()
            digest = xxhash.xxh3_64_hexdigest(engine.memory.numpy().data)
            _say("done", wrong=wrong, digest=digest)
    except Rejected as error:
        _say("failed", reason=str(error))
        sys.exit(1)


def _say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


if __name__ == "__main__":
    main()
