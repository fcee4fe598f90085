"""`kvbridge bench`: how fast each route of this machine is, beside a copy of the same bytes on the same devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from kvbridge_proto.peer import ROUTES, Route
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..config import resolve
from ..dataplane.resources import chosen_gpu
from ..doctor.pace import RECEIVERS, Bench, Pace
from ..doctor.routes import why_not_here
from ..errors import KVBridgeError, OperatorError, did_you_mean
from ..oneline import plain
from ..options import AgentConfig
from ..values import Value
from .console import stdout, write


class BenchOutcome(Value):
    """The result for a route: its paces, or why it does not exist here (`lacks`), or why it failed (`error`)."""

    route: Route
    paces: tuple[Pace, ...] = ()
    lacks: str = ""
    error: str = ""

    @property
    def is_bad(self) -> bool:
        return bool(self.error) or any(pace.is_slow for pace in self.paces)


def run(
    path: str | None,
    flags: Mapping[str, str | None],
    to: str,
    only: Sequence[str],
    seconds: float,
    most_bytes: int,
    as_json: bool,
) -> None:
    """Measure for `seconds`, all routes together, with requests of at most `most_bytes`, and print the results.

    Raises OperatorError for options that no agent starts with, and (`check_failed`) if a route is slow or failed.
    """
    config, _ = resolve(path, flags)
    known = ROUTES
    for name in only:
        if name not in known:
            raise OperatorError("bad_option", f"only: {name}: no such route; {did_you_mean(name, known)}")
    routes = [route for route in known if not only or route in only]
    devices = _devices(config, to)
    lacks = {route: why_not_here(route, config, is_gpu=devices[0] != "cpu") for route in routes}
    here = [route for route in routes if not lacks[route]]
    measured = _measured(devices, here, config.net_devices or "lo", seconds, most_bytes) if here else {}
    outcomes = [measured.get(route) or BenchOutcome(route, lacks=lacks[route]) for route in routes]
    if as_json:
        write([row for outcome in outcomes for row in _plain(outcome)])
    else:
        _show(stdout(), devices, outcomes)
    if bad := [outcome.route for outcome in outcomes if outcome.is_bad]:
        raise OperatorError(
            "check_failed", f"{len(bad)} of {len(routes)} routes: {', '.join(bad)}; see `kvbridge doctor`"
        )


def _devices(config: AgentConfig, to: str) -> tuple[str, str]:
    """The devices of the sending and of the receiving agent, as torch spells them."""
    ours = chosen_gpu(config.device)
    if ours is None:
        if to not in ("", "cpu"):
            raise OperatorError("bad_option", f"to: {to}, and the other agent has no GPU; name one with --device")
        return "cpu", "cpu"
    theirs = chosen_gpu(to or ours.device)
    if theirs is None:
        raise OperatorError("bad_option", f"to: {to}, must be a GPU, as the other agent's {ours.device} is")
    if not to and config.device == "auto" and torch.cuda.device_count() > 1:
        return ours.device, "cuda:1"
    return ours.device, theirs.device


def _measured(
    devices: tuple[str, str], routes: Sequence[Route], net_devices: str, seconds: float, most_bytes: int
) -> dict[Route, BenchOutcome]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    found = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("agents start")
        bench = Bench(devices, most_bytes)
        count = len(routes) * len(RECEIVERS) * len(bench.sizes)
        progress.update(task, total=count)
        with bench.agents(routes, net_devices) as running:
            for route in routes:

                def begun(pools: str, size_bytes: int, route: Route = route) -> None:
                    progress.update(task, description=f"{route}: {pools} pools, {_size(size_bytes)}", advance=1)

                paces: list[Pace] = []
                error = ""
                try:
                    for pace in bench.measure(route, running[route], seconds / count, begun):
                        paces.append(pace)
                except KVBridgeError as failure:
                    error = f"{failure.code}: {failure}"
                found[route] = BenchOutcome(route, tuple(paces), error=error)
    return found


def _show(console: Console, devices: tuple[str, str], outcomes: Sequence[BenchOutcome]) -> None:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns hold it
    for name in ("route", "pools", "size", "times", "p50 ms", "p99 ms", "GB/s", "copy", "of it", ""):
        table.add_column(name, justify="left" if name in ("route", "pools", "") else "right", no_wrap=True)
    for outcome in outcomes:
        for pace in outcome.paces:
            table.add_row(
                pace.route,
                pace.pools,
                _size(pace.size_bytes),
                str(len(pace.seconds)),
                f"{pace.p50_s * 1e3:.2f}",
                f"{pace.p99_s * 1e3:.2f}",
                f"{pace.bytes_per_s / 1e9:.2f}",
                f"{pace.ceiling / 1e9:.3g}" if pace.ceiling < 1e12 else f"{pace.ceiling / 1e9:.0f}",
                f"{pace.share:.3f}",
                _verdict(pace),
            )
    console.print(
        f"From {devices[0]} to {devices[1]}, one request at a time, from want to done. Mismatched pools: blocks of 16 "
        "tokens become blocks of 64 of another layout. Beside it, GB/s of a copy of the same bytes on the same devices."
    )
    if table.row_count:
        console.print(table)
    for outcome in outcomes:
        console.print(plain(_sentence(outcome)))


def _sentence(outcome: BenchOutcome) -> str:
    if outcome.lacks:
        return f"{outcome.route}: not here: {outcome.lacks}"
    if outcome.error:
        return f"{outcome.route}: FAILED: {outcome.error}"
    worst = min((pace for pace in outcome.paces if pace.floor), key=lambda pace: pace.share)
    word = "SLOW" if worst.is_slow else "ok"
    result = f"{_size(worst.size_bytes)} at {worst.share:.3f} of a copy or more, should be {worst.floor:g} or more"
    return f"{outcome.route}: {word}: {result}"


def _verdict(pace: Pace) -> str:
    return "SLOW" if pace.is_slow else "ok" if pace.floor else ""


def _plain(outcome: BenchOutcome) -> Iterator[dict[str, Any]]:
    """A row for each pace, and one if the route is not here or failed."""
    for pace in outcome.paces:
        yield {
            "route": pace.route,
            "outcome": "slow" if pace.is_slow else "ok",
            "pools": pace.pools,
            "size_bytes": pace.size_bytes,
            "times": len(pace.seconds),
            "p50_s": pace.p50_s,
            "p99_s": pace.p99_s,
            "bytes_per_s": pace.bytes_per_s,
            "copy_bytes_per_s": pace.ceiling,
            "share": pace.share,
            "floor": pace.floor,
        }
    if outcome.lacks:
        yield {"route": outcome.route, "outcome": "not here", "text": outcome.lacks}
    if outcome.error:
        yield {"route": outcome.route, "outcome": "failed", "text": outcome.error}


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 30} GiB" if size_bytes % (1 << 30) == 0 else f"{size_bytes >> 20} MiB"
