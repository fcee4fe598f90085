"""`python -m demo`: carries KV between synthetic engines of different shapes, and checks every element."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from kvbridge.doctor.routes import memcpy_bytes_per_s
from kvbridge.errors import KVBridgeError
from kvbridge.loopback.pools import Shape
from kvbridge.loopback.processes import agents, tail
from testing.job_engine import DemoRequest
from testing.jobs import PairOutcome, carry

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


def run(
    pairs: Sequence[tuple[Shape, Shape]] = PAIRS,
    requests: Sequence[DemoRequest] = REQUESTS,
    devices: Sequence[str] = ("cpu",),
    routes: str = "direct,nixl,host",
) -> None:
    """Agents take `devices` in turn. Exit code 1 if an element is wrong. Raises KVBridgeError if anything failed."""
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


def _report(console: Console, outcomes: Sequence[PairOutcome], seconds: float) -> None:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))  # fits in 80 columns
    for column in ("from, to", "converted", "MB", "ms", "GB/s", "digest", "check"):
        is_number = column in ("MB", "ms", "GB/s")
        # Only `converted` may wrap if numbers are long: the other columns cannot be read if cut off.
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
    """`block_tokens: sender 16, receiver 64 (...)` as `block 16 -> 64`; without a layout's axes, which are too long."""
    field, _, values = change.partition(" (")[0].partition(": sender ")
    sender, _, receiver = values.partition(", receiver ")
    field = field.removesuffix("_tokens").removesuffix("_size")
    return field if ">" in values else f"{field} {sender} -> {receiver}"
