"""The image's file is what its linter takes, and copies what is there; to build it needs a registry of images."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "image" / "Dockerfile"
TEXT = FILE.read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (constraints.txt)")
def test_the_linter_takes_it(tmp_path: Path) -> None:
    assert HADOLINT is not None
    told = subprocess.run([HADOLINT, FILE], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(TEXT.replace("WORKDIR /src", "WORKDIR src"))
    assert "DL3000" in subprocess.run([HADOLINT, wrong], capture_output=True, text=True).stdout


def test_it_copies_what_is_there_and_not_ignored() -> None:
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE) for word in line.split()]
    kept = re.findall(r"^!(.+)$", (FILE.parent / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert {folder.split("/")[0] for folder in folders} <= set(copied)


def test_it_runs_as_the_user_that_the_pods_name() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", TEXT, re.MULTILINE)
    assert f"runAsUser: {user}\n" in (ROOT / "deploy/kubernetes/base/pod.yaml").read_text()
