"""The GPU path: ceilings, every route through real agents, and the same beside busy engines.

On the GPUs there are, at most two. `--quick` takes two minutes, else seven; `--smoke` rehearses it on the processor,
tiny. Writes gpu_1 or gpu_2, by the number of GPUs, and every process's log. Fails if anything failed or any element
arrived wrong. A goal that is missed is in the table, and is not a failure.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bench.goals import as_rows, lines
from bench.gpu import busy, ceilings, routes
from bench.gpu.place import Extent, Place, cores, gpus, versions
from bench.scenario import Bench, Problem

BUDGET_S: dict[Extent, float] = {"smoke": 150, "quick": 270, "full": 480}
STAGES = ("ceilings", "routes", "busy")


def measure(
    bench: Bench,
    *,
    quick: bool = False,
    smoke: bool = False,
    only: tuple[str, ...] = STAGES,
    gpus_used: int = 0,
    agent: tuple[str, ...] = (),
    budget_s: float = 0.0,
) -> dict[str, Any]:
    """`agent`: options of the agents, as in slot_bytes=8388608. What would take longer than the budget is skipped."""
    extent: Extent = "smoke" if smoke else "quick" if quick else "full"
    ends = _ends(gpus_used, smoke)
    place = Place(bench, *ends, extent, budget_s or BUDGET_S[extent], dict(each.split("=", 1) for each in agent))
    found: dict[str, Any] = {"extent": extent, "sender": place.sender, "receiver": place.receiver}
    found |= {"gpus": gpus(), "cores": cores(), "versions": versions(), "agent_options": dict(place.agent_options)}
    bench.name = "gpu_smoke" if smoke else f"gpu_{len(set(ends))}" + "_quick" * quick
    bench.name += "_part" * (only != STAGES)
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "ceilings": lambda: _ceilings(place),
        "routes": lambda: routes.routes(place),
        "busy": lambda: {"busy": busy.busy(place)},
    }
    bench.say(f"{bench.name}: {place.sender} -> {place.receiver}, {place.budget_s:.0f} s at most; logs in {bench.logs}")
    for stage in only:
        bench.say(stage)
        try:
            found |= stages[stage]()
        except Exception as error:  # a stage failed: keep what was measured before
            traceback.print_exc()
            bench.problem(stage, f"{type(error).__name__}: {error}")
        found["goals"] = as_rows(lines(found))
        bench.write(found)
    return found


def _ends(gpus_used: int, smoke: bool) -> tuple[str, str]:
    if smoke:
        return "cpu", "cpu"
    seen = torch.cuda.device_count()
    wanted = gpus_used or min(seen, 2)
    if not 1 <= wanted <= seen:
        sys.exit(f"GPUs: {seen} visible, {max(1, wanted)} needed; --smoke needs none")
    return "cuda:0", f"cuda:{wanted - 1}"


def _ceilings(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, measured in (("copies", ceilings.copies), ("nixl", ceilings.nixl)):
        try:
            found[name] = measured(place)
        except Problem as problem:
            place.bench.problem(name, problem)
    return found
