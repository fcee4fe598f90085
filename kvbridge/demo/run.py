"""`kvbridge demo`: pairs of synthetic engines that disagree, an agent beside each rank, every element checked."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from ..errors import KVBridgeError
from ..geometry.compat import Convertible, verdict
from .engine import Job
from .pools import DemoRequest, Shape, describe
from .processes import AgentProcess, EngineProcess, agents, end, moved_bytes, tail

NAMES = ("a", "b", "c")
REQUESTS = (
    DemoRequest(name="short prompt", tokens=17, seed=1),
    DemoRequest(name="long prompt", tokens=4096, seed=2),
    DemoRequest(name="prefix already there", tokens=1777, first_token=1000, seed=3),
)
PAIRS = (
    (
        Shape(name="NHD", axes="LPBTHE", block_tokens=16, blocks=400, tp_size=2),
        Shape(name="HND", axes="LPBHTE", block_tokens=64, blocks=100, codec="fp8_e4m3", scale=0.03125),
    ),
    (
        Shape(name="K|V packed HND", axes="LBHTPE", block_tokens=32, blocks=200),
        Shape(name="cross-layer NHD", axes="BLPTHE", block_tokens=48, blocks=140, tp_size=2),
    ),
    (
        Shape(name="HND twin", axes="LPBHTE", block_tokens=32, blocks=200),
        Shape(name="HND other twin", axes="LPBHTE", block_tokens=32, blocks=200),
    ),
)


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """How one pair went; `wrong` is empty when every element was right."""

    sender: Shape
    receiver: Shape
    changes: tuple[str, ...]
    moved_bytes: int
    first_s: float
    seconds: float
    digests: tuple[str, ...]
    wrong: str


def run(
    pairs: Sequence[tuple[Shape, Shape]] = PAIRS,
    requests: Sequence[DemoRequest] = REQUESTS,
    devices: Sequence[str] = ("cpu",),
    routes: str = "direct,nixl,host",
) -> None:
    """`devices` are dealt out to the agents in turn. Exit code 1 if anything failed or any element is wrong."""
    console = Console()
    began = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as folder, ExitStack() as stack:
        console.print("starting three agents (ZeroMQ and NIXL on this machine) ...")
        running = stack.enter_context(agents(Path(folder), NAMES, devices, routes=routes))
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console
        )
        with progress:
            try:
                outcomes = [carry(Path(folder), running, *pair, list(requests), progress) for pair in pairs]
            except KVBridgeError:
                for agent in running:
                    console.print(f"[bold]{agent.name}[/bold]\n{tail(agent.log)}", markup=True, highlight=False)
                raise
    _report(console, outcomes, time.monotonic() - began)
    if any(outcome.wrong for outcome in outcomes):
        raise typer.Exit(1)


def carry(
    folder: Path,
    running: Sequence[AgentProcess],
    sender: Shape,
    receiver: Shape,
    requests: list[DemoRequest],
    progress: Progress,
    late_cycles: int = 0,
    unfenced: str = "",
) -> DemoOutcome:
    """One pair: start the engines, let the requests flow, hear what the receivers found in their memory.

    With `late_cycles` both sides are late (see Job); or only the `unfenced` one, which the other must not outlast.
    """
    before, after = running[: sender.tp_size], running[sender.tp_size : sender.tp_size + receiver.tp_size]

    def late(role: str) -> dict[str, Any]:
        return {"late_cycles": late_cycles if unfenced in ("", role) else 0, "is_fenced": role != unfenced}

    with ExitStack() as stack:
        origin = {"sender": before[0].address, "sender_codec": sender.codec}
        jobs = [*_jobs("sender", sender, before, requests, **late("sender"))]
        jobs += _jobs("receiver", receiver, after, requests, **origin, **late("receiver"))
        engines = [_start(folder, stack, job) for job in jobs]
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
    return DemoOutcome(
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


def _start(folder: Path, stack: ExitStack, job: Job) -> EngineProcess:
    name = f"{job.shape.name} rank {job.rank}"
    command = [sys.executable, "-m", "kvbridge.demo.engine", msgspec.json.encode(job).decode()]
    engine = EngineProcess(name, command, folder / f"{job.shape.name}-{job.rank}.err".replace("|", "-"))
    stack.callback(end, engine.process)
    return engine


def _follow(
    progress: Progress, title: str, total: int, after: Sequence[AgentProcess], receivers: Sequence[EngineProcess]
) -> None:
    """Draw what the receivers' agents say they have moved, until every receiver has spoken."""
    task = progress.add_task(title, total=total)
    began = sum(map(moved_bytes, after))
    while not all(receiver.is_heard() for receiver in receivers):
        progress.update(task, completed=min(total, sum(map(moved_bytes, after)) - began))
        time.sleep(0.05)
    progress.update(task, completed=total)


def _wire_bytes(sender: Shape, receiver: Shape, requests: Sequence[DemoRequest]) -> int:
    """The narrower side's rows; each receiver rank takes its own heads."""
    tokens = sum(request.tokens - request.first_token for request in requests)
    return tokens * min(sender.token_bytes, receiver.token_bytes)


def _report(console: Console, outcomes: Sequence[DemoOutcome], seconds: float) -> None:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns hold it
    for column in ("from, to", "converted", "MB", "ms", "GB/s", "digest", "check"):
        is_number = column in ("MB", "ms", "GB/s")
        # The one that gives way where numbers are long: what is cut off elsewhere cannot be read.
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "converted")
    for outcome in outcomes:
        table.add_row(
            f"{_words(outcome.sender)}\n{_words(outcome.receiver)}",
            "\n".join(map(_short, outcome.changes)) or "nothing",
            f"{outcome.moved_bytes / 1e6:.0f}",
            f"{outcome.seconds * 1e3:.0f}",
            f"{outcome.moved_bytes / outcome.seconds / 1e9:.2f}",
            "\n".join(digest[:8] for digest in outcome.digests),
            "WRONG" if outcome.wrong else "exact",
            end_section=True,
        )
    console.print("Every element of every receiver was compared, bit for bit:")
    console.print(table)
    for outcome in outcomes:
        if outcome.wrong:
            console.print(f"[bold red]WRONG[/bold red] {outcome.receiver.name}: {outcome.wrong}")
    first = ", ".join(f"{outcome.first_s * 1e3:.0f}" for outcome in outcomes)
    console.print(f"The first token of each pair, with handshake and wiring up, took {first} ms.")
    console.print(f"memcpy on this machine: {memcpy_bytes_per_s() / 1e9:.1f} GB/s. Whole demo: {seconds:.0f} s.")


def _words(shape: Shape) -> str:
    return f"{shape.name}, TP {shape.tp_size}\n  {shape.codec}, block {shape.block_tokens}"


def _short(change: str) -> str:
    """`block_tokens: sender 16, receiver 64 (...)` as `block 16 -> 64`; a layout's axes are too long for a table."""
    field, _, values = change.partition(" (")[0].partition(": sender ")
    sender, _, receiver = values.partition(", receiver ")
    field = field.removesuffix("_tokens").removesuffix("_size")
    return field if ">" in values else f"{field} {sender} -> {receiver}"


def memcpy_bytes_per_s(size_bytes: int = 128 << 20) -> float:
    """The best of three."""
    sender, target = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(sender)
        best = min(best, time.perf_counter() - began)
    return size_bytes / best
