"""Every route end to end, through real agents, between engines in processes of their own.

A transfer's time is what the receiver's engine waits: from its Want until it reads Done. The prompt is offered before.
Each pair is checked bit for bit when it is first carried. Its first transfer also meets the peer and proves the route,
so it is reported apart from the others.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.gpu.fleet import MISMATCHED, Fleet, Joined, Pair, fleet, pairs
from bench.gpu.place import MIB, Place
from bench.scenario import Problem
from bench.timing import spread
from testing.proc import cpu_s

AT_ONCE_TOKENS = 1024
IDLE_S = 5.0
LEAST_CAPACITY_BYTES = 2 << 30  # so large that repeated small requests do not find their bytes in a cache
LARGEST_HOST_BYTES = 2 << 30
# About how long a configuration takes: pools, attaching, the first transfer, the check, the timed transfers.
CONFIGURATION_S = 8.0
SMALL = ("NHD -> HND", "block 16 -> 64", "TP 2 -> 1", "bf16 -> fp8")
QUICK = {"direct": (MISMATCHED, "bf16 -> fp8"), "host": (MISMATCHED,)}  # all of SMALL[2:] on the other routes
GAPS_S = (0.001, 0.020)  # between wants: what has just run, and what has slept


@dataclass(frozen=True, slots=True)
class Case:
    tokens: int
    requests: int = 1
    repeats: int = 10
    gap_s: float = 0.0  # between wants, about


def routes(place: Place) -> dict[str, list[dict[str, Any]]]:
    """Rows for transfers, and for idle agents."""
    rows: list[dict[str, Any]] = []
    idle: list[dict[str, Any]] = []
    with ExitStack() as stack:
        started = [stack.enter_context(fleet(place, route, {})) for route in place.routes]
        ended = [_route(place, each, stack, rows) for each in started]
        try:
            idle = _idle(place, [each for each in ended if each.is_alive])
        except Problem as problem:
            place.bench.problem("idle agents", problem)
    return {"transfers": rows, "idle": idle}


def _route(place: Place, each: Fleet, stack: ExitStack, rows: list[dict[str, Any]]) -> Fleet:
    """Measure all configurations of a route. Returns the fleet, which is replaced at most twice if a process dies."""
    suffixes = ["-again", "-once-more"]
    for pair, is_same_gpu in _configurations(place, each.route):
        what = f"{each.route} | {pair.name}{' | same GPU' if is_same_gpu else ''}"
        if not place.is_time_for(what, CONFIGURATION_S if place.is_gpu else 1):
            break
        try:
            each.wait_serving()
            _configuration(place, each, pair, is_same_gpu, rows)
        except Problem as problem:
            place.bench.problem(what, problem)
            if each.is_alive:
                continue
            if not suffixes:
                place.bench.problem(f"route {each.route}", "the rest is skipped: its processes keep dying")
                break
            each = stack.enter_context(fleet(place, each.route, {}, suffixes.pop(0)))
    return each


def _configurations(place: Place, route: str) -> Iterator[tuple[Pair, bool]]:
    """What is carried over a route: (pair, on one GPU)."""
    known = pairs(place.shape)
    every = (MISMATCHED, "equal", *SMALL)
    names = QUICK.get(route, (MISMATCHED, "equal", *SMALL[2:])) if place.extent == "quick" else every
    for name in names:
        yield known[name], False
    if place.sender != place.receiver and place.extent == "full":
        yield known["equal"], True
        yield known[MISMATCHED], True


def _cases(place: Place, route: str, pair: Pair) -> list[Case]:
    """One request of each size, then some at once, then many of one block."""
    block = 1 if place.is_gpu else 4
    if pair.name in SMALL:
        sizes: Sequence[int] = tuple(tokens for tokens in (1024, 16384) if tokens in place.tokens) or place.tokens[-1:]
    else:
        sizes = place.tokens
    cases = [Case(tokens, repeats=_repeats(place, route, tokens * pair.wire_token_bytes)) for tokens in sizes]
    if pair.name in SMALL:
        return cases
    if route == "host":
        cases = [case for case in cases if case.tokens * pair.wire_token_bytes <= LARGEST_HOST_BYTES]
        return [*cases, Case(16, repeats=200)]
    if place.is_gpu:
        cases += [Case(AT_ONCE_TOKENS, requests, 6 if requests < 64 else 3) for requests in (8, 64)]
        cases.append(Case(16, repeats=400 if place.extent == "full" else 200))
        paced = _paced(pair) if route == "pull" else []
        return cases + [case for case in paced if case.gap_s or case.tokens not in place.tokens]
    return [*cases, Case(64, 8, 2), Case(16 * block, repeats=40), Case(64, repeats=5, gap_s=GAPS_S[0])]


def _paced(pair: Pair) -> list[Case]:
    """Wants with pauses: of one block between equal pools, of 128 MiB and 8 GiB between those that differ."""
    if pair.name == "equal":
        return [Case(16, repeats=400, gap_s=GAPS_S[0]), Case(16, repeats=150, gap_s=GAPS_S[1])]
    return [Case(AT_ONCE_TOKENS, repeats=100, gap_s=GAPS_S[1]), Case(65536, repeats=5)]


def _repeats(place: Place, route: str, size_bytes: int) -> int:
    """How often to repeat, so that every size takes about as long, within limits."""
    if not place.is_gpu:
        return 4
    rate = 5e9 if route == "host" else 200e9  # a low guess, used only to choose the number of repeats
    return max(3, min(40, int(0.4 * rate / size_bytes)))


def _configuration(place: Place, fleet: Fleet, pair: Pair, is_same_gpu: bool, rows: list[dict[str, Any]]) -> None:
    """Adds each row when it is measured. Sets `is_exact` at the end, after checking everything that was carried."""
    cases = _cases(place, fleet.route, pair)
    least = LEAST_CAPACITY_BYTES // pair.sender.token_bytes if place.is_gpu else 1024
    capacity = max(least, *(-(-case.tokens // 64) * 64 * case.requests for case in cases))
    where = {"sender": place.sender, "receiver": place.sender if is_same_gpu else place.receiver}
    ours = []
    with Joined(place, fleet, pair, capacity, is_same_gpu=is_same_gpu) as joined:
        first_s = _first(joined)
        said = joined.check_route()
        place.bench.say(f"  {fleet.route} | {pair.name}: exact; first {first_s * 1e3:.1f} ms; {'; '.join(said)}")
        for case in cases:
            began = time.monotonic()
            told = joined.carry(case.tokens, case.requests, case.repeats + 1, case.gap_s)
            row = {"route": fleet.route, "pair": pair.name, **where, "tokens": case.tokens, "requests": case.requests}
            row["gap_s"] = case.gap_s
            row |= _figures(pair, case, told) | {"pair_first_s": first_s, "is_exact": False}
            if fleet.route == "pull" and case.requests == 1:
                row["steps_us"] = joined.steps_us()
            _say(place, row, time.monotonic() - began)
            ours.append(row)
            rows.append(row)
        joined.verify()
        for row in ours:
            row["is_exact"] = True


def _first(joined: Joined) -> float:
    """Seconds of the very first transfer: a few blocks and a part of one. Checks all bits, and checks the check."""
    joined.poison()
    seconds: float = joined.carry(200)["seconds"][0]
    joined.verify()
    joined.prove_verify()
    return seconds


def _figures(pair: Pair, case: Case, told: dict[str, Any]) -> dict[str, Any]:
    """`first_s` is the first transfer of this size, which the others exclude. GB/s count bytes on the wire."""
    seconds, size_bytes = told["seconds"], case.tokens * case.requests * pair.wire_token_bytes
    timed = spread(seconds[1:])
    return {
        "bytes": size_bytes,
        "engine_bytes": case.tokens * case.requests * pair.sender.token_bytes,
        "moved_bytes": told["moved_bytes"] // len(seconds),
        "first_s": seconds[0],
        **timed,
        "each": spread([second for batch in told["each"][1:] for second in batch]) if case.requests > 1 else {},
        "gb_s": size_bytes / timed["p50_s"] / 1e9,
    }


def _say(place: Place, row: dict[str, Any], seconds: float) -> None:
    at_once = f"{row['requests']} x " if row["requests"] > 1 else ""
    size = f"{at_once}{row['bytes'] / row['requests'] / MIB:g} MiB"
    size += f" each {row['gap_s'] * 1e3:g} ms" if row["gap_s"] else ""
    place.bench.say(
        f"    {size:>18}: p50 {row['p50_s'] * 1e3:9.3f} ms, p99 {row['p99_s'] * 1e3:9.3f} ms,"
        f" {row['gb_s']:7.1f} GB/s (first {row['first_s'] * 1e3:.2f} ms; took {seconds:.1f} s)"
    )


def _memory_mib() -> Mapping[int, int]:
    """GPU memory of each process that uses a GPU, its CUDA context included, as the driver counts it."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {}
    command = [smi, "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    found: Counter[int] = Counter()
    for pid, mib in ([part.strip() for part in line.split(",")] for line in lines):
        found[int(pid)] += int(mib) if mib.isdigit() else 0  # a line for each GPU that it uses
    return found


def _idle(place: Place, fleets: Sequence[Fleet]) -> list[dict[str, Any]]:
    """Share of a core that each agent uses with an engine attached, a session open, and nothing to do."""
    seconds = IDLE_S if place.is_gpu else 1.0
    with ExitStack() as stack:
        for each in fleets:
            stack.enter_context(Joined(place, each, pairs(place.shape)["equal"], 1024)).carry(64)
        time.sleep(1.0)
        agents = [agent for each in fleets for agent in (each.agents[0], each.agents[2])]
        before = [cpu_s(agent.process.pid) for agent in agents]
        time.sleep(seconds)
        memory = _memory_mib()
        rows: list[dict[str, Any]] = [
            {
                "agent": agent.name,
                "core_share": (cpu_s(agent.process.pid) - was) / seconds,
                "gpu_mib": memory.get(agent.process.pid),
            }
            for agent, was in zip(agents, before, strict=True)
        ]
    if place.is_gpu and not any(row["gpu_mib"] for row in rows):
        place.bench.problem("GPU memory of agents", "nvidia-smi names none of their processes")
    place.bench.say(f"idle agents: at most {max((row['core_share'] for row in rows), default=0) * 100:.2f} % of a core")
    return rows
