"""The GPU bench: ceilings, every route through real agents, and the same beside busy engines.

    python bench/gpu.py                 # on the GPUs there are, at most two
    python bench/gpu.py --quick         # about two minutes
    python bench/gpu.py --smoke         # the same paths on the processor, tiny: a rehearsal without a GPU

Prints a table (goal, measured, the ceiling of the same run). Writes gpu_1.json or gpu_2.json, by the number of GPUs, to
--out, and every process's log to --out/logs. Exits with 1 if anything failed or any element arrived wrong. A goal that
is missed is not a failure; the table shows it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_busy
import gpu_ceilings
import gpu_routes
import torch
from gpu_place import Extent, Place, cores, gpus, versions
from gpu_processes import Problem
from gpu_table import as_rows, lines, printed
from record import RESULTS, write

BUDGET_S: dict[Extent, float] = {"smoke": 150, "quick": 270, "full": 480}
STAGES = ("ceilings", "routes", "busy")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    place = _place(options)
    found: dict[str, Any] = {"extent": place.extent, "sender": place.sender, "receiver": place.receiver}
    found |= {"gpus": gpus(), "cores": cores(), "versions": versions(), "agent_options": dict(place.agent_options)}
    name = "gpu_smoke" if not place.is_gpu else f"gpu_{len({place.sender, place.receiver})}"
    name += "_quick" * (place.extent == "quick") + "_part" * (options.only != ",".join(STAGES))
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "ceilings": lambda: _ceilings(place),
        "routes": lambda: gpu_routes.routes(place),
        "busy": lambda: {"busy": gpu_busy.busy(place)},
    }
    place.say(f"{name}: {place.sender} -> {place.receiver}, {place.budget_s:.0f} s at most; logs in {place.folder}")
    for stage in options.only.split(","):
        place.say(stage)
        try:
            found |= stages[stage]()
        except Exception as error:  # a stage failed: keep what was measured before
            traceback.print_exc()
            place.problem(stage, f"{type(error).__name__}: {error}")
        found["problems"] = place.problems
        table = lines(found)
        found["goals"] = as_rows(table)
        write(name, found, options.out)
    print(printed(table))
    for problem in place.problems:
        print(f"PROBLEM {problem}")
    return 1 if place.problems else 0


def _ceilings(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, measure in (("copies", gpu_ceilings.copies), ("nixl", gpu_ceilings.nixl)):
        try:
            found[name] = measure(place)
        except Problem as problem:
            place.problem(name, problem)
    return found


def _place(options: argparse.Namespace) -> Place:
    extent: Extent = "smoke" if options.smoke else "quick" if options.quick else "full"
    seen = torch.cuda.device_count()
    wanted = options.machine or min(seen, 2)
    if options.smoke:
        sender = receiver = "cpu"
    elif not 1 <= wanted <= seen:
        sys.exit(f"GPUs: {seen} visible, {max(1, wanted)} needed; --smoke needs none")
    else:
        sender, receiver = "cuda:0", f"cuda:{wanted - 1}"
    folder = options.out / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    agent = dict(each.split("=", 1) for each in options.agent)
    return Place(sender, receiver, extent, folder, options.budget_s or BUDGET_S[extent], agent)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=int, choices=(1, 2), help="how many GPUs to use")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, pairs and loads")
    parser.add_argument("--smoke", action="store_true", help="the same paths on the processor, without a GPU")
    parser.add_argument("--only", default=",".join(STAGES), help=f"some of {','.join(STAGES)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where JSON and logs go")
    parser.add_argument("--agent", action="append", default=[], metavar="OPTION=VALUE", help="an agent's option")
    parser.add_argument("--budget-s", type=float, help="skip, and report, what would take longer")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
