"""The Dockerfile passes its linter and copies files that exist. Building it needs a registry of images."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.packaged import ROOT, pinned

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


def test_its_base_is_one_patch_version() -> None:
    assert re.findall(r"^ARG BASE=(.+)$", TEXT, re.MULTILINE) == re.findall(r"python:3\.11\.\d+-slim-bookworm", TEXT)
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) == {"${BASE}"}


def test_it_installs_only_versions_that_are_named() -> None:
    """That they go together, and that they are all, is what `make test-install` finds."""
    files = ["constraints.txt", "constraints-gpu.txt"]
    installs = re.findall(r"pip install (.+?)(?: \\)?$", TEXT, re.MULTILINE)
    assert len(installs) == 2
    for said in installs:
        assert re.findall(r"-c (\S+)", said) == files, said
        plain = [word for word in re.sub(r"-c \S+|--\S+", "", said).split() if word != ".[agent]"]
        assert set(plain) <= pinned(*(ROOT / name for name in files)).keys(), said


def test_it_runs_as_the_user_that_the_pods_name() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", TEXT, re.MULTILINE)
    assert f"runAsUser: {user}\n" in (ROOT / "deploy/kubernetes/base/pod.yaml").read_text()
