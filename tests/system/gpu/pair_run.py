"""Shared by the scripts that drive pairs of engines: options, the machine, logs to bring back, the exit code."""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "bench"))

import record


def options(about: str, *, repeats: int, limit_s: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the figures and the logs")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU: to try the script")
    parser.add_argument("--only", default="", help="pairs, by name, with commas between")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--prompts", type=int, default=2, help="prompts whose tokens are compared")
    parser.add_argument("--lengths", default="1024,8192", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--limit-s", type=float, default=limit_s, help="no pair begins after so long")
    parser.add_argument("--agent", action="append", default=[], help="an agent's option: slot_bytes=8388608")
    return parser


def chosen_from(parser: argparse.ArgumentParser) -> argparse.Namespace:
    chosen = parser.parse_args()
    assert chosen.repeats > 1, "one repeat is the first and leaves none for later"
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def machine(*names: str) -> dict[str, Any]:
    """With the versions of these packages beside those that all pairs need."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    every = (*names, "torch", "triton", "nixl", "nixl-cu13")
    return {**record.machine(), "gpus": gpus, "versions": {name: _version(name) for name in every}}


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


def exit_code(said: Iterable[object], failures: Iterable[str]) -> int:
    """1 if a comparison says NO, 2 if a pair failed otherwise, else 0."""
    if any("NO" in str(value) for value in said):
        return 1
    return 2 if any(failures) else 0
