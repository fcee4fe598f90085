"""Carries requests between two synthetic engines of different shapes, and checks every element."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from rich.progress import Progress

from ..geometry.compat import Convertible, verdict
from .job import Job
from .pools import DemoRequest, Shape, describe
from .processes import AgentProcess, EngineProcess, end, moved_bytes


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """The result of one pair. `wrong` is empty if every element was right."""

    sender: Shape
    receiver: Shape
    changes: tuple[str, ...]
    moved_bytes: int
    first_s: float
    seconds: float
    digests: tuple[str, ...]
    wrong: str


def carry(
    folder: Path,
    running: Sequence[AgentProcess],
    sender: Shape,
    receiver: Shape,
    requests: list[DemoRequest],
    progress: Progress,
    module: str = "kvbridge.loopback.job",
    told: Callable[[Job], Job] = lambda job: job,
) -> PairOutcome:
    """One pair: start the engines, carry the requests, and let the receivers check their memory.

    The engines run `module`, and are given what `told` makes of their jobs.
    """
    before, after = running[: sender.tp_size], running[sender.tp_size : sender.tp_size + receiver.tp_size]
    with ExitStack() as stack:
        origin = {"sender": before[0].address, "sender_codec": sender.codec}
        jobs = [*_jobs("sender", sender, before, requests), *_jobs("receiver", receiver, after, requests, **origin)]
        engines = [_start(folder, stack, module, told(job)) for job in jobs]
        receivers = engines[len(before) :]
        for engine in engines:
            engine.hear("ready")
        for engine in engines:
            engine.go()
        _follow(
            progress, f"{sender.name} -> {receiver.name}", _wire_bytes(sender, receiver, requests), after, receivers
        )
        moved = [engine.hear("moved") for engine in receivers]
        ends = [engine.hear("done") for engine in receivers]
        for engine in engines[: len(before)]:
            engine.hear("released")
            engine.go()
            engine.hear("done")
    judged = verdict(describe(sender, 0), describe(receiver, 0))
    return PairOutcome(
        sender,
        receiver,
        judged.changes if isinstance(judged, Convertible) else (),
        sum(told["moved_bytes"] for told in moved),
        max(told["first_s"] for told in moved),
        max(told["seconds"] for told in moved),
        tuple(told["digest"] for told in ends),
        "; ".join(told["wrong"] for told in ends if told["wrong"]),
    )


def _jobs(
    role: Literal["sender", "receiver"],
    shape: Shape,
    beside: Sequence[AgentProcess],
    requests: list[DemoRequest],
    **more: Any,
) -> Iterator[Job]:
    ranks = tuple(agent.address for agent in beside)
    for rank, agent in enumerate(beside):
        device = agent.options["device"]
        yield Job(
            role=role,
            shape=shape,
            rank=rank,
            socket=agent.socket,
            ranks=ranks,
            requests=requests,
            device=device,
            **more,
        )


def _start(folder: Path, stack: ExitStack, module: str, job: Job) -> EngineProcess:
    name = f"{job.shape.name} rank {job.rank}"
    command = [sys.executable, "-m", module, msgspec.json.encode(job).decode()]
    engine = EngineProcess(name, command, folder / f"{job.shape.name}-{job.rank}.err".replace("|", "-"))
    stack.callback(end, engine.process)
    return engine


def _follow(
    progress: Progress, title: str, total: int, after: Sequence[AgentProcess], receivers: Sequence[EngineProcess]
) -> None:
    """Show the bytes that the receivers' agents have moved, until every receiver has reported."""
    task = progress.add_task(title, total=total)
    began = sum(map(moved_bytes, after))
    while not all(receiver.is_heard() for receiver in receivers):
        progress.update(task, completed=min(total, sum(map(moved_bytes, after)) - began))
        time.sleep(0.05)
    progress.update(task, completed=total)


def _wire_bytes(sender: Shape, receiver: Shape, requests: Sequence[DemoRequest]) -> int:
    """The bytes to move: the narrower side's rows, since each receiver rank takes its own heads."""
    tokens = sum(request.tokens - request.first_token for request in requests)
    return tokens * min(sender.token_bytes, receiver.token_bytes)


def memcpy_bytes_per_s(size_bytes: int = 128 << 20) -> float:
    """How fast this machine copies memory: the best of three."""
    sender, target = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(sender)
        best = min(best, time.perf_counter() - began)
    return size_bytes / best
