"""The same prompts through vLLM's own NixlConnector and through kvbridge: decode's time to first token, on a CPU.

    .venv-vllm/bin/python bench/vllm_pair.py [--repeats 9] [--lengths 1024,8192]

Prefill is on core 0, decode on core 1. Only one pair of engines runs at a time, because NixlConnector's progress
threads spin even in an idle engine and would take the cores. Prefix caching is off, and no prompt is used twice.
`floor` is the decode engine with a two-token prompt. `alone` is one engine that computes the whole prompt.
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
from tests.system.gpu.pair_engines import VLLM, Engines  # noqa: E402
from tests.system.gpu.vllm_pairs import VLLMDrive  # noqa: E402

CONNECTORS = ("NixlConnector", "kvbridge")


def pair_of(name: str) -> Pair:
    sender, receiver = (
        VLLM(f"{name}-{side}", (core,), 32, is_nixl=name != "kvbridge") for core, side in enumerate("pd")
    )
    return Pair(name, sender, receiver)


def measure(drive: VLLMDrive, length: int, repeats: int) -> dict[str, list[float]]:
    """The seconds of each figure, by the decode engine. `report` keeps the first of each apart: it includes the
    handshake."""
    found: dict[str, list[float]] = {drive.pair.name: [], "alone": [], "floor": []}
    for repeat in range(repeats + 1):
        tokens = prompt(length, seed=1000 * length + repeat)
        found[drive.pair.name].append(drive.came(tokens, 1)[0].decode_s)
        for name, prompt_tokens in (("floor", tokens[:2]), ("alone", tokens)):
            found[name].append(drive.run(drive.receiver, prompt_tokens, 1)[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--logs", help="a folder for the logs of engines and agents")
    chosen = parser.parse_args()
    lengths = [int(length) for length in chosen.lengths.split(",")]
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(chosen.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        for connector in CONNECTORS:
            own = folder / connector
            own.mkdir()
            with ExitStack() as stack:
                drive = VLLMDrive(pair_of(connector), Engines(own, stack, True, {}))
                found |= {(length, connector): measure(drive, length, chosen.repeats) for length in lengths}
    rows = [row for length in lengths for row in report(length, {name: found[length, name] for name in CONNECTORS})]
    write("vllm_pair", {"repeats": chosen.repeats, "rows": rows})


def report(length: int, found: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for connector, timed in found.items():
        for name, seconds in timed.items():
            first, rest = seconds[0], seconds[1:]
            what = name if name == connector else f"{name} ({connector})"
            row: dict[str, object] = {"tokens": length, "what": what, "first_ms": round(first * 1e3, 2)}
            row |= {"median_ms": round(statistics.median(rest) * 1e3, 2), "min_ms": round(min(rest) * 1e3, 2)}
            figures = "  ".join(f"{key.removesuffix('_ms')} {row[key]:8.1f}" for key in row if key.endswith("_ms"))
            print(f"{length:6d} tokens  {what:24s} ms: {figures}")
            rows.append(row)
    ours, theirs = (found[name][name][1:] for name in ("kvbridge", "NixlConnector"))
    ratio = {"median": statistics.median(ours) / statistics.median(theirs), "min": min(ours) / min(theirs)}
    print(f"{length:6d} tokens  kvbridge / NixlConnector: median {ratio['median']:.2f}, min {ratio['min']:.2f}")
    return [*rows, {"tokens": length, "what": "ratio", **{key: round(value, 3) for key, value in ratio.items()}}]


if __name__ == "__main__":
    main()
