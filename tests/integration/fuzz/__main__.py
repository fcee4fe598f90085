"""Fuzzes for long, by hand: `python -m tests.integration.fuzz --target all --frames 1000000 --seed 1 --each --jobs 2`.

A frame that does harm is made smaller and kept in tests/integration/fuzz/corpus/TARGET. From then on `make test` runs
it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import hashlib
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from tests.integration.fuzz.target import CORPUS, Crash, Target, judged, minimised
from tests.integration.fuzz.targets import NAMES, made

MOST_CRASHES = 20
# Resident memory may grow so much from the first fifth of a long run to its end. What malloc keeps for itself is given
# back before each look: `pools` once looked 8 MiB larger after 55 s, all of it free, while what was in use stayed the
# same within 30 KiB over 140 000 frames. What is left of the noise was 3 MiB there.
MOST_GROWN_KIB = 8 << 10
JUDGED_S = 20.0  # in a shorter run a fifth does not fill the caches: its growth is said, not judged
SLOW = dict.fromkeys(("agents", "pools"), 4)  # how much more time they get: what is behind them is deepest


def fuzz(target: Target, frames: int, seed: int, seconds: float) -> dict[str, Any]:
    """Run so many frames, or so long; what happened, with figures."""
    random, began, done = Random(seed), time.monotonic(), 0
    crashes: dict[tuple[str, str], Crash] = {}
    first_kib = 0
    while done < frames and time.monotonic() - began < seconds and len(crashes) < MOST_CRASHES:
        messages, crash = judged(target, target.frame(random))
        done += messages
        if crash is not None:
            crashes.setdefault((crash.kind, crash.place), crash)
        if not first_kib and (done >= frames / 5 or time.monotonic() - began >= seconds / 5):
            first_kib = resident_kib()
    took = time.monotonic() - began
    last_kib = resident_kib()
    found = [minimised(target, crash) for crash in crashes.values()]
    return {
        "frames": done,
        "seconds": round(took, 1),
        "frames_per_s": round(done / took),
        "rss_start_kib": first_kib,
        "rss_end_kib": last_kib,
        "has_grown": took >= JUDGED_S and last_kib - first_kib > MOST_GROWN_KIB,
        "crashes": [keep(target.name, crash) for crash in found],
    }


def resident_kib() -> int:
    """Without garbage, and without what malloc holds but nobody uses (where there is glibc)."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
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
    parser = argparse.ArgumentParser(prog="python -m tests.integration.fuzz", description=__doc__)
    parser.add_argument("--target", default="all", help=f"all, or some of {','.join(NAMES)}")
    parser.add_argument("--frames", type=int, default=100_000, help="of each target and job")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, of each target and job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the targets, one at a time each")
    parser.add_argument("--each", action="store_true", help="a process of its own for each target")
    parser.add_argument(
        "--deep", action="store_true", help=f"more seconds for {', '.join(SLOW)}: {SLOW['pools']} times"
    )
    said = parser.parse_args()
    names = list(NAMES) if said.target == "all" else said.target.split(",")
    if said.each:
        return _shared(said, names)
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    is_good = True
    for name in names:
        target = made(name)
        try:
            seconds = said.seconds * (SLOW.get(name, 1) if said.deep else 1)
            found = fuzz(target, said.frames, said.seed, seconds)
        finally:
            target.close()
        is_good = is_good and not found["crashes"] and not found["has_grown"]
        print(
            f"{name:10} seed {said.seed}: {found['frames']:,} frames in {found['seconds']} s, "
            f"{found['frames_per_s']:,} a second, {len(found['crashes'])} crashes, "
            f"RSS {found['rss_start_kib']:,} -> {found['rss_end_kib']:,} KiB{', GROWN' * found['has_grown']}",
            flush=True,
        )
    return 0 if is_good else 1


def _shared(said: argparse.Namespace, names: list[str]) -> int:
    """Every target in a process of its own, so many at once, the long ones first."""
    first = sorted(names, key=lambda name: -SLOW.get(name, 1))

    def one(name: str) -> int:
        return subprocess.run([*_command(said, name), "--seed", str(said.seed)]).returncode

    with ThreadPoolExecutor(said.jobs) as pool:
        return max([abs(code) for code in pool.map(one, first)])


def _command(said: argparse.Namespace, target: str) -> list[str]:
    own = ["--target", target, "--frames", str(said.frames), "--seconds", str(said.seconds)]
    return [sys.executable, "-m", "tests.integration.fuzz", *own, *(["--deep"] if said.deep else [])]


if __name__ == "__main__":
    sys.exit(main())
