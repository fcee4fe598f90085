"""Transfers beside busy engines: how much the two slow each other, without MPS and with it.

Another process keeps each GPU full. Transfers of 128 MiB come about 20 ms apart, which is more than a prefilling GPU
could offer, and then one right after another. At last only the sender's GPU is full, of matrix products as when it
prefills, and is pulled from without a pause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from bench.gpu.fleet import MISMATCHED, Fleet, Joined, fleet, pairs
from bench.gpu.place import MIB, Place
from bench.gpu.processes import Child, mps
from bench.scenario import Problem
from bench.timing import spread

BYTES = 128 * MIB
GAP_S = 0.020
ALONE_S = 1.2  # how long the engines are measured without transfers
KINDS = ("decode", "gemm")
REPEATS = {"smoke": 6, "quick": 100, "full": 150}
PACKED = 3  # times as many transfers without gaps, since these take much less time
ROOM_BYTES = 2 << 30  # transfers walk through this much memory, more than any cache holds
# About how long the part without MPS, or with it, takes: the start, then each kind and route.
START_S, EACH_S = 20.0, 8.0

Span = tuple[float, float]  # on the monotonic clock, which all processes share


def busy(place: Place) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for is_under_mps in (False, True) if place.is_gpu else (False,):
        what = f"beside busy engines, {'with' if is_under_mps else 'without'} MPS"
        if not place.is_time_for(what, START_S + EACH_S * len(_kinds(place)) * len(_routes(place))):
            continue
        place.bench.say(what)
        try:
            with (
                mps() if is_under_mps else nullcontext(dict[str, str]()) as env,
                _started(place, env, is_under_mps) as (loads, fleets),
            ):
                for each in fleets:
                    rows += list(_route(place, is_under_mps, each, loads))
        except Problem as problem:
            place.bench.problem(what, problem)
    return rows


def _devices(place: Place) -> list[str]:
    return list(dict.fromkeys((place.sender, place.receiver)))


def _kinds(place: Place) -> tuple[str, ...]:
    return KINDS[:1] if place.extent == "quick" else KINDS


def _routes(place: Place) -> tuple[str, ...]:
    return place.routes[:1] if place.extent == "quick" else place.routes


@contextmanager
def _started(place: Place, env: Mapping[str, str], is_under_mps: bool) -> Iterator[tuple[list[Child], list[Fleet]]]:
    """A load on each GPU and a fleet for each route. Either all are clients of MPS, or none."""
    suffix = "-busy-mps" if is_under_mps else "-busy"
    with ExitStack() as stack:
        loads = []
        for number in range(len(_devices(place))):
            loads.append(Child("bench.gpu.load", place.bench.logs / f"load-{number}{suffix}.log", env))
            stack.callback(loads[-1].end)
        fleets = [stack.enter_context(fleet(place, route, env, suffix)) for route in _routes(place)]
        for each in fleets:
            each.wait_serving()
        yield loads, fleets


def _route(place: Place, is_under_mps: bool, each: Fleet, loads: list[Child]) -> Iterator[dict[str, Any]]:
    pair = pairs(place.shape)[MISMATCHED]
    tokens = min(BYTES // pair.sender.token_bytes, place.tokens[-1])
    room = max(tokens, ROOM_BYTES // pair.sender.token_bytes) if place.is_gpu else tokens
    about = {"route": each.route, "mps": is_under_mps, "pair": pair.name, "bytes": tokens * pair.sender.token_bytes}
    about["gap_s"] = GAP_S
    with Joined(place, each, pair, room) as joined:
        joined.poison()
        joined.carry(tokens, repeats=5)
        joined.verify()
        joined.check_route()
        yield _told(place, {**about, "load": "none", "engines": [], **_transfers(place, joined, tokens)[0]})
        for kind in _kinds(place):
            yield _told(place, {**about, "load": kind, **_beside(place, joined, tokens, kind, loads)})
        if len(loads) > 1 and each.route == "pull":
            yield _told(place, {**about, "load": "prefill", **_beside(place, joined, tokens, "gemm", loads[:1])})
        joined.verify()


def _transfers(place: Place, joined: Joined, tokens: int) -> tuple[dict[str, Any], dict[str, Span]]:
    """Carry transfers paced, then packed. Returns how long they took, and when they were."""
    count = REPEATS[place.extent]
    paced = joined.carry(tokens, repeats=count, gap_s=GAP_S)
    packed = joined.carry(tokens, repeats=PACKED * count)
    rows = {"paced": spread(paced["seconds"]), "packed": spread(packed["seconds"])}
    return rows, {"paced": (paced["began"], paced["ended"]), "packed": (packed["began"], packed["ended"])}


def _beside(place: Place, joined: Joined, tokens: int, kind: str, loads: list[Child]) -> dict[str, Any]:
    """Carry transfers while the loads run. Also finds how much slower, on average, each load ran meanwhile."""
    steps: list[list[tuple[float, float]]] = []
    for load, device in zip(loads, _devices(place), strict=False):
        load.ask("start", kind=kind, device=device)
    try:
        times = [_alone()]
        rows, when = _transfers(place, joined, tokens)
        times.append(_alone())
    finally:
        steps += [load.ask("stop")["steps"] for load in loads]
    engines = []
    for each in steps:
        alone = [seconds for at in times for seconds in _within(each, at)]
        row: dict[str, Any] = {"alone": _pace(alone)}
        for name, at in when.items():
            row[name] = _pace(_within(each, at))
            row[f"{name}_slower"] = row[name]["mean_s"] / row["alone"]["mean_s"] - 1
        engines.append(row)
    return {**rows, "engines": engines}


def _alone() -> Span:
    began = time.monotonic()
    time.sleep(ALONE_S)
    return began, time.monotonic()


def _within(steps: list[tuple[float, float]], span: Span) -> list[float]:
    found = [seconds for ended, seconds in steps if span[0] <= ended - seconds and ended <= span[1]]
    if not found:
        raise Problem(f"the load made no step in {span[1] - span[0]:.3f} s")
    return found


def _pace(seconds: list[float]) -> dict[str, Any]:
    return {**spread(seconds), "mean_s": sum(seconds) / len(seconds)}


def _told(place: Place, row: dict[str, Any]) -> dict[str, Any]:
    said = []
    for name in ("paced", "packed"):
        slower = ", ".join(f"{engine[f'{name}_slower'] * 100:+.1f} %" for engine in row["engines"])
        said.append(
            f"{name} p50 {row[name]['p50_s'] * 1e3:.3f} ms, p99 {row[name]['p99_s'] * 1e3:.3f} ms"
            + (f", engines {slower}" if slower else "")
        )
    place.bench.say(f"  {row['route']:6} load {row['load']:6}: {'; '.join(said)}")
    return row
