"""kvbridge as a user installs it: pip puts the wheel and all that its extras ask for into a clean environment."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.packaged import PROJECT, PYTHONS, ROOT, built_wheel, pinned, told

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"
EXTRAS = "agent,proxy,otel"
FILES = [ROOT / name for name in ("constraints.txt", "constraints-gpu.txt")]
CONSTRAINTS = [part for file in FILES for part in ("--constraint", str(file))]
# Older ones download every package before they say what they would install for another Python: gigabytes of CUDA.
RESOLVER = "pip==26.3"
INSTALL_S = 400  # at most, for each program: all of this file takes 70 s of processor time
OUR_PACKAGES = ("kvbridge", "kvbridge_kernels", "kvbridge_proto")
IMPORT_ALL = """
import importlib, pkgutil, sys
from pathlib import Path
for top in map(importlib.import_module, sys.argv[1:]):
    assert Path(top.__path__[0], "py.typed").exists(), top
    for module in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name)
"""

pytestmark = [pytest.mark.install, pytest.mark.timeout(INSTALL_S + 30)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Those of a clean environment, made with the pip that this Python comes with."""
    clean = tmp_path_factory.mktemp("clean")
    told([sys.executable, "-m", "venv", clean], clean)
    told(
        [clean / "bin/pip", "install", "--quiet", "--no-compile", *CONSTRAINTS, f"{wheel}[{EXTRAS}]"], clean, INSTALL_S
    )
    yield clean / "bin"
    shutil.rmtree(clean)  # 2.1 GB, which pytest would keep for three runs


def test_the_program_says_its_version_and_its_options(programs: Path, tmp_path: Path) -> None:
    assert told([programs / "kvbridge", "--version"], tmp_path) == f"kvbridge {PROJECT['version']}\n"
    assert json.loads(told([programs / "kvbridge", "config", "show", "--json"], tmp_path))["options"]
    assert "--prefill" in told([programs / "kvbridge", "proxy", "--help"], tmp_path)
    assert "No broken requirements" in told([programs / "pip", "check"], tmp_path)


def test_doctor_carries_by_every_route_that_a_cpu_has(programs: Path, tmp_path: Path) -> None:
    here = ["--device", "cpu", "--socket", str(tmp_path / "agent.sock"), "--listen", "tcp://127.0.0.1:0"]
    found = json.loads(told([programs / "kvbridge", "doctor", *here, "--json"], tmp_path, INSTALL_S))
    outcomes = {each["check"]: each["outcome"] for each in found}
    assert (outcomes["route-pull"], outcomes["route-nixl"]) == ("ok", "ok"), found
    assert {outcomes["route-direct"], outcomes["route-host"], outcomes["gpu"]} == {"not here"}


def test_every_module_can_be_imported_but_those_for_inside_an_engine(programs: Path, tmp_path: Path) -> None:
    said = told([programs / "python", "-c", IMPORT_ALL, *OUR_PACKAGES], tmp_path).splitlines()
    lacking = {(module.split(".")[2], name) for module, name in map(str.split, said)}
    assert lacking == {("vllm", "vllm"), ("sglang", "sglang")}, said


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resolver")
    told([sys.executable, "-m", "venv", folder], folder)
    told([folder / "bin/pip", "install", "--quiet", RESOLVER], folder)
    return folder / "bin/pip"


@pytest.mark.parametrize("version", [each for each in PYTHONS if each != OURS])
def test_every_other_python_that_is_named_finds_its_packages_all_pinned(
    version: str, wheel: Path, resolver: Path, tmp_path: Path
) -> None:
    target = ["--python-version", version, "--only-binary=:all:", "--target", str(tmp_path / "none")]
    asked = ["--dry-run", "--report", str(tmp_path / "report"), "--use-feature=fast-deps", *target, *CONSTRAINTS]
    told([resolver, "install", "--quiet", *asked, f"{wheel}[{EXTRAS}]"], tmp_path, INSTALL_S)
    report = json.loads((tmp_path / "report").read_text())
    found = {canonicalize_name(each["metadata"]["name"]) for each in report["install"]}
    assert {"kvbridge", "torch", "aiohttp", "opentelemetry-sdk"} <= found
    assert found - pinned(*FILES).keys() == {"kvbridge"}
