"""The same prompts through SGLang's own NIXL backend and through kvbridge, on a CPU.

    .venv-sglang/bin/python bench/sglang_pair.py [--repeats 9] [--lengths 1024,8192] [--pairs 1:1,2:1]

Prefill is on core 0 (if it has two ranks, on both), decode on core 1. The servers of both backends run side by side and
take turns, prompt by prompt. No prompt is used twice. Each is computed in one chunk, so all of it is sent at once. For
each prompt:

    ttft      from the two requests to the decode server's first token; most of it is prefill
    carried   from prefill's last send until the decode server takes the request into its batch
    reported  SGLang's own time of the transfer, on the prefill side

SGLang's NIXL backend registers a CPU's memory as a GPU's, and then refuses unequal ranks. The tests' plugin fixes both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("KVBRIDGE_TEST_AGENT_PYTHON", str(ROOT / ".venv/bin/python"))

from record import write  # noqa: E402

from tests.system.engines.fleet import prompt  # noqa: E402
from tests.system.gpu.pair_drive import Pair  # noqa: E402
from tests.system.gpu.pair_engines import Engines, SGLang  # noqa: E402
from tests.system.gpu.sglang_pairs import SGLangDrive  # noqa: E402

BACKENDS = ("nixl", "kvbridge")
WHAT = {"ttft": "ttft_ms", "carried": "carried_ms", "reported": "transfer_ms"}


def pair_of(backend: str, ranks: tuple[int, int]) -> Pair:
    """Ranks are pinned: two of them to both cores, prefill's one to the first, decode's to the second."""
    cores = [(0, 1) if count > 1 else (place,) for place, count in enumerate(ranks)]
    sender, receiver = (
        SGLang(f"{backend}-{role}-{len(own)}", own, is_nixl=backend != "kvbridge", role=role)
        for role, own in zip(("prefill", "decode"), cores, strict=True)
    )
    return Pair(backend, sender, receiver)


def measure(drives: list[SGLangDrive], length: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The times of each backend. `report` keeps the first of each apart: it includes the handshake."""
    found: dict[str, list[dict[str, float]]] = {drive.pair.name: [] for drive in drives}
    for repeat in range(repeats + 1):
        for drive in drives if repeat % 2 else drives[::-1]:
            seed = 1000 * length + 2 * repeat + drives.index(drive)
            found[drive.pair.name].append(drive.timed(prompt(length, seed=seed)))
    return found


def report(length: int, ranks: tuple[int, int], found: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    place = {"tokens": length, "ranks": f"{ranks[0]}:{ranks[1]}"}
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for backend, timed in found.items():
        for what, key in WHAT.items():
            first, *rest = (each[key] for each in timed)
            best[what, backend] = statistics.median(rest), min(rest)
            row = {"first_ms": first, "median_ms": best[what, backend][0], "min_ms": best[what, backend][1]}
            row = {key: round(value, 2) for key, value in row.items()}
            figures = "  ".join(f"{key.removesuffix('_ms')} {value:8.1f}" for key, value in row.items())
            print(f"{length:6d} tokens  {place['ranks']}  {backend:9s} {what:9s} ms: {figures}", flush=True)
            rows.append({**place, "backend": backend, "what": what, **row})
    if set(found) == set(BACKENDS):
        for what in WHAT:
            median, least = (best[what, "kvbridge"][i] / best[what, "nixl"][i] for i in (0, 1))
            print(f"{length:6d} tokens  {place['ranks']}  kvbridge / nixl {what}: median {median:.2f}, min {least:.2f}")
            rows.append({**place, "what": f"ratio {what}", "median": round(median, 3), "min": round(least, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--pairs", default="1:1,2:1", help="ranks that prefill : ranks that decode")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--logs", help="a folder for the logs of servers and agents")
    chosen = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(chosen.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        for said in chosen.pairs.split(","):
            prefills, decodes = map(int, said.split(":"))
            own = folder / f"{prefills}-{decodes}"
            own.mkdir()
            with ExitStack() as stack:
                engines = Engines(own, stack, True, {}, dtype="float32")
                pairs = [pair_of(backend, (prefills, decodes)) for backend in chosen.backends.split(",")]
                engines.start(*(side for pair in pairs for side in (pair.sender, pair.receiver)))
                drives = [SGLangDrive(pair, engines) for pair in pairs]
                for length in map(int, chosen.lengths.split(",")):
                    rows += report(length, (prefills, decodes), measure(drives, length, chosen.repeats))
    write("sglang_pair", {"repeats": chosen.repeats, "rows": rows})


if __name__ == "__main__":
    main()
