"""Checks that move bytes, one route at a time: two agents, and two synthetic engines in this process."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from kvbridge_proto.peer import ROUTES, Route

from ..dataplane.resources import chosen_gpu
from ..errors import OperatorError
from ..loopback.engine import RequestRejected
from ..loopback.pair import attached, zeros
from ..loopback.pools import Shape
from ..loopback.processes import AgentProcess, agents
from ..options import AgentConfig
from ..routes.choice import SLOT_ROUTES
from ..routes.rate import SLOW_BYTES_PER_S
from .finding import DoctorCheck, Finding, Subject, failed, not_here, ok
from .neighbour import told

ON_GPU = tuple(name for name, route in SLOT_ROUTES.items() if route.is_on_gpus)
SHAPES = [Shape(name=name, axes="LPBHTE", block_tokens=32, blocks=64) for name in ("sender", "receiver")]  # 64 MiB
FIRST_TOKENS = 17  # a first request sets up the session, too: sockets, memory registration, a plan
TOKENS = 1024  # 32 MiB
COPIED_BYTES = 128 << 20
# The share of memcpy's rate, without a GPU. By pull and cma it was 0.5 to 0.8 GB/s of 6, beside other work (2 cores,
# Linux 6.18, 2026-11-23).
FLOOR_SHARE = 0.01
MOST_TRIES = 2  # at most: in the first a GPU's kernels may have to be compiled
UCX_SAYS = {"UCX_PROTO_INFO": "y"}  # UCX logs a table for each kind of operation, with the transports it chose
UCX_TABLE = re.compile(r"\| (?P<what>[a-z][^|]*?) +\|$")
UCX_ROW = re.compile(r"\| +(?P<range>\d[\w.]*) +\| (?P<how>[^|]+?) +\| (?P<by>[^|]+?) +\|$")
UCX_WRITE = re.compile(r"remote memory write .* from (?P<ours>[a-z]+).* to (?P<theirs>[a-z]+)")


def checks() -> Iterator[DoctorCheck]:
    """One for each route."""
    for route in ROUTES:
        yield DoctorCheck(f"route-{route}", f"route {route}", partial(carried, route))


def nixl(subject: Subject) -> Finding:
    """Whether NIXL starts with UCX, and which plugins it has."""
    try:
        return ok(told("nixl", subject.config.net_devices or "lo"))
    except OperatorError as error:
        return failed(str(error), "install kvbridge[agent]; unset UCX_TLS and UCX_NET_DEVICES; look at net_devices")


def carried(route: Route, subject: Subject) -> Finding:
    """Carry requests by this route between two agents of this machine. Checks every byte, the rate and UCX's choice."""
    config = subject.config
    gpu = chosen_gpu(config.device)
    if lacks := why_not_here(route, config, is_gpu=gpu is not None):
        return not_here(lacks)
    data, device = config.net_devices or "lo", gpu.device if gpu else "cpu"
    least = floor(is_gpu=gpu is not None)
    with tempfile.TemporaryDirectory(prefix="kvbridge-doctor-") as folder:
        names = ("sender", "receiver")
        started = agents(Path(folder), names, (device,), UCX_SAYS, routes=route, net_devices=data, log_level="info")
        with started as running:
            for _ in range(MOST_TRIES):
                outcome = _outcome(running, device)
                if outcome.wrong or outcome.moved_bytes >= least * outcome.seconds:
                    break
        transports = written_by("".join(agent.log.read_text(errors="replace") for agent in running))
    return _judged(route, outcome, transports, least, subject.environment)


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """How fast the second request was carried. `wrong` is empty if every element is right."""

    moved_bytes: int
    seconds: float
    wrong: str


def _outcome(agents: Sequence[AgentProcess], device: str) -> RouteOutcome:
    """Carry tokens from one agent's engine to the other's. Raises OperatorError (`demo_engine`)."""
    torch.set_num_threads(1)  # as in agents
    memory = [zeros(shape.rank_bytes, shape.layers if device != "cpu" else 1, device) for shape in SHAPES]
    for region in memory[0]:
        region.view(torch.int64).random_()
    try:
        with attached(agents, SHAPES, memory) as pair:
            pair.carry(FIRST_TOKENS)
            seconds, moved_bytes = pair.carry(TOKENS)
            wrong = pair.difference(range(TOKENS)) or pair.beside(range(TOKENS))
    except RequestRejected as error:
        raise OperatorError("demo_engine", str(error)) from None
    return RouteOutcome(moved_bytes, seconds, wrong)


def memcpy_bytes_per_s() -> float:
    """How fast this machine copies memory: the best of three."""
    sender, target = torch.ones(COPIED_BYTES, dtype=torch.uint8), torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(sender)
        best = min(best, time.perf_counter() - began)
    return COPIED_BYTES / best


def why_not_here(route: Route, config: AgentConfig, is_gpu: bool) -> str:
    """Why a route cannot work here, whatever the peer; "" if only a try can tell."""
    if route not in config.routes:
        return f"routes: {', '.join(config.routes)}"
    if route == "pull" and not config.share_memory:
        return "share_memory: false"
    return "only GPUs have this route, and there is none" if route in ON_GPU and not is_gpu else ""


def floor(is_gpu: bool) -> float:
    """Bytes per second below which something is wrong."""
    return SLOW_BYTES_PER_S if is_gpu else FLOOR_SHARE * memcpy_bytes_per_s()


def _judged(
    route: Route,
    outcome: RouteOutcome,
    transports: frozenset[str],
    floor_bytes_per_s: float,
    environment: dict[str, str],
) -> Finding:
    rate = outcome.moved_bytes / outcome.seconds
    text = f"{outcome.moved_bytes / 1e6:.0f} MB at {rate / 1e9:.2f} GB/s, floor {floor_bytes_per_s / 1e9:.2f}"
    if transports:
        text += f", by {', '.join(sorted(transports))}"
    if outcome.wrong:
        return failed(f"{text}: {outcome.wrong}", "report it: bytes landed that are not those that were sent")
    is_by_fabric = route in SLOT_ROUTES and SLOT_ROUTES[route].is_by_fabric
    if is_by_fabric and (slow := [each for each in transports if "tcp/" in each]):
        forced = "".join(f"; {name}={value} is set" for name, value in environment.items() if name.startswith("UCX_"))
        return failed(
            f"{text}: UCX fell back to TCP ({', '.join(slow)}) between two processes of one host{forced}",
            "unset UCX_TLS; see that ptrace (above) is ok, and on a GPU that the PID namespace is shared",
        )
    if is_by_fabric and not transports:
        return failed(f"{text}: UCX does not say by what it wrote", "report it with the version of nixl")
    if rate < floor_bytes_per_s:
        return failed(text, "look for what else keeps the machine busy, for limits of CPU, and at the other checks")
    return ok(text)


def written_by(log: str) -> frozenset[str]:
    """The transports UCX writes large pieces of remote memory with, such as "cma/memory", from its log.

    Other rows may say TCP: those for a few bytes, and those for what we never do, from host to GPU memory or back.
    """
    found, is_write = set(), False
    for line in log.splitlines():
        if row := UCX_ROW.search(line):
            if is_write and row["range"][-3:] == "inf":
                found.add(row["by"])
        elif (table := UCX_TABLE.search(line)) and table["what"] != "Range":
            write = UCX_WRITE.match(table["what"])
            is_write = write is not None and write["ours"] == write["theirs"]
    return frozenset(found)
