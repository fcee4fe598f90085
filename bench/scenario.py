"""What every scenario is given: where its figures go, how rows are shown, what went wrong."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record


class Problem(Exception):
    """Something in this run failed. The scenario records it and goes on."""


@dataclass(slots=True)
class Bench:
    """A run of a scenario. `name` is the scenario's, and that of its results. A run with problems exits with 1."""

    name: str
    out: Path
    problems: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def logs(self) -> Path:
        """The folder for logs of processes."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        return self.out / "logs"

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"[{self.spent_s:6.1f} s] {text}", flush=True)

    def show(self, row: Mapping[str, Any]) -> None:
        """Print a row: its texts, then its figures by their names."""
        texts = [f"{value:34}" for value in row.values() if isinstance(value, str)]
        self.say("  ".join([*texts, *(f"{name} {_short(row[name])}" for name in row if _is_figure(row[name]))]))

    def problem(self, what: str, error: object) -> None:
        """Record and print a problem, and go on."""
        self.problems.append(f"{what}: {error}")
        self.say(f"PROBLEM {what}: {error}")

    def write(self, found: Mapping[str, Any]) -> None:
        """Write the figures so far. A later run replaces them."""
        record.write(self.name, {**found, "problems": self.problems} if self.problems else dict(found), self.out)

    def earlier(self) -> list[dict[str, Any]]:
        """The runs in the results of a scenario that adds to them."""
        path = self.out / f"{self.name}.json"
        return json.loads(path.read_text())["runs"] if path.exists() else []

    def keep(self, total: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
        """Write all runs. The file is replaced as a whole, so it stays valid if we are killed."""
        self.out.mkdir(parents=True, exist_ok=True)
        half = self.out / f"{self.name}.json.new"
        half.write_text(json.dumps({"total": total, "runs": runs}, indent=1) + "\n")
        os.replace(half, half.with_suffix(""))


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
