"""Shared by the scripts that drive pairs of engines: their options, the run through all pairs, what they write and say.

As many pairs as the GPUs' memory holds are one batch. Its engines are all started before anything of it is measured:
one that starts would disturb the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import record
from tests.system.engines.fleet import prompt
from tests.system.gpu.pair_drive import Pair
from tests.system.gpu.pair_engines import Engines, Running, Side


@dataclass
class Found:
    """What one pair showed; `rows` one for each prompt length, `tokens` by it.

    `against` has the rows of what was measured in the same seconds: of one pair, or by name of several.
    """

    name: str
    failure: str = ""
    weights: str = "seeded"
    kv_rows: str = "-"
    route: str = ""
    handles: str = ""
    tokens: dict[int, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    against: list[dict[str, Any]] | dict[str, list[dict[str, Any]]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    drafted: dict[str, int] = field(default_factory=dict)

    @property
    def said(self) -> str:
        return "; ".join(f"{length}: {verdict}" for length, verdict in self.tokens.items()) or "-"


Column = tuple[str, int, Callable[[Any, dict[str, Any], int], object]]  # head, width, of the pair, row and place


SERVER_GIB = 25.0  # weights 15, KV 3, and what the engine, its agent and their two CUDA contexts take


def sides_of(pairs: Iterable[Pair]) -> list[Side]:
    every = [each for pair in pairs for each in (pair, pair.beside) if each is not None]
    return list(dict.fromkeys(side for pair in every for side in (pair.sender, pair.receiver)))


def batches(pairs: Sequence[Pair], kept: Sequence[Side], alone: Sequence[Side], per_gpu: int) -> list[list[Pair]]:
    """The pairs in their order, in batches whose engines fit: `per_gpu` whole servers on each GPU.

    `kept` are up in every batch, `alone` in the first. A batch has one pair at least.
    """
    found: list[list[Pair]] = []
    for pair in pairs:
        beside = [*kept, *(alone if len(found) <= 1 else ())]
        if found and _fit({*beside, *sides_of([*found[-1], pair])}, per_gpu):
            found[-1].append(pair)
        else:
            found.append([pair])
    return found


def _fit(sides: Iterable[Side], per_gpu: int) -> bool:
    taken = Counter[int]()
    for side in sides:
        taken.update({gpu: 12 // len(side.gpus) for gpu in side.gpus})  # twelfths of a server
    return max(taken.values()) <= 12 * per_gpu


class Run:
    """All pairs, in order; what each showed is written at once. A script says in `show` what it looks at."""

    engine = ""  # names the results
    columns: Sequence[Column] = ()
    repeats, limit_s, lengths = 6, 360.0, "1024,8192"
    server_gib = SERVER_GIB

    def __init__(self, chosen: argparse.Namespace, about: dict[str, Any], engines: Engines) -> None:
        self.chosen, self.about, self.engines = chosen, about, engines
        self.gpus = len(about["gpus"])
        self.results: list[Found] = []
        self.up: dict[str, Running] = {}
        self.per_gpu = int(min(about["gpu_gib"], default=0) / self.server_gib)
        self._began = time.monotonic()
        every = self.every()
        self.pairs = [pair for pair in every if not chosen.only or pair.name in chosen.only.split(",")]
        unknown = set(filter(None, chosen.only.split(","))) - {pair.name for pair in every}
        assert not unknown, f"no such pairs: {unknown}; there are {[pair.name for pair in every]}"

    def every(self) -> list[Pair]:
        """All pairs there are, in the order of their worth."""
        raise NotImplementedError

    @staticmethod
    def more_options(parser: argparse.ArgumentParser) -> None:
        """Those of one script."""

    def kept(self) -> list[Side]:
        """Engines that are needed to the end."""
        return []

    def alone(self) -> list[Side]:
        """Engines that are needed in `begin` only: to say what one says alone."""
        return []

    def show(self, pair: Pair, found: Found) -> None:
        """Fill in what this pair shows. Raises where it does not hold."""
        raise NotImplementedError

    def prompts(self, length: int) -> list[list[int]]:
        """Whose tokens are compared."""
        return [prompt(length, seed=200 + number) for number in range(self.chosen.prompts)]

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def started(self) -> None:
        """With each batch up, before its first pair."""

    def begin(self) -> None:
        """With the first batch up, and the engines that are only asked what they say alone."""

    def _start(self, sides: Sequence[Side]) -> None:
        """Start these engines and end all others."""
        for name in self.engines.names() - {side.name for side in sides}:
            self.engines.drop(name)
            self.up.pop(name, None)
        self.engines.start(*sides)
        for side in sides:
            if side.name in self.up:
                continue
            try:
                self.up[side.name] = self.engines.get(side)
                said = "is up" + f", {self.up[side.name].dummy}" * bool(self.up[side.name].dummy)
            except Exception as error:  # its pairs will say so
                said = f"did not start: {type(error).__name__}: {str(error)[-3000:]}"
            print(f"{self.spent_s:6.1f} s  {side.name} {said}", flush=True)

    def all(self) -> None:
        alone = self.alone()
        for batch in batches(self.pairs, self.kept(), alone, 0 if self.chosen.cpu else self.per_gpu):
            if not self._why_not():
                self._start(list(dict.fromkeys([*self.kept(), *alone, *sides_of(batch)])))
                self.started()
                if not self.results:
                    try:
                        self.begin()
                    except Exception as error:  # each pair has more to show
                        print(f"nothing to compare tokens with: {type(error).__name__}: {error}", flush=True)
                    for side in alone:
                        self.engines.drop(side.name)
            alone = []
            for pair in batch:
                reason = self._why_not()
                self.results.append(Found(pair.name, reason) if reason else self._drive(pair))
                if not reason:
                    said = self.results[-1].failure.strip()[-600:] or "done"
                    print(f"{self.spent_s:6.1f} s  {pair.name}: {said}", flush=True)
                    self.write()

    def _why_not(self) -> str:
        """Why no further pair begins; "" if one may."""
        if self.spent_s > self.chosen.limit_s:
            return f"not begun: {self.spent_s:.0f} s of {self.chosen.limit_s:.0f} were spent"
        if sum(bool(each.failure) for each in self.results) >= self.chosen.failures:
            return f"not begun: {self.chosen.failures} before it failed"
        return ""

    def _drive(self, pair: Pair) -> Found:
        found = Found(pair.name)
        try:
            self.show(pair, found)
        except AssertionError as error:
            found.failure = str(error) or traceback.format_exc(limit=-2)
        except Exception as error:  # the other pairs are worth their time
            found.failure = f"{type(error).__name__}: {error}"
        if found.failure:
            for side in sides_of([pair]):
                self._look_at(side)
        return found

    def _look_at(self, side: Side) -> None:
        """What a failed pair's engine and agents said last, and what those know now. One that is not well is dropped.

        One that never started said why before: another try would cost the other pairs' time.
        """
        try:
            running = self.engines.get(side)
        except Exception:
            return
        with contextlib.suppress(Exception):
            print(f"--- {side.name}:\n{running.engine.tail(16)}")
            for each in running.agents:
                ended = each.process.poll()
                print(f"--- its agent, exit code {ended}:\n" + "\n".join(each.text().splitlines()[-16:]))
                print(each.status, flush=True)
            print(running.held(), flush=True)
        with contextlib.suppress(Exception):
            if running.is_well():
                return
        self.engines.drop(side.name)
        self.up.pop(side.name, None)

    @property
    def file(self) -> str:
        return f"{self.engine}_pairs.json"

    def write(self) -> None:
        kept = {**self.about, "seconds": round(self.spent_s, 1), "pairs": [vars(each) for each in self.results]}
        (self.chosen.out / self.file).write_text(json.dumps(kept, indent=1) + "\n")

    def report(self) -> None:
        print("".join(f"{head:>{width}s}" for head, width, _ in self.columns))
        for found in self.results:
            for place in range(len(found.rows)):
                self.print_row(found, place)
        for found in self.results:
            self.print_more(found)
            if found.failure:
                print(f"{found.name:>{self.columns[0][1]}s} FAILED: {found.failure.strip()[-1500:]}")

    def print_row(self, found: Found, place: int) -> None:
        row = found.rows[place]
        print("".join(f"{value(found, row, place)!s:>{width}s}" for _, width, value in self.columns))

    def print_more(self, found: Found) -> None:
        """What no table has room for."""

    def verdicts(self) -> Iterable[object]:
        """Each has NO in it where a comparison failed."""
        for each in self.results:
            yield from (each.kv_rows, *each.tokens.values(), *(row.get("decoded") for row in each.rows))


def main(script: type[Run], about: str, *packages: str) -> int:
    """The exit code: 1 if a comparison says NO, 2 if a pair failed otherwise, else 0."""
    chosen = _options(script, about)
    chosen.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines are sessions of their own: end them
    agent_options = dict(part.split("=", 1) for part in chosen.agent)
    with tempfile.TemporaryDirectory(prefix="pairs-") as name, ExitStack() as stack:
        engines = Engines(Path(name), stack, chosen.cpu, agent_options)
        stack.callback(keep_logs, Path(name), chosen.out / f"{script.engine}_logs.tar.gz")
        run = script(chosen, machine(*packages), engines)
        run.all()
    run.report()
    if any("NO" in str(value) for value in run.verdicts()):
        return 1
    return 2 if any(each.failure for each in run.results) else 0


def _options(script: type[Run], about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures and the logs")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU: to try the script")
    parser.add_argument("--only", default="", help="pairs, by name, with commas between")
    parser.add_argument("--repeats", type=int, default=script.repeats)
    parser.add_argument("--prompts", type=int, default=2, help="prompts whose tokens are compared")
    parser.add_argument("--lengths", default=script.lengths, type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--limit-s", type=float, default=script.limit_s, help="no pair begins after so long")
    parser.add_argument("--failures", type=int, default=99, help="no pair begins after so many failed")
    parser.add_argument("--agent", action="append", default=[], help="an agent's option: slot_bytes=8388608")
    script.more_options(parser)
    chosen = parser.parse_args()
    if chosen.repeats < 2:
        parser.error("--repeats: one is the first and leaves none for later")
    return chosen


def machine(*names: str) -> dict[str, Any]:
    """With the versions of these packages beside those that all pairs need."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpu_gib = [round(torch.cuda.mem_get_info(index)[1] / 2**30, 1) for index in range(len(gpus))]
    every = (*names, "torch", "triton", "nixl", "nixl-cu13")
    return {**record.machine(), "gpus": gpus, "gpu_gib": gpu_gib, "versions": {name: _version(name) for name in every}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "-"


def keep_logs(folder: Path, archive: Path) -> None:
    """In one archive: few files come back from some machines."""
    with tarfile.open(archive, "w:gz") as kept:
        for path in [*folder.rglob("*.log"), *folder.rglob("*.times")]:
            kept.add(path, path.relative_to(folder))
