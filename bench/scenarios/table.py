"""The table of goals again, from results."""

from __future__ import annotations

import json
from pathlib import Path

from bench.goals import of_results, printed
from bench.scenario import Bench


def measure(bench: Bench, results: list[Path]) -> None:
    for path in results:
        found = json.loads(path.read_text())
        about = [str(found[name]) for name in ("commit", "day") if name in found]
        gpus = [gpu["name"] if isinstance(gpu, dict) else gpu for gpu in found.get("gpus", ())]
        print(", ".join([path.name, f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU", *about]))
        print(printed(of_results(found)))
        for problem in found.get("problems", ()):
            print(f"PROBLEM {problem}")
