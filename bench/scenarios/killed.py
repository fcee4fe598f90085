"""One agent of sixteen is killed every second under traffic, for two minutes by each of two routes, on CPUs.

Half of the engines prefill, half decode (tests/system/faults/fleet.py): stand-ins that compare every element of their
memory with what it must be. Requests come at random, each for a prompt whose second half takes 0.3 s to compute. If its
rows do not come, another pair of engines is asked, as a proxy does. A request's time counts from when it was due to its
last row, with all that was asked in vain.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.scenario import Bench
from kvbridge.failpoints import Way
from tests.system.faults.fleet import Carried, Fleet

MOST_S = 5.0  # of a request
WAYS: tuple[Way, ...] = ("pull", "slots")


def measure(
    bench: Bench, *, seconds: float = 120.0, rate: float = 6.0, every_s: float = 1.0, size: int = 16
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="kvbridge-killed-") as folder, ExitStack() as stack:
            fleet = Fleet(Path(folder), stack, size=size, way=way)
            try:
                fleet.run(seconds, rate, every_s)
            except AssertionError as error:
                bench.problem(way, str(error)[:2000])
            rows.append({"by": way, **told(fleet.carried)})
            bench.show(rows[-1])
    said = {"agents": size, "seconds": seconds, "requests_per_s": rate, "killed_every_s": every_s}
    return {"goals": goals(rows, bench), **said, "rows": rows}


def told(carried: Carried) -> dict[str, Any]:
    seconds = sorted(carried.seconds)
    return {
        "requests": len(seconds),
        "kills": carried.kills,
        "p50_s": round(statistics.median(seconds), 3),
        "p99_s": round(seconds[len(seconds) * 99 // 100], 3),
        "most_s": round(seconds[-1], 3),
        "asked_more_than_once": sum(n for times, n in carried.tries.items() if times > 1),
        "why": dict(carried.codes),
        "late_answers": len(carried.late),
    }


def goals(rows: list[dict[str, Any]], bench: Bench) -> list[dict[str, Any]]:
    """Lines of goals (goals.py). A wrong element, a request that does not end and an engine's end are problems."""
    found = [
        {
            "goal": f"by {row['by']}, the slowest request, s",
            "measured": f"{row['most_s']:g}",
            "against": f"{MOST_S:g} at most",
            "met": row["most_s"] <= MOST_S,
        }
        for row in rows
    ]
    wrong = {"goal": "wrong elements, requests without an end, engines that ended", "against": "0"}
    return [*found, wrong | {"measured": str(len(bench.problems)), "met": not bench.problems}]
