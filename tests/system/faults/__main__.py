"""Runs the whole matrix of faults: `python -m tests.system.faults --all --times 3 --workers 2`.

Every second time agents use CURVE, each with its own key. To run a part: `--match "kill the receiver's engine"`, or
`--all --first 100 --count 50`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from tests.system.faults.cases import Case, Runner, all_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every case, not only those whose name has MATCH")
    parser.add_argument("--match", default="", help="part of a case's name")
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the cases before the rest")
    parser.add_argument("--count", type=int, default=None, help="so many cases at most; all, if not said")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--keyed", action="store_true", help="with keys every time, not only every second")
    parser.add_argument("--workers", type=int, default=1, help="so many processes share the cases")
    parser.add_argument("--share", type=int, default=-1, help="which share is ours; all, if not said")
    said = parser.parse_args()
    if not said.all and not said.match:
        parser.error("say --all or --match")
    if said.share < 0 and said.workers > 1:
        command = [sys.executable, "-m", "tests.system.faults", *sys.argv[1:], "--share"]
        shares = [subprocess.Popen([*command, str(i)]) for i in range(said.workers)]
        return max(share.wait() for share in shares)
    cases = [case for case in all_cases() if said.match in case.id][said.first :][: said.count]
    if said.share >= 0:  # in a piece, for each other case is a stop, which takes longer
        first, end = (len(cases) * share // said.workers for share in (said.share, said.share + 1))
        cases = cases[first:end]
    return tell_all(cases, said.times, said.keyed)


def tell_all(cases: list[Case], times: int, is_always_keyed: bool) -> int:
    failures, began = 0, time.monotonic()
    with Runner() as runner:
        for turn in range(1, times + 1):
            is_keyed = is_always_keyed or turn % 2 == 0
            for case in cases:
                since = time.monotonic()
                try:
                    told, outcome = runner.tell(case, is_keyed), "ok"
                except AssertionError as error:
                    told, outcome = str(error)[:1500], "FAILED"
                    failures += 1
                how = "keyed " if is_keyed else ""
                print(f"{turn} {how}{outcome} {time.monotonic() - since:5.1f} s  {case.id}  {told}", flush=True)
    print(f"{len(cases)} cases x {times}: {failures} failures in {time.monotonic() - began:.0f} s", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
