"""Fuzzes for long, by hand: `python -m tests.fuzz --target all --frames 1000000 --seed 1 --jobs 2`.

A frame that does harm is made small and kept in tests/fuzz/corpus/TARGET, which `make test` runs from then on.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from .target import CORPUS, Crash, Target, judged, minimised
from .targets import NAMES, made

WARM = 2000  # frames until caches are full
MOST_CRASHES = 20


def fuzz(target: Target, frames: int, seed: int, seconds: float) -> dict[str, Any]:
    """Run so many frames, or so long; what happened, with figures."""
    random, began, done = Random(seed), time.monotonic(), 0
    crashes: dict[tuple[str, str], Crash] = {}
    first_kib = 0
    count = 0
    while done < frames and time.monotonic() - began < seconds and len(crashes) < MOST_CRASHES:
        messages, crash = judged(target, target.frame(random))
        done += messages
        count += 1
        if crash is not None:
            crashes.setdefault((crash.kind, crash.place), crash)
        if not first_kib and (count >= WARM or time.monotonic() - began > seconds / 4):
            first_kib = resident_kib()
    took = time.monotonic() - began
    gc.collect()
    found = [minimised(target, crash) for crash in crashes.values()]
    return {
        "target": target.name,
        "seed": seed,
        "frames": done,
        "seconds": round(took, 1),
        "frames_per_s": round(done / took),
        "rss_start_kib": first_kib,
        "rss_end_kib": resident_kib(),
        "crashes": [keep(target.name, crash) for crash in found],
    }


def resident_kib() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def keep(name: str, crash: Crash) -> str:
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(crash.frame).hexdigest()[:12]}.bin"
    path.write_bytes(crash.frame)
    print(f"{name}: {crash}\nkept in {path}", file=sys.stderr, flush=True)
    return f"{crash.kind} at {crash.place}: {path.name}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", default="all", help=f"all, or some of {','.join(NAMES)}")
    parser.add_argument("--frames", type=int, default=100_000, help="of each target and job")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, of each target and job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a seed of its own")
    parser.add_argument("--json", help="append one line for each run to this file")
    said = parser.parse_args()
    names = list(NAMES) if said.target == "all" else said.target.split(",")
    if said.jobs > 1:
        return _spread(said, names)
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    is_good = True
    for name in names:
        target = made(name)
        try:
            found = fuzz(target, said.frames, said.seed, said.seconds)
        finally:
            target.close()
        is_good = is_good and not found["crashes"]
        print(
            f"{name:10} seed {said.seed}: {found['frames']:,} frames in {found['seconds']} s, "
            f"{found['frames_per_s']:,} a second, {len(found['crashes'])} crashes, "
            f"RSS {found['rss_start_kib']:,} -> {found['rss_end_kib']:,} KiB",
            flush=True,
        )
        if said.json:
            with open(said.json, "a") as out:
                out.write(json.dumps(found) + "\n")
    return 0 if is_good else 1


def _spread(said: argparse.Namespace, names: list[str]) -> int:
    """The same in so many processes."""
    own = ["--target", ",".join(names), "--frames", str(said.frames), "--seconds", str(said.seconds)]
    own += ["--json", said.json] if said.json else []
    command = [sys.executable, "-m", "tests.fuzz", *own]
    running = [subprocess.Popen([*command, "--seed", str(said.seed + job)]) for job in range(said.jobs)]
    return max([process.wait() for process in running])


if __name__ == "__main__":
    sys.exit(main())
