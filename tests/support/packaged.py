"""The wheel as pip would build it, and programs run away from this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kvbridge", "proto/kvbridge_proto", "kernels/kvbridge_kernels")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [each.rsplit(" ", 1)[1] for each in PROJECT["classifiers"] if each.startswith("Programming Language :: ")]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def built_wheel(folder: Path) -> Path:
    """An sdist of the sources, then a wheel of the unpacked sdist. Never from a used `build/`."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / "tree" / name)
    with tarfile.open(folder / _built("sdist", folder / "tree", folder)) as sdist:
        sdist.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return folder / _built("wheel", unpacked, folder)


def _built(kind: str, tree: Path, folder: Path) -> str:
    told = subprocess.run([sys.executable, "-c", BUILD, kind, folder], cwd=tree, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()[-1]


def pinned(*files: Path) -> dict[str, str]:
    """The version of each package that these constraints files name. Each line must name one exactly."""
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    pairs = [(Requirement(line).name, re.fullmatch(r"\S+==([\w.]+)", line)) for line in lines]
    assert all(found for _, found in pairs), lines
    return {canonicalize_name(name): found[1] for name, found in pairs if found}


def told(command: Sequence[str | Path], folder: Path, timeout_s: float = 240) -> str:
    """What it prints, run away from this checkout and without a word of it in the environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVBRIDGE"))}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
