"""Carries requests between two synthetic engines of different shapes, each rank a process, and checks every element.

A rank is `python -m testing.jobs '<Job as JSON>'`. When a line comes on stdin it offers or wants its requests. It
reports in lines of JSON on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import xxhash
from rich.progress import Progress

from kvbridge.errors import OperatorError
from kvbridge.geometry.compat import Convertible, verdict
from kvbridge.loopback.engine import RequestRejected
from kvbridge.loopback.pools import Shape, describe
from kvbridge.loopback.processes import AGENT_START_S, AgentProcess
from testing.engine_process import EngineProcess
from testing.job_engine import DemoRequest, Job, JobEngine


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
    module: str = "testing.jobs",
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
        _all_say("ready", engines)
        for engine in engines:
            engine.tell("go")
        _follow(
            progress, f"{sender.name} -> {receiver.name}", _wire_bytes(sender, receiver, requests), after, receivers
        )
        moved, ends = _all_say("moved", receivers), _all_say("done", receivers)
        for engine in engines[: len(before)]:
            _all_say("released", [engine])
            engine.tell("go")
            _all_say("done", [engine])
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
    engine = EngineProcess(module, job, folder / f"{job.shape.name}-{job.rank}.err".replace("|", "-"))
    stack.callback(engine.close)
    return engine


def _all_say(event: str, engines: Sequence[EngineProcess]) -> list[dict[str, Any]]:
    """The next line of each, which is this event. Raises OperatorError (`demo_engine`)."""
    try:
        return [engine.wait_for(event, AGENT_START_S) for engine in engines]
    except AssertionError as error:
        raise OperatorError("demo_engine", f"engine {error}") from None


def _follow(
    progress: Progress, title: str, total: int, after: Sequence[AgentProcess], receivers: Sequence[EngineProcess]
) -> None:
    """Show the bytes that the receivers' agents have moved, until every receiver has reported."""
    task = progress.add_task(title, total=total)
    began = sum(map(moved_bytes, after))
    while not all(receiver.said or receiver.hear() or receiver.is_dead() for receiver in receivers):
        progress.update(task, completed=min(total, sum(map(moved_bytes, after)) - began))
        time.sleep(0.05)
    progress.update(task, completed=total)


def moved_bytes(agent: AgentProcess) -> float:
    """How many bytes this agent has received so far."""
    return agent.status().counters.get("kvbridge_wire_bytes_total{role=receiver}", 0.0)


def _wire_bytes(sender: Shape, receiver: Shape, requests: Sequence[DemoRequest]) -> int:
    """The bytes to move: the narrower side's rows, since each receiver rank takes its own heads."""
    tokens = sum(request.tokens - request.first_token for request in requests)
    return tokens * min(sender.token_bytes, receiver.token_bytes)


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
            engine.await_released()
            _say("released")
            sys.stdin.readline()  # a sender that leaves would cut off transfers under way
            engine.detach()
            _say("done")
        else:
            first_s, seconds, moved_bytes = engine.want_each()
            _say("moved", first_s=first_s, seconds=seconds, moved_bytes=moved_bytes)
            wrong = engine.verify()
            engine.detach()
            _say("done", wrong=wrong, digest=_digest(engine))
    except RequestRejected as error:
        _say("failed", reason=str(error))
        sys.exit(1)


def _digest(engine: JobEngine) -> str:
    """The digest of every byte, region after region."""
    digest = xxhash.xxh3_64()
    for region in engine.regions:
        digest.update(region.cpu().numpy().data)
    return digest.hexdigest()


def _say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


if __name__ == "__main__":
    main()
